import os
import sqlite3
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.effects import CloseRound
from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.runtime import failpoints
from syncer_service.store import ledger, schema
from syncer_service.store.durable import DurableStore
from syncer_service.store.interface import FencedError, StorageError, VersionGoneError
from syncer_service.store.lock import StateError
from syncer_service.store.reader import open_ledger
from syncer_service.store.schema import SCHEMA_VERSION
from tests.unit.store_cases import CONFIG, FRAGMENTS, MODEL, POLICY, SIZES, TestRun, assert_same_commits, values


def test_a_directory_that_is_new_holds_no_run(tmp_path):
    run = TestRun(tmp_path / "state")
    assert run.open().restored() is None
    assert run.store.epoch == 1
    run.close()
    assert run.open().restored() is None
    assert run.store.epoch == 2
    run.close()


@pytest.mark.parametrize("encoding", ["bf16", "float32"])
@pytest.mark.parametrize("base_interval", [1, 2, 3, 64])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_what_was_committed_is_there_again_bit_for_bit(tmp_path, base_interval, encoding, count):
    run = TestRun(tmp_path, base_interval, encoding).begin().commits(count)
    before = run.store.newest()
    run.close()
    restored = run.open().restored()
    assert_same_commits(before, restored.fragments)
    assert_same_commits(before, run.store.newest())
    assert restored.losses == ()
    assert restored.model == MODEL
    assert restored.config_values == CONFIG
    assert 0 <= restored.stopped_seconds < 60
    run.commits(3)
    after = run.store.newest()
    run.close()
    assert_same_commits(after, run.open().restored().fragments)
    run.close()


def test_the_newest_round_is_told_apart_from_the_state_beside_it(tmp_path):
    run = TestRun(tmp_path).begin().commits(3)
    expected = run.state
    run.close()
    restored = run.open().restored()
    assert restored.newer == (run.rows[-1],)
    assert [r.number for r in restored.state.open_rounds] == [3]
    booked = run.booked(restored)
    assert (booked.versions, booked.ledger, booked.slot_cursors) == (
        expected.versions,
        expected.ledger,
        expected.slot_cursors,
    )
    run.store.save_state(booked)
    run.close()
    assert run.open().restored().newer == ()
    run.close()


def test_a_state_saved_late_does_not_hide_a_commit(tmp_path):
    """The state of a join may have been taken before a commit and be written after it."""
    run = TestRun(tmp_path).begin()
    before = run.state
    run.commits(2)
    run.store.save_state(before)
    run.close()
    assert run.open().restored().newer == tuple(run.rows)
    run.close()


def test_initial_parameters_that_were_committed_after_the_state_make_the_run_run(tmp_path):
    run = TestRun(tmp_path).begin()
    assert run.store.restored() is None
    run.close()
    restored = run.open().restored()
    assert restored.state.phase is RunPhase.RUNNING
    assert restored.state.versions == tuple(c.version for c in restored.fragments.values())
    assert [learner.learner for learner in restored.state.learners] == ["alpha", "beta"]
    run.close()


def test_initial_parameters_count_all_or_not_at_all(tmp_path):
    run = TestRun(tmp_path)
    store = run.open()
    store.save_state(run.state)
    store.stage_initial("alpha", 1, 0, values(0, 0))
    with pytest.raises(ValueError, match="1 of 2 fragments are staged"):
        store.commit_initial("alpha", 1, FRAGMENTS)
    run.close()
    restored = run.open().restored()
    assert restored.state.phase is RunPhase.INITIALIZING
    assert restored.fragments == {}
    run.close()


def test_holders_of_the_version_before_are_served_the_delta_after_a_restart_too(tmp_path):
    run = TestRun(tmp_path, base_interval=4).begin().commits(4)
    before = run.store.newest()
    run.close()
    after = run.open().newest()
    for fragment, commit in before.items():
        assert after[fragment].delta_base == commit.delta_base
        assert bytes(after[fragment].delta_payload) == bytes(commit.delta_payload)
    run.close()


def test_minus_zero_stays_minus_zero(tmp_path):
    run = TestRun(tmp_path).begin()
    states = {f: FragmentState(*(np.full(SIZES[f], -0.0, np.float32) for _ in range(3))) for f in range(FRAGMENTS)}
    run.roll_back(states)
    run.close()
    fragments = run.open().restored().fragments
    assert all(np.signbit(commit.state.momentum).all() for commit in fragments.values())
    run.close()


def test_old_segments_are_removed_and_only_the_newest_version_is_kept(tmp_path):
    run = TestRun(tmp_path, base_interval=3).begin()
    first = run.store.newest()[0]
    assert run.store.find(0, first.version) is first
    run.commits(40)
    names = [path.name for path in sorted((tmp_path / "fragments" / "0000").iterdir())]
    assert names == ["1.16.1.seg", "1.19.1.seg"]
    with pytest.raises(VersionGoneError, match=r"newest: 1\.21"):
        run.store.find(0, first.version)
    run.close()


def test_a_state_of_before_a_roll_back_cannot_come_after_it(tmp_path):
    run = TestRun(tmp_path).begin().commits(3)
    before = run.state
    run.roll_back({fragment: commit.state for fragment, commit in run.store.newest().items()})
    with pytest.raises(ValueError, match="a state of timeline 1 cannot follow one of timeline 2"):
        run.store.save_state(before)
    run.close()
    assert run.open().restored().state == run.state
    run.close()


def test_a_roll_back_is_one_step_and_survives(tmp_path):
    run = TestRun(tmp_path).begin().commits(5)
    states = {fragment: FragmentState.initial(values(fragment, 77)) for fragment in range(FRAGMENTS)}
    commits = run.roll_back(states)
    assert [str(commit.version) for commit in commits] == ["2.5", "2.4"]
    assert [commit.version for commit in commits] == list(run.state.versions)
    run.close()
    restored = run.open().restored()
    assert restored.state == run.state
    assert restored.newer == ()
    assert_same_commits({commit.fragment: commit for commit in commits}, restored.fragments)
    run.commits(3)
    with open_ledger(tmp_path) as ledger:
        assert [line.origin for line in ledger.timelines()] == ["initial", "roll_back"]
        assert [row.outcome for row in ledger.rounds()] == ["committed"] * 8
    run.close()


# --- one writer ---


def test_a_second_syncer_is_refused_with_the_name_of_the_first(tmp_path):
    run = TestRun(tmp_path).begin()
    with pytest.raises(StateError, match=f"in use by another syncer .process {os.getpid()} on host "):
        DurableStore(tmp_path, POLICY)
    run.commit()
    run.close()
    assert run.open().epoch == 2
    run.close()


def contents(folder):
    """Everything that a syncer could have written."""
    with closing(sqlite3.connect(folder / "ledger.sqlite3")) as connection:
        rows = list(connection.iterdump())
    return rows, {path: path.read_bytes() for path in folder.rglob("*.seg")}


def test_a_syncer_that_lost_its_epoch_writes_nothing(tmp_path):
    """As on a shared file system whose locks do not reach the other host."""
    run = TestRun(tmp_path, base_interval=3).begin().commits(3)
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as connection, connection:
        connection.execute("UPDATE run SET epoch = 2")
        connection.execute("INSERT INTO starts VALUES (2, 0, NULL, 'elsewhere', 4711, NULL)")
    before = contents(tmp_path)
    failpoints.arm("commit.in_payload_write=enospc@1+")  # not even a payload is begun
    commit, delta, row, state = run.next_round()
    states = {fragment: FragmentState.initial(values(fragment, 7)) for fragment in range(FRAGMENTS)}
    for write in (
        lambda: run.store.commit_round(commit, delta, row, state),
        lambda: run.store.save_state(state),
        lambda: run.store.save_model(MODEL),
        lambda: run.store.begin("test", {"changed": "1"}, FRAGMENTS),
        lambda: run.store.record_abandoned(CloseRound(9, 0, False, (), 8, "nothing")),
        lambda: run.store.roll_back(states, run.state),
        run.store.probe,
    ):
        with pytest.raises(FencedError, match=r"another syncer \(process 4711 on host elsewhere\) has taken"):
            write()
    run.store.stage_initial("a", 1, 0, values(0, 0))
    run.store.stage_initial("a", 1, 1, values(1, 0))
    with pytest.raises(FencedError):
        run.store.commit_initial("a", 1, FRAGMENTS)
    failpoints.arm("")
    assert contents(tmp_path) == before
    run.close()
    assert contents(tmp_path) == before


def test_a_syncer_that_loses_its_epoch_between_payload_and_transaction_commits_nothing(tmp_path, monkeypatch):
    run = TestRun(tmp_path, base_interval=3).begin().commits(3)
    before = run.store.newest()

    def lose(point):
        if point == "commit.after_payload_sync":
            with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as connection, connection:
                connection.execute("UPDATE run SET epoch = 2")

    monkeypatch.setattr("syncer_service.store.payloads.failpoints.hit", lose)
    with pytest.raises(FencedError):
        run.commit()
    run.close()
    assert_same_commits(before, run.open().restored().fragments)
    run.close()


# --- directories that do not fit ---


def test_another_run_is_refused(tmp_path):
    TestRun(tmp_path).begin().close()
    with pytest.raises(StateError, match="holds the run 'test', the run file says run.id = 'other'"):
        TestRun(tmp_path, run_id="other").open()


def test_another_number_of_fragments_is_refused(tmp_path):
    TestRun(tmp_path).begin().close()
    with pytest.raises(StateError, match="has 2 fragments, the run file says 3; their number cannot change"):
        DurableStore(tmp_path, Policy(fragment_count=3))


def test_a_newer_schema_is_refused_and_left_alone(tmp_path):
    TestRun(tmp_path).begin().close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    before = contents(tmp_path)
    with pytest.raises(StateError, match=f"has schema version {SCHEMA_VERSION + 1}, this release knows up to"):
        TestRun(tmp_path).open()
    assert contents(tmp_path) == before


def test_an_older_schema_is_migrated_step_by_step(tmp_path, monkeypatch):
    TestRun(tmp_path).begin().commits(2).close()
    step = "ALTER TABLE model ADD COLUMN more TEXT;\nCREATE TABLE more (a INTEGER); -- one; with a semicolon\n"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, step))
    monkeypatch.setattr(ledger, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    run = TestRun(tmp_path)
    assert len(run.open().restored().newer) == 1
    run.close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (SCHEMA_VERSION + 1,)
        assert connection.execute("SELECT count(*) FROM more").fetchone() == (0,)


def test_a_migration_that_fails_leaves_the_ledger_as_it_was(tmp_path, monkeypatch):
    TestRun(tmp_path).begin().close()
    before = contents(tmp_path)
    step = "CREATE TABLE more (a INTEGER);\nCREATE TABLE run (a INTEGER);\n"
    monkeypatch.setattr(schema, "MIGRATIONS", (*schema.MIGRATIONS, step))
    monkeypatch.setattr(ledger, "SCHEMA_VERSION", SCHEMA_VERSION + 1)
    with pytest.raises(StateError, match="table run already exists"):
        TestRun(tmp_path).open()
    assert contents(tmp_path) == before


def test_a_database_of_another_program_is_refused(tmp_path):
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as connection, connection:
        connection.execute("CREATE TABLE things (a)")
    with pytest.raises(StateError, match="is an SQLite file of another program"):
        TestRun(tmp_path).open()


def test_payloads_without_a_ledger_are_refused(tmp_path):
    TestRun(tmp_path).begin().close()
    (tmp_path / "ledger.sqlite3").unlink()
    with pytest.raises(StateError, match="is missing, and payloads of a run are beside it; restore the run from"):
        TestRun(tmp_path).open()
    assert not (tmp_path / "ledger.sqlite3").exists()


# --- what goes into the ledger besides ---


def test_values_of_the_run_file_that_change_are_taken_down(tmp_path):
    run = TestRun(tmp_path).begin()
    run.store.begin("test", CONFIG, FRAGMENTS)
    run.store.begin("test", {"run.id": "test", "outer.learning_rate": "0.6", "outer.momentum": "0.5"}, FRAGMENTS)
    run.close()
    with open_ledger(tmp_path) as opened:
        assert [(c.name, c.old, c.new) for c in opened.policy_changes()] == [
            ("outer.learning_rate", "0.7", "0.6"),
            ("outer.momentum", None, "0.5"),
        ]
        assert opened.config_values()["outer.learning_rate"] == "0.6"


def test_learners_and_slots_are_taken_down_as_the_state_has_them(tmp_path, monkeypatch):
    run = TestRun(tmp_path).begin().commits(2)
    late = replace(run.state.learners[0], incarnation=3, slot=5, peer_address="10.0.0.7:4711")
    state = replace(
        run.state,
        learners=(late, run.state.learners[1]),
        slot_cursors={**run.state.slot_cursors, 5: 12},
        evicted={"beta": "it sent nonsense"},
    )
    with monkeypatch.context() as patched:  # the transaction fails after the rows were written
        patched.setattr(run.store._ledger, "put_state", fails_after(run.store._ledger.put_state))
        with pytest.raises(StorageError, match="disk is full"):
            run.store.save_state(state)
    with open_ledger(tmp_path) as opened:
        assert [i.incarnation for i in opened.incarnations()] == [1, 2]
    run.store.save_state(state)
    with open_ledger(tmp_path) as opened:
        assert [(i.incarnation, i.learner, i.slot) for i in opened.incarnations()] == [
            (1, "alpha", 0),
            (2, "beta", 1),
            (3, "alpha", 5),
        ]
        alpha, beta = opened.learners()
        assert (alpha.incarnation, alpha.slot, alpha.cursor, alpha.evicted) == (3, 5, 2, None)
        assert (beta.incarnation, beta.evicted, beta.lost) == (2, "it sent nonsense", False)
        assert opened.slot_cursors() == {0: 2, 1: 2, 5: 12}
    run.close()


def fails_after(work):
    def wrapped(*arguments):
        work(*arguments)
        raise sqlite3.OperationalError("database or disk is full")

    return wrapped


def test_a_file_that_is_in_the_way_of_a_new_segment_is_replaced(tmp_path):
    run = TestRun(tmp_path, base_interval=1).begin()
    (tmp_path / "fragments" / "0000" / "1.2.1.seg").write_bytes(b"left behind by an attempt that failed")
    commit = run.commit()
    run.close()
    assert_same_commits({0: commit}, {0: run.open().restored().fragments[0]})
    run.close()


def test_a_version_that_the_ledger_does_not_list_is_not_passed_over(tmp_path):
    TestRun(tmp_path).begin().commits(3).close()
    with closing(sqlite3.connect(tmp_path / "ledger.sqlite3")) as connection, connection:
        connection.execute("DELETE FROM versions WHERE round = 3")
    with pytest.raises(StateError, match="version 1.2 of fragment 0 is the newest that was written down.*says 1.3"):
        TestRun(tmp_path).open()


def test_an_abandoned_round_that_is_opened_again_may_commit(tmp_path):
    run = TestRun(tmp_path).begin()
    run.store.record_abandoned(CloseRound(1, 0, False, (), 0, "fewer than two were complete"))
    run.close()
    run.open()
    run.commit()
    run.store.record_abandoned(CloseRound(1, 0, False, (), 0, "a late word of it changes nothing"))
    with open_ledger(tmp_path) as opened:
        assert [(row.round, row.outcome) for row in opened.rounds()] == [(1, "committed")]
    run.close()


def test_a_closed_store_says_so(tmp_path):
    run = TestRun(tmp_path).begin()
    run.close()
    with pytest.raises(StorageError, match="the store is closed"):
        run.store.save_state(run.state)
    run.close()
