"""Bugs planted by hand, one at a time, to see that the simulation finds each: a table of patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

from decoupled_diloco.core import accounts, commits, quorum, restoring, steering
from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.admissions import Admissions
from decoupled_diloco.core.contributions import Contributions
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.learner import LearnerMachine
from decoupled_diloco.core.membership import Membership
from decoupled_diloco.core.quorum import View
from decoupled_diloco.core.restoring import in_new_timeline, load, run_state
from decoupled_diloco.core.rounds import Rounds
from simulator import facts, store
from simulator.store import SimulatedStore
from simulator.syncer_process import Job, SyncerProcess

Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True)
class Mutation:
    """A planted bug: what it is in words, and the attributes that it replaces."""

    bug: str
    patches: tuple[Patch, ...]

    @contextmanager
    def planted(self) -> Iterator[None]:
        """With the bug in place."""
        with ExitStack() as stack:
            for owner, name, value in self.patches:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield


def _row_first(self: SyncerProcess, append: Any, sync: Any, transact: Any) -> list[tuple[float, Callable[[], None]]]:
    third = self.world.commit_seconds / 3
    return [(third, transact), (third, append), (third, sync)]


def _told_before_done(self: SyncerProcess, job: Job, enqueue: Any = SyncerProcess._enqueue) -> None:
    if len(job.steps) == 3:  # a commit
        done, job.done = job.done, lambda: None
        done()
    enqueue(self, job)


def _answer_at_once(self: SyncerProcess, request: Any, value: Any, answer: Any = SyncerProcess._answer) -> None:
    if isinstance(value, fx.Admitted):
        world = self.world
        world.note(facts.HandedOut(world.now, self.number, value.learner, value.incarnation, value.slot))
        request.answered(value)
    else:
        answer(self, request, value)


def _write_unfenced(self: SimulatedStore, transaction: Any, even_if_full: bool = False) -> None:
    full, self.disk.full = self.disk.full, self.disk.full and not even_if_full
    try:
        self.disk.append(store.LEDGER, transaction)
    finally:
        self.disk.full = full
    self.disk.sync(store.LEDGER)


def _book_all(machine: Any, state: Any, newer: Any, now: float) -> None:
    """`restore` without leaving out what the state knows."""
    load(machine, state, now)
    for commit in newer:
        commits.book(machine, commit, {})
        restoring._close(machine.rounds, commit)
    for item in machine.rounds.under_way.values():
        item.base = machine.versions[item.fragment]


def _forget_newest_opened(machine: Any, state: Any, now: float) -> None:
    load(machine, replace(state, newest_opened=state.newest_closed), now)


def _any_incarnation(self: Membership, learner: str, incarnation: int) -> Any:
    record = self.learners.get(learner)
    return None if record is None or record.left else record


def _admit_any(self: Admissions, learner: str, incarnation: int) -> Any:
    record = self.machine.membership.learners.get(learner)
    return fx.Refusal("NOT_JOINED", "join again") if record is None or record.left else None


def _fast_only(item: Any, view: View, silent: Any = quorum.silent_learners) -> Iterator[Any]:
    fastest = view.step_seconds or math.inf
    return (record for record in silent(item, view) if (record.step_seconds() or 0.0) <= 1.1 * fastest)


def _same_timeline(cut: Any, newest: Any, *arguments: Any) -> Any:
    state = in_new_timeline(cut, newest, *arguments)
    names = tuple(
        Version(newest.timeline, old.number + 1, version.digest)
        for old, version in zip(cut.versions, state.versions, strict=True)
    )
    return replace(state, timeline=newest.timeline, versions=names)


def _forgetful(machine: Any) -> Any:
    return replace(run_state(machine), evicted={}, pause_reason=None)


def _no_cursor(machine: Any, contribution: Any, commit: Any) -> None:
    record = machine.membership.learners.get(contribution.learner)
    if record is not None:
        record.rounds_merged[commit.fragment] += 1


def _replaced_counts(
    self: Rounds, learner: str, incarnation: int, keep_complete: bool, text: str, drop: Any = Rounds.drop_incarnation
) -> Any:
    return drop(self, learner, incarnation, True, text)


def _same_number(item: Any, version: Version, *arguments: Any, propose: Any = commits.propose) -> Any:
    return propose(item, replace(version, number=item.base.number), *arguments)


def _ask_nobody(self: Contributions, event: ev.ContributionFailed, record: Any) -> list[Any]:
    item = self.machine.rounds.under_way.get(event.round)
    answer = item.answers.get(record.learner) if item else None
    if answer is not None and answer.incarnation == record.incarnation and answer.state.value == "started":
        answer.state = type(answer.state)("failed")
    return []


MUTATIONS: tuple[Mutation, ...] = (
    Mutation("the payload of a commit is not synced", ((SimulatedStore, "sync_payload", lambda self, fragment: None),)),
    Mutation("the row of a commit is written before its payload", ((SyncerProcess, "_commit_order", _row_first),)),
    Mutation("a version is published before its commit is durable", ((SyncerProcess, "_enqueue", _told_before_done),)),
    Mutation("a join is answered before it is durable", ((SyncerProcess, "_answer", _answer_at_once),)),
    Mutation("a syncer whose epoch is over goes on writing", ((SimulatedStore, "_write", _write_unfenced),)),
    Mutation(
        "a restart books a round that its state knows once more",
        ((restoring, "restore", _book_all), (store, "_is_newer", lambda row, state: True)),
    ),
    Mutation("a restart forgets which rounds were opened", ((restoring, "load", _forget_newest_opened),)),
    Mutation("the state on disk lacks pauses and evictions", ((restoring, "run_state", _forgetful),)),
    Mutation(
        "the incarnation of a caller is not looked at",
        ((Membership, "get", _any_incarnation), (Admissions, "admits", _admit_any)),
    ),
    Mutation("what a replaced incarnation had sent is merged", ((Rounds, "drop_incarnation", _replaced_counts),)),
    Mutation("a merged version keeps the number of its base", ((commits, "propose", _same_number),)),
    Mutation("only the fastest learners are waited for and called", ((quorum, "silent_learners", _fast_only),)),
    Mutation("reserved tokens are kept when a round is abandoned", ((accounts, "settle_unmerged", lambda *_: None),)),
    Mutation(
        "a learner does not answer again when the syncer was started again",
        ((LearnerMachine, "_on_syncer_seen", lambda self, epoch: []),),
    ),
    Mutation("a learner that gave its upload up is not asked again", ((Contributions, "on_failed", _ask_nobody),)),
    Mutation("the committed cursor of a slot is not moved", ((commits, "_credit", _no_cursor),)),
    Mutation("one contribution is enough for any quorum", ((View, "quorum", lambda self: 1),)),
    Mutation(
        "a roll-back goes on in the same timeline",
        ((steering, "in_new_timeline", _same_timeline),),
    ),
    Mutation(
        "a copy of the volume numbers on as if it were the volume",
        ((restoring, "TIMELINES_SKIPPED_BY_COPY", 1), (restoring, "INCARNATIONS_SKIPPED_BY_COPY", 1000)),
    ),
)
"""Every planted bug. Each must break a rule."""
