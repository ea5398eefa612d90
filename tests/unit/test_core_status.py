"""What the status says of a run that cannot get on."""

from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.core.policy import Policy
from simulator.world import Speed, World


def test_a_run_that_finishes_says_that_its_store_is_in_the_way():
    world = World(Policy(fragment_count=4, interval_steps=8, overlap_steps=2))
    world.add_learner("a", Speed(1.0))
    world.run(until=20.0)
    machine = world.syncer
    machine.handle(ev.StorageFailed("no room"), 20.0)
    machine.handle(ev.FinishRequested(1, "enough"), 20.0)
    status = machine.status(20.0)
    assert status.phase is RunPhase.FINISHING
    assert status.reason == "enough; the syncer cannot write to its store: no room"
    machine.handle(ev.StorageRecovered(), 21.0)
    assert machine.status(21.0).reason == "enough"
