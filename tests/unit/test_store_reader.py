import os

import pytest

from decoupled_diloco.core.effects import Absentee, CloseRound
from decoupled_diloco.core.ids import Fate
from syncer_service.store.lock import StateError
from syncer_service.store.reader import open_ledger
from tests.unit.store_cases import MODEL, TestRun


def test_beside_a_living_syncer_everything_is_there_and_nothing_is_touched(tmp_path):
    run = TestRun(tmp_path).begin().commits(3)
    run.store.record_abandoned(
        CloseRound(4, 1, False, (), 3, "nothing finite is left", (Absentee("alpha", "not finite", Fate.NONFINITE),))
    )
    names = sorted(os.listdir(tmp_path))
    with open_ledger(tmp_path) as ledger:
        rounds = list(ledger.rounds())
        assert [row.outcome for row in rounds] == ["committed"] * 3 + ["abandoned"]
        assert [row.to_commit() for row in rounds[:3]] == run.rows
        assert rounds[0].members == ("alpha", "beta")
        assert [(c.learner, c.fate) for c in ledger.contributions() if c.round == 1] == [
            ("alpha", "merged"),
            ("beta", "merged"),
            ("gamma", "absent"),
            ("delta", "late"),
        ]
        [refused] = rounds[3].contributions
        assert (refused.fate, refused.reason, refused.token_count) == ("nonfinite", "not finite", None)
        assert ledger.run() == ("test", 2, 1)
        assert ledger.model() == MODEL
        assert ledger.state().newest_opened == 3
        assert [str(stored.version) for stored in ledger.versions()] == ["1.1", "1.1", "1.2", "1.2", "1.3"]
        assert [(i.incarnation, i.learner) for i in ledger.incarnations()] == [(1, "alpha"), (2, "beta")]
        assert [line.origin for line in ledger.timelines()] == ["initial"]
        [start] = ledger.starts()
        assert (start.epoch, start.pid, start.ended_at) == (1, os.getpid(), None)
        run.commit()  # what a reader sees is of one moment
        assert len(list(ledger.rounds())) == 4
    assert sorted(os.listdir(tmp_path)) == names
    with open_ledger(tmp_path) as ledger:
        assert [row.round for row in ledger.rounds()] == [1, 2, 3, 4]
        assert list(ledger.rounds())[-1].outcome == "committed"
    run.close()
    with open_ledger(tmp_path) as ledger:
        assert ledger.starts()[0].ended_at is not None
        # the newest state is of before the last commit was booked
        assert ledger.slot_cursors() == {0: 3, 1: 3}


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(StateError, match="holds no run"), open_ledger(tmp_path):
        pass
    (tmp_path / "ledger.sqlite3").write_bytes(b"no database at all" * 100)
    with pytest.raises(StateError, match="is damaged"), open_ledger(tmp_path):
        pass
