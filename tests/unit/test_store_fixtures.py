"""State directories that earlier releases wrote open with this one, and the run goes on."""

import json
import shutil

import pytest

from decoupled_diloco.core.effects import CommitRound
from decoupled_diloco.core.plain import from_plain
from decoupled_diloco.core.run_state import RunState
from syncer_service.store.reader import open_ledger
from syncer_service.store.schema import SCHEMA_VERSION
from tests.unit.store_cases import TestRun, assert_same_commits
from tests.unit.store_fixture import FIXTURES, describe

VERSIONS = range(1, SCHEMA_VERSION + 1)


@pytest.fixture
def run(request, tmp_path):
    name = f"state-v{request.param}"
    shutil.copytree(FIXTURES / name, tmp_path / name)
    run = TestRun(tmp_path / name, base_interval=3)
    run.open()
    yield run
    run.close()


@pytest.mark.parametrize("run", VERSIONS, indirect=True)
def test_what_an_earlier_release_wrote_is_read_bit_for_bit(run):
    expected = json.loads((FIXTURES / f"{run.path.name}.json").read_text(encoding="utf-8"))
    assert from_plain(RunState, expected.pop("state")) == run.store.restored().state
    assert from_plain(tuple[CommitRound, ...], expected.pop("newer")) == run.store.restored().newer
    found = json.loads(json.dumps(describe(run.store)))
    assert {name: found[name] for name in expected} == expected


@pytest.mark.parametrize("run", VERSIONS, indirect=True)
def test_a_run_of_an_earlier_release_goes_on(run):
    run.booked(run.store.restored())
    run.commits(8)
    after = run.store.newest()
    run.close()
    restored = run.open().restored()
    assert restored.losses == ()
    assert_same_commits(after, restored.fragments)
    with open_ledger(run.path) as ledger:
        assert [row.round for row in ledger.rounds()] == list(range(1, 21))
        assert [row.epoch for row in ledger.rounds()] == [1] * 7 + [2] * 5 + [3] * 8
