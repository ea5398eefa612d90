"""The syncer's ledger as evidence, also of a run whose disk was lost."""

from __future__ import annotations

import pytest

from chaos.ledger_file import holds_run, read_ledger
from decoupled_diloco.core.restoring import in_new_timeline
from syncer_service.store.durable import DurableStore
from tests.unit.store_cases import FRAGMENTS, MODEL, POLICY, TestRun


def test_rounds_versions_and_the_newest_state_are_read(tmp_path):
    run = TestRun(tmp_path / "state").begin().commits(5)
    run.close()
    ledger = read_ledger([tmp_path / "state"], POLICY)
    assert [row.round for row in ledger.rounds] == [1, 2, 3, 4, 5]
    assert ledger.rounds[2].members == ("alpha", "beta")
    assert [[version.number for version in versions] for versions in ledger.versions] == [[1, 2, 3, 4], [1, 2, 3]]
    assert ledger.state.versions == tuple(versions[-1] for versions in ledger.versions)
    assert ledger.kept_rounds() == ledger.rounds


def test_what_a_lost_disk_had_and_its_mirror_had_not_is_known_and_does_not_count(tmp_path):
    lost = TestRun(tmp_path / "lost").begin().commits(3)
    cut, values = lost.state, {p: commit.state for p, commit in lost.store.newest().items()}
    lost.commits(2)
    lost.close()
    store = DurableStore(tmp_path / "state", POLICY)
    store.begin("test", {}, FRAGMENTS)
    store.save_model(MODEL)
    store.roll_back(values, in_new_timeline(cut, None, POLICY, "the disk was lost"))
    store.close()

    ledger = read_ledger([tmp_path / "lost", tmp_path / "state"], POLICY)
    assert [row.round for row in ledger.rounds] == [1, 2, 3, 4, 5]
    assert [row.round for row in ledger.kept_rounds()] == [1, 2, 3]
    assert ledger.state.timeline > 1
    assert [str(version) for version in ledger.versions[1]] == ["1.1", "1.2", "1.3", f"{ledger.state.timeline}.3"]


def test_a_state_directory_holds_a_run_once_it_has_versions(tmp_path):
    assert not holds_run(tmp_path)
    (tmp_path / "ledger.sqlite3").touch()
    assert not holds_run(tmp_path)
    with pytest.raises(Exception, match="no such table"):
        read_ledger([tmp_path], POLICY)
    run = TestRun(tmp_path / "state")
    run.open()
    assert not holds_run(tmp_path / "state")
    run.close()
    run.begin()
    assert holds_run(tmp_path / "state")
    run.close()
