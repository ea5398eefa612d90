"""Files that are torn, cut, flipped, missing or of another run: found, said, and gone on from what is whole."""

import random
import shutil
from dataclasses import replace

import numpy as np
import pytest

from decoupled_diloco.arrays.outer import FragmentState, outer_step
from decoupled_diloco.core.restoring import TIMELINES_SKIPPED_BY_COPY
from syncer_service.store.lock import StateError
from syncer_service.store.reader import open_ledger
from syncer_service.store.records import PREFIX_BYTES
from tests.unit.store_cases import FRAGMENTS, SIZES, TestRun, assert_same_commits, assert_same_state

COMMITS = 10
INTERVAL = 3


@pytest.fixture(scope="module")
def history(tmp_path_factory):
    """A closed run, and the values of every version that it ever had: by fragment and number."""
    run = TestRun(tmp_path_factory.mktemp("history") / "state", INTERVAL).begin()
    known = {(f, c.version.number): c.state for f, c in run.store.newest().items()}
    for _ in range(COMMITS):
        commit = run.commit()
        known[commit.fragment, commit.version.number] = commit.state
    run.close()
    return run, known


@pytest.fixture
def copy(history, tmp_path):
    run, _ = history
    shutil.copytree(run.path, tmp_path / "copy")
    return TestRun(tmp_path / "copy", INTERVAL)


def segments(run, fragment):
    """A fragment's segments, oldest first."""
    folder = run.path / "fragments" / f"{fragment:04d}"
    return sorted(folder.glob("*.seg"), key=lambda path: int(path.name.split(".")[1]))


def flip(path, offset, bit=0):
    raw = bytearray(path.read_bytes())
    raw[offset] ^= 1 << bit
    path.write_bytes(raw)


def records_of(run, fragment):
    with open_ledger(run.path) as ledger:
        return [stored for stored in ledger.versions() if stored.fragment == fragment]


def check_fallen_back(run, known, fragment, number):
    """The fragment goes on from `number`, in a new timeline; the others have what they had."""
    state_before = open_state(run)
    restored = run.open().restored()
    assert len(restored.losses) == 1
    assert_same_state(restored.fragments[fragment].state, known[fragment, number])
    for other in range(FRAGMENTS):
        commit = restored.fragments[other]
        newest = max(n for f, n in known if f == other)
        assert (commit.version.timeline, commit.version.number) == (2, newest + 1)
        if other != fragment:
            assert_same_state(commit.state, known[other, newest])
    assert restored.newer == ()
    state = restored.state
    assert state.versions == tuple(restored.fragments[f].version for f in range(FRAGMENTS))
    assert state.timeline == 2
    assert all(learner.must_join_again for learner in state.learners)
    assert state.newest_incarnation > state_before.newest_incarnation
    lost_count = max(n for f, n in known if f == fragment) - number
    with open_ledger(run.path) as ledger:
        lost = [row for row in ledger.rounds() if row.outcome == "lost"]
        assert len(lost) == lost_count
        assert {row.fragment for row in lost} <= {fragment}
        assert ledger.timelines()[1].origin == "fallback"
        assert ledger.timelines()[1].reason == restored.losses[0]
        assert ledger.state() == state
    assert state.ledger.discarded_tokens["rolled_back"][fragment] >= 150 * lost_count
    # what was decided is durable
    fragments = restored.fragments
    run.close()
    again = run.open().restored()
    assert again.losses == ()
    assert again.state == state
    assert_same_commits(fragments, again.fragments)
    run.close()
    return restored.losses[0]


def open_state(run):
    with open_ledger(run.path) as ledger:
        return ledger.state()


def test_a_flipped_bit_in_the_newest_delta_loses_that_round(copy, history):
    path = segments(copy, 1)[-1]
    flip(path, path.stat().st_size - 1)
    loss = check_fallen_back(copy, history[1], 1, 5)
    assert loss.startswith("fragment 1: ")
    assert "section delta at byte" in loss
    assert "so version 1.6 is lost; round 10 had merged 150 tokens of alpha, beta into it" in loss
    assert loss.endswith("it goes on from version 1.5")


def test_a_damaged_base_loses_its_segment_and_the_one_before_takes_over(copy, history):
    path = segments(copy, 0)[-1]
    flip(path, PREFIX_BYTES + 3)
    loss = check_fallen_back(copy, history[1], 0, 3)
    assert "the header of the record at byte 0 has another digest" in loss
    assert "1.4, 1.5, 1.6 is lost" in loss


def test_a_missing_segment(copy, history):
    segments(copy, 0)[-1].unlink()
    assert "is not there, so version 1.4, 1.5, 1.6 is lost" in check_fallen_back(copy, history[1], 0, 3)


def test_a_torn_record(copy, history):
    path = segments(copy, 0)[-1]
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 10)
    assert "the file ends at byte" in check_fallen_back(copy, history[1], 0, 5)


def test_a_file_of_another_run_is_told_from_a_damaged_one(copy, history, tmp_path):
    other = TestRun(tmp_path / "other", INTERVAL, run_id="another").begin().commits(COMMITS).close()
    shutil.copyfile(segments(other, 0)[-1], segments(copy, 0)[-1])
    loss = check_fallen_back(copy, history[1], 0, 3)
    assert "the record is of run another in another state directory, not of run test in this one" in loss


def test_a_file_of_another_fragment_is_told_from_a_damaged_one(copy, history):
    shutil.copyfile(segments(copy, 1)[-1], segments(copy, 0)[-1])
    loss = check_fallen_back(copy, history[1], 0, 3)
    assert "is version 1.4 of fragment 1, where version 1.4 of fragment 0 was written" in loss


def test_an_older_file_in_place_of_a_newer_one(copy, history):
    old, new = segments(copy, 0)
    shutil.copyfile(old, new)
    assert "where version 1.4 of fragment 0 was written" in check_fallen_back(copy, history[1], 0, 3)


def test_nothing_whole_of_a_fragment_is_refused_and_nothing_is_touched(copy):
    for path in segments(copy, 0):
        flip(path, 8)
    before = {path: path.read_bytes() for path in copy.path.rglob("*.seg")}
    with pytest.raises(StateError, match="no version of fragment 0 is whole.*checkpoint or its mirror"):
        copy.open()
    assert {path: path.read_bytes() for path in copy.path.rglob("*.seg")} == before


def test_damage_after_a_roll_back_does_not_undo_it(copy, history):
    """The value before a roll-back is not one to go on from."""
    run = copy
    run.open()
    run.state = run.store.restored().state
    states = {f: history[1][f, 2] for f in range(FRAGMENTS)}
    run.roll_back(states)
    run.close()
    flip(segments(run, 0)[-1], 8)
    with pytest.raises(StateError, match="no version of fragment 0 is whole"):
        run.open()


def test_a_second_fallback_to_the_copy_that_the_first_one_made(copy, history):
    """The damaged version of a fallback has the bits of the version before it: nothing is lost at all."""
    path = segments(copy, 1)[-1]
    flip(path, path.stat().st_size - 1)
    copy.open()
    fragments = copy.store.newest()
    copy.close()
    flip(segments(copy, 0)[-1], 8)
    restored = copy.open().restored()
    assert [c.version.timeline for c in restored.fragments.values()] == [3, 3]
    for fragment, commit in restored.fragments.items():
        assert_same_state(commit.state, fragments[fragment].state)
    copy.close()


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_to_payloads_only_whole_versions_come_back(copy, history, seed):
    """Seeded: up to three files are cut, flipped, overwritten or removed anywhere."""
    known, chance = history[1], random.Random(seed)
    for _ in range(chance.randint(1, 3)):
        path = chance.choice(sorted(copy.path.rglob("*.seg")))
        harm(path, chance)
        if not path.exists():
            break
    check_values(copy, known)


@pytest.mark.parametrize("seed", range(60))
def test_whatever_happens_to_the_ledger_only_whole_versions_come_back(history, tmp_path, seed):
    """Seeded: the ledger or its log, of a syncer that was killed, is cut, flipped or overwritten anywhere."""
    chance = random.Random(seed)
    live = TestRun(tmp_path / "live", INTERVAL).begin()
    if chance.random() < 0.5:
        live.commits(4).close()
        live.open()
        live.commits(COMMITS - 4)
    else:
        live.commits(COMMITS)
    shutil.copytree(live.path, tmp_path / "copy")
    live.close()
    names = [name for name in ("ledger.sqlite3", "ledger.sqlite3-wal") if (tmp_path / "copy" / name).stat().st_size]
    harm(tmp_path / "copy" / chance.choice(names), chance)
    (tmp_path / "copy" / "ledger.sqlite3-shm").unlink(missing_ok=True)
    check_values(TestRun(tmp_path / "copy", INTERVAL), history[1])


def harm(path, chance):
    size = path.stat().st_size
    match chance.randrange(5):
        case 0:
            path.unlink()
        case 1:
            with path.open("rb+") as file:
                file.truncate(chance.randrange(size))
        case 2:
            flip(path, chance.randrange(size), chance.randrange(8))
        case 3:
            raw = bytearray(path.read_bytes())
            start = chance.randrange(size)
            length = min(chance.choice([1, 16, 512, 4096]), size - start)
            raw[start : start + length] = chance.randbytes(length)
            path.write_bytes(raw)
        case 4:
            with path.open("ab") as file:
                file.write(chance.randbytes(chance.randint(1, 2000)))


def check_values(run, known):
    """It is refused in words, or every fragment has the bits of a version, and says so if it is not the newest."""
    try:
        restored = run.open().restored()
    except StateError:
        return
    try:
        if restored is None or not restored.fragments:
            return
        for fragment, commit in restored.fragments.items():
            digests = {n: state for (f, n), state in known.items() if f == fragment}
            same = [n for n, state in digests.items() if state.theta.tobytes() == commit.state.theta.tobytes()]
            assert same
            assert_same_state(commit.state, digests[same[0]])
            if not restored.losses:
                assert commit.version.number == same[0]
        run.state = restored.state
        machine_state = run.booked(restored)
        assert machine_state.versions == tuple(restored.fragments[f].version for f in range(FRAGMENTS))
        run.commits(3)
    finally:
        run.close()


def test_a_ledger_that_went_back_is_noticed_by_the_payloads_after_it(tmp_path):
    """An older copy of the ledger was put back, or its log was cut: the rounds after it may be with learners."""
    run = TestRun(tmp_path / "state", INTERVAL).begin().commits(7)
    run.close()
    shutil.copyfile(run.path / "ledger.sqlite3", tmp_path / "old")
    before = run.open().newest()
    run.commits(3).close()
    shutil.copyfile(tmp_path / "old", run.path / "ledger.sqlite3")
    restored = run.open().restored()
    assert len(restored.losses) == 3
    assert "fragment 1: version 1.5 of round 8 is lost, because the ledger has lost" in "\n".join(restored.losses)
    for fragment, commit in restored.fragments.items():
        assert_same_state(commit.state, before[fragment].state)
    timeline = 1 + TIMELINES_SKIPPED_BY_COPY  # what else came after the copy is not known
    assert [str(version) for version in restored.state.versions] == [f"{timeline}.7", f"{timeline}.7"]
    assert restored.state.timeline == timeline
    assert restored.state.newest_opened >= 10
    run.state = restored.state
    run.commits(2).close()


def test_one_record_that_the_ledger_does_not_know_is_a_commit_that_was_cut_short(tmp_path):
    run = TestRun(tmp_path / "state", INTERVAL).begin().commits(7)
    run.close()
    shutil.copyfile(run.path / "ledger.sqlite3", tmp_path / "old")
    before = run.open().newest()
    run.commit()
    run.close()
    shutil.copyfile(tmp_path / "old", run.path / "ledger.sqlite3")
    restored = run.open().restored()
    assert restored.losses == ()
    assert_same_commits(before, restored.fragments)
    run.close()


def test_arithmetic_that_gives_other_bits_is_noticed(copy, history, monkeypatch):
    """The files are whole, and what is worked out from them is not what it was: another library, a bad processor."""
    steps = 0

    def wrong_at_the_last(state, delta, **arguments):
        nonlocal steps
        step = outer_step(state, delta, **arguments)
        if delta.size == SIZES[1]:
            steps += 1
            if step.state.theta.tobytes() == history[1][1, 6].theta.tobytes():
                return replace(step, state=FragmentState.initial(step.state.theta + np.float32(1e-3)))
        return step

    monkeypatch.setattr("syncer_service.store.payloads.outer_step", wrong_at_the_last)
    loss = check_fallen_back(copy, history[1], 1, 5)
    assert "version 1.6 comes out with another digest than it had, so version 1.6 is lost" in loss
    assert steps >= 4  # once without a look at every version, once with it
