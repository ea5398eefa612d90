"""The simulated disk loses what a disk may lose, and the simulated store keeps the rules of the durable one."""

from __future__ import annotations

import pytest

from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.policy import Policy
from simulator.disk import DiskFullError, SimulatedDisk
from simulator.learner_process import Speed
from simulator.store import FencedError, SimulatedStore, UnreadableError, payload_file
from simulator.world import World

POLICY = Policy(fragment_count=2, interval_steps=4, overlap_steps=1)


def run_of(seconds: float, base_interval: int = 4) -> World:
    world = World(POLICY, base_interval=base_interval)
    for name in ("a", "b"):
        world.add_learner(name, Speed(1.0))
    world.run(until=seconds)
    assert len(world.syncer.versions) == 2
    return world


def test_a_crash_leaves_what_was_synced_and_maybe_more() -> None:
    for share, left in ((0.0, 1), (0.5, 2), (0.99, 3)):
        disk = SimulatedDisk()
        disk.append("file", "durable")
        disk.sync("file")
        disk.append("file", "maybe")
        disk.append("file", "perhaps")
        disk.crash(lambda share=share: share)  # type: ignore[misc]
        records = disk.file("file").records
        assert len(records) == left
        assert records[0].content == "durable"
        assert [record.damaged for record in records] == [False] + [
            i == left - 1 and share < 0.5 for i in range(1, left)
        ]


def test_a_full_disk_takes_nothing_and_keeps_everything() -> None:
    disk = SimulatedDisk()
    disk.append("file", 1)
    disk.full = True
    with pytest.raises(DiskFullError):
        disk.append("file", 2)
    assert [record.content for record in disk.file("file").records] == [1]


def test_an_older_syncer_can_write_nothing_any_more() -> None:
    world = run_of(10.0)
    old = SimulatedStore(world.disk)
    new = SimulatedStore(world.disk)
    assert new.epoch == old.epoch + 1
    with pytest.raises(FencedError, match=f"epoch {old.epoch} was ended by epoch {new.epoch}"):
        old.save(world.syncer.run_state())
    new.save(world.syncer.run_state())


def test_a_restart_has_the_versions_that_were_committed() -> None:
    world = run_of(30.0)
    versions = world.syncer.versions
    assert max(version.number for version in versions) > 4
    world.crash_syncer()
    world.start_syncer()
    assert world.syncer.versions == versions
    assert world.syncer.timeline == 1


def test_a_damaged_payload_costs_the_versions_that_need_it_and_opens_a_timeline() -> None:
    world = run_of(30.0)
    before = list(world.syncer.versions)
    world.disk.rot(payload_file(0), len(world.disk.file(payload_file(0)).records) - 1)
    world.crash_syncer()
    world.start_syncer()
    assert [version.timeline for version in world.syncer.versions] == [2, 2]
    assert world.syncer.versions[0].digest != before[0].digest
    assert world.syncer.versions[1].digest == before[1].digest
    assert world.syncer.membership.newest_incarnation > 1000
    assert all(record.must_join_again for record in world.syncer.membership.everybody())


def test_a_base_that_is_damaged_takes_its_deltas_with_it() -> None:
    world = run_of(40.0, base_interval=100)
    records = world.disk.file(payload_file(0)).records
    second = records[1].content.version
    assert records[1].content.base == records[0].content.version
    records[2].damaged = True
    world.crash_syncer()
    world.start_syncer()
    assert world.syncer.versions[0].digest == second.digest


def test_with_nothing_left_to_read_the_store_says_so() -> None:
    world = run_of(10.0)
    for record in world.disk.file(payload_file(1)).records:
        record.damaged = True
    world.crash_syncer()
    with pytest.raises(UnreadableError, match="no version of fragment 1 can be read"):
        world.start_syncer()


def test_a_mirrors_copy_uses_no_name_that_the_lost_volume_may_have_used() -> None:
    world = run_of(20.0)
    marks = world.process.store.marks() if world.process else {}
    world.mirror = (world.disk, marks)
    newest = list(world.syncer.versions)
    # The volume falls back by itself, and hands incarnations out, after the copy was made.
    world.disk.rot(payload_file(0), len(world.disk.file(payload_file(0)).records) - 1)
    world.crash_syncer()
    world.start_syncer()
    world.run(until=40.0)
    timeline, incarnation = world.syncer.timeline, world.syncer.membership.newest_incarnation
    assert world.lose_disk()
    world.start_syncer()
    assert [version.digest for version in world.syncer.versions] == [version.digest for version in newest]
    assert world.syncer.timeline > timeline
    assert world.syncer.membership.newest_incarnation > incarnation
    world.run(until=80.0)
    assert min(version.number for version in world.syncer.versions) > min(version.number for version in newest) + 3


def test_versions_in_json_are_versions_again() -> None:
    world = run_of(20.0)
    state = world.checkpoint()
    assert state is not None
    assert state == world.syncer.run_state()
    assert all(isinstance(version, Version) for version in state.versions)
