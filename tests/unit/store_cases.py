"""A small run for tests of the durable store: values that follow from a seed, rounds that follow from each other."""

from dataclasses import replace

import numpy as np

from decoupled_diloco.arrays.digest import vector_digest
from decoupled_diloco.arrays.outer import FragmentState, outer_step
from decoupled_diloco.core.effects import Absentee, CommitRound, MergedContribution
from decoupled_diloco.core.ids import Fate, Role, RunPhase, Version
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.core.restoring import in_new_timeline, run_state
from decoupled_diloco.core.run_state import LearnerAccount, OpenRound, RunState
from decoupled_diloco.core.syncer import SyncerMachine
from syncer_service.store.durable import DurableStore
from syncer_service.store.interface import FragmentCommit, MergedDelta, RunModel

FRAGMENTS = 2
SIZES = (40, 56)
POLICY = Policy(fragment_count=FRAGMENTS, interval_steps=4)
CONFIG = {"run.id": "test", "outer.learning_rate": "0.7"}
MODEL = RunModel({"tensors": []}, {"model": "small"}, "alpha")


def values(fragment, seed):
    return np.random.default_rng([fragment, seed]).standard_normal(SIZES[fragment]).astype(np.float32)


def account(learner, incarnation, slot, seen=0):
    return LearnerAccount(learner, incarnation, Role.LEARNER, slot, 0, 0, seen, (0,) * FRAGMENTS, (0,) * FRAGMENTS)


def first_state():
    """Two learners have joined."""
    state = run_state(SyncerMachine(POLICY))
    learners = (account("alpha", 1, 0), account("beta", 2, 1))
    return replace(state, learners=learners, newest_incarnation=2, slot_cursors={0: 0, 1: 0})


class TestRun:
    """Drives a store through rounds the way the syncer does."""

    __test__ = False

    def __init__(self, path, base_interval=4, encoding="bf16", run_id="test"):
        self.path = path
        self.base_interval = base_interval
        self.encoding = encoding
        self.run_id = run_id
        self.store: DurableStore = None  # type: ignore[assignment]
        self.state: RunState = first_state()
        self.rows: list[CommitRound] = []

    def open(self):
        self.store = DurableStore(self.path, POLICY, self.base_interval)
        self.store.begin(self.run_id, CONFIG, FRAGMENTS)
        return self.store

    def begin(self):
        """A run with its first parameters."""
        self.open()
        self.store.save_model(MODEL)
        self.store.save_state(self.state)
        for fragment in range(FRAGMENTS):
            self.store.stage_initial("alpha", 1, fragment, values(fragment, 0))
        commits = self.store.commit_initial("alpha", 1, FRAGMENTS)
        self.state = replace(
            self.state, phase=RunPhase.RUNNING, versions=tuple(c.version for c in commits), version_steps=(0, 0)
        )
        return self

    def next_round(self, fragment=None):
        """What a merge would hand to the store."""
        number = self.state.newest_opened + 1
        fragment = (number - 1) % FRAGMENTS if fragment is None else fragment
        before = self.store.newest()[fragment]
        delta = MergedDelta(values(fragment, number) * np.float32(1e-2), 0.7, 0.9, self.encoding)
        step = outer_step(before.state, delta.delta, learning_rate=0.7, mu=0.9, download_encoding=self.encoding)
        version = Version(before.version.timeline, before.version.number + 1, vector_digest(step.state.theta))
        base = before.version if step.delta_payload is not None else None
        commit = FragmentCommit(fragment, version, number, step.state, base, step.delta_payload)
        row = CommitRound(
            number,
            fragment,
            version,
            number - 1,
            (
                MergedContribution("alpha", 1, 0, 1.25, 2, 100, 100 * number, number),
                MergedContribution("beta", 2, 1, 0.5, 1, 50, 50 * number, number),
            ),
            (Absentee("gamma", "never came", None), Absentee("delta", "too late", Fate.LATE)),
            3,
            False,
            "everybody has answered",
        )
        opened = replace(
            self.state,
            newest_opened=number,
            open_rounds=(OpenRound(number, fragment, number - 1),),
        )
        return commit, delta, row, opened

    def commit(self, fragment=None):
        """One round, committed and booked."""
        commit, delta, row, opened = self.next_round(fragment)
        self.store.commit_round(commit, delta, row, opened)
        self.rows.append(row)
        self.state = booked(opened, row)
        return commit

    def commits(self, count):
        for _ in range(count):
            self.commit()
        return self

    def roll_back(self, states):
        """Goes on from older values, in a new timeline."""
        cut = replace(
            self.state,
            versions=tuple(
                replace(v, digest=vector_digest(states[f].theta)) for f, v in enumerate(self.state.versions)
            ),
        )
        self.state = in_new_timeline(cut, self.state, POLICY, "an operator rolled the run back")
        return self.store.roll_back(states, self.state)

    def booked(self, restored):
        """The state that a machine has once it has taken up what a store held."""
        machine = SyncerMachine(POLICY)
        machine.restore(restored.state, restored.newer, 0.0)
        self.state = machine.run_state()
        return self.state

    def close(self):
        self.store.close()
        return self


def booked(state, row):
    """The state once a round is committed."""
    machine = SyncerMachine(POLICY)
    machine.restore(state, [row], 0.0)
    return machine.run_state()


def assert_same_state(one: FragmentState, two: FragmentState):
    for name in ("theta", "momentum", "residual"):
        assert getattr(one, name).tobytes() == getattr(two, name).tobytes(), name


def assert_same_commits(one, two):
    assert sorted(one) == sorted(two)
    for fragment, commit in one.items():
        other = two[fragment]
        assert (commit.version, commit.global_step) == (other.version, other.global_step)
        assert_same_state(commit.state, other.state)
