"""An operator takes learners off a run and lets them back in, over real sockets."""

import json

import pytest

from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import LearnerState
from syncer_service.store.interface import StorageError
from tests.integration.protocol_link import Link
from tests.integration.syncers import machine_of, syncer, until
from tests.integration.test_syncerctl import ctl, quiet_logs, training  # noqa: F401 (a fixture)


def state_of(running, learner):
    return next(status.state for status in machine_of(running).learners(0.0) if status.learner == learner)


async def test_a_drained_learner_answers_once_more_and_leaves(tmp_path):
    async with training(tmp_path) as running:
        text = await ctl(running, "drain", "a", "--reason", "maintenance")
        assert "a is draining: maintenance" in text
        await until(running, lambda: state_of(running, "a") is LearnerState.LEFT)
        assert (await ctl(running, "drain", "a", code=4)).startswith("syncerctl: 'a' is not registered; registered: b")


async def test_an_evicted_learner_stays_out_until_it_is_readmitted(tmp_path):
    async with training(tmp_path) as running:
        out = json.loads(await ctl(running, "evict", "a", "--reason", "bad host", "--yes", "--json"))
        assert out == {"learner_id": "a", "done": "evicted"}
        assert state_of(running, "a") is LearnerState.LEFT
        refused = await ctl(running, "readmit", "b", code=4)
        assert "'b' is not evicted; evicted: a" in refused

        link = Link(str(running.addresses.data), "a")
        with pytest.raises(PeerError, match="bad host") as refusal:
            await link.join()
        assert refusal.value.reason is Reason.EVICTED
        await ctl(running, "readmit", "a")
        assert (await link.join()).incarnation > 2
        await link.close()


async def test_an_operator_is_told_what_holds_while_the_store_cannot_write(tmp_path, monkeypatch):
    def full(*_):
        raise StorageError("no room")

    async with training(tmp_path) as running:
        with monkeypatch.context() as patched:
            patched.setattr(running.serving.store, "save_state", full)
            for command in (["pause"], ["evict", "a", "--yes"], ["resume"]):
                text = await ctl(running, *command, code=4)
                assert "it is in effect, but a restart of the syncer would undo it: " in text
                assert "no room; call again" in text
        assert state_of(running, "a") is LearnerState.LEFT
        assert "a is evicted" in await ctl(running, "evict", "a", "--yes")


async def test_who_does_not_say_yes_evicts_nobody(tmp_path):
    async with syncer(tmp_path) as running:
        link = Link(str(running.addresses.data), "a")
        await link.join()
        text = await ctl(running, "evict", "a", code=1)
        assert "Evict a? Its steps since its last merged contribution are lost" in text
        assert not machine_of(running).membership.evicted
        await link.close()
