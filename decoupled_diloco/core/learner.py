"""The learner's machine: what a learner does at a step boundary and between two of them.

It holds counters and version names, never tensors. Two threads use it under one short lock: the network thread reports
what arrived (`handle`), the device thread calls `at_boundary` between two inner steps. Neither call waits for anything.

    repeat until the run is finished:
        one inner step on the learner's own data                    never waits for anybody
        at the boundary:  1. apply every fragment that has arrived   (counters of that fragment restart)
                          2. copy for every ask that is due, and keep the newest copy of what a last call may want
                          3. hand a progress report to the network thread
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile

from decoupled_diloco.core import learner_events as ev
from decoupled_diloco.core.ids import Decline, Version
from decoupled_diloco.core.learner_effects import (
    Apply,
    Boundary,
    CancelUpload,
    Copy,
    DeclineRound,
    Download,
    Hold,
    LearnerEffect,
    Leave,
    Upload,
    UploadInitialParameters,
)
from decoupled_diloco.core.learner_state import AskRecord, FragmentRecord
from decoupled_diloco.core.policy import ApplyRule, Policy
from decoupled_diloco.core.schedule import due_local_step, fragment_of, rounds_soon_called


@dataclass(slots=True)
class LearnerMachine:
    """One incarnation of one learner.

    Attributes:
        policy: the run's policy; P, H, tau, the apply rule, last_call and barrier matter here.
        local_step: inner steps of this incarnation; never jumps.
        token_count: their tokens.
        schedule_step: step of the inner learning-rate schedule: global steps at the newest applied version plus the
            local steps since that round's copy, never going back.
    """

    policy: Policy
    local_step: int = 0
    token_count: int = 0
    cursor: int = 0
    schedule_step: int = 0
    step_ratio: float = 1.0
    _fragments: list[FragmentRecord] = field(default_factory=list)
    _asks: dict[int, AskRecord] = field(default_factory=dict)
    _answered: dict[int, int] = field(default_factory=dict)
    _newest_round: int = 0
    _newest: AskRecord | None = None
    _based_on_global_step: int = -1
    _recovering: bool = True
    _restart_optimizer: bool = False
    _paused: str | None = None
    _detached: bool = False
    _finished: bool = False
    _drain: str | None = None
    _leaves_after_drain: bool = False
    _drain_copied: bool = False
    _left: bool = False
    _barrier_rounds: set[int] = field(default_factory=set)
    _schedule_base: int = 0
    _schedule_local: int = 0
    _syncer_epoch: int | None = None

    def __post_init__(self) -> None:
        self._fragments = [FragmentRecord() for _ in range(self.policy.fragment_count)]

    # ---- the network thread ------------------------------------------------------------------------------------------

    def handle(self, event: ev.LearnerEvent) -> list[LearnerEffect]:
        """Takes in what arrived and returns what the network thread shall do."""
        match event:
            case ev.Asked():
                return self._on_asked(event)
            case ev.LastCalled(round_number):
                return self._on_last_called(round_number)
            case ev.RoundEnded():
                return self._on_round_ended(event)
            case ev.Published(fragment, version, global_step):
                return self._on_published(fragment, version, global_step)
            case ev.Downloaded(fragment, version, global_step):
                return self._on_downloaded(fragment, version, global_step)
            case ev.DownloadFailed(fragment, version):
                return self._on_download_failed(fragment, version)
            case ev.PauseAsked(reason):
                self._paused = reason
            case ev.ResumeAsked():
                self._paused = None
            case ev.DrainAsked(reason, leaves):
                return self._on_drain_asked(reason, leaves)
            case ev.RecoverAsked():
                return self._on_recover_asked()
            case ev.InitialAsked():
                return [UploadInitialParameters()]
            case ev.DetachedTooLong():
                self._detached = True
            case ev.AttachedAgain():
                self._detached, self._paused = False, None
                self._asks.clear()
            case ev.SyncerSeen(epoch):
                return self._on_syncer_seen(epoch)
            case ev.Ended():
                self._finished = True
        return []

    def _on_syncer_seen(self, epoch: int) -> list[LearnerEffect]:
        """A syncer that was started again knows nothing of answers to rounds that it had not committed."""
        known, self._syncer_epoch = self._syncer_epoch, epoch
        if known in (None, epoch):
            return []
        for round_number in self._answered:
            self._fragments[fragment_of(round_number, self.policy)].sent = None
        cancelled, self._answered = self._answered, {}
        self._barrier_rounds.difference_update(cancelled)
        return [CancelUpload(r) for r in cancelled]

    def _on_asked(self, ask: ev.Asked) -> list[LearnerEffect]:
        self.step_ratio = ask.pace_ratio
        self._newest_round = max(self._newest_round, ask.round)
        effects = self._end_older_rounds(ask)
        if ask.round in self._answered:
            return effects
        record = self._asks[ask.round] = AskRecord(ask, ask.due_local_step)
        self._newest = record if ask.round == self._newest_round else self._newest
        if self._drain is not None and self._drain_copied:
            return effects + self._answer_from_copy(ask.round) + self._leave_if_done()
        return effects

    def _end_older_rounds(self, ask: ev.Asked) -> list[LearnerEffect]:
        """At most one round of a fragment is open: an ask says that older ones have ended if that news was lost."""
        older = [r for r in (*self._asks, *self._answered) if r < ask.round]
        older = [r for r in older if fragment_of(r, self.policy) == ask.fragment]
        state = self._fragments[ask.fragment]
        if older and state.sent is not None and state.sent.base == ask.base:  # abandoned: the base has not moved
            state.sent = None
            self._barrier_rounds.difference_update(older)
        for round_number in older:
            self._asks.pop(round_number, None)
        return [CancelUpload(r) for r in older if self._answered.pop(r, None) is not None]

    def _on_last_called(self, round_number: int) -> list[LearnerEffect]:
        if round_number in self._answered:
            return []
        if round_number not in self._asks:
            return [DeclineRound(round_number, Decline.NO_COPY)]
        return self._answer_from_copy(round_number)

    def _answer_from_copy(self, round_number: int) -> list[LearnerEffect]:
        """Answers with the newest copy, if its base is the ask's base and it holds at least one step."""
        ask = self._asks[round_number].ask
        state = self._fragments[ask.fragment]
        if state.copy is not None and state.copy.base == ask.base and state.copy.step_count >= 1:
            return [self._answer(round_number, state.copy)]
        newest = state.applied == ask.base and state.step_count == 0
        return [DeclineRound(round_number, Decline.ZERO_STEPS if newest else Decline.NO_COPY)]

    def _answer(self, round_number: int, copy: Copy) -> Upload:
        ask = self._asks.pop(round_number).ask
        self._answered[round_number] = ask.global_step
        self._fragments[ask.fragment].sent = copy
        self._rebase(ask.global_step, copy.local_step)
        if self.policy.barrier:
            self._barrier_rounds.add(round_number)
        return Upload(round_number, copy)

    def _rebase(self, global_step: int, local_step: int) -> None:
        """Re-bases the open asks on the newest round that was answered or that closed without this learner."""
        if global_step <= self._based_on_global_step:
            return
        self._based_on_global_step = global_step
        for pending in self._asks.values():
            due = due_local_step(local_step, pending.ask.global_step, global_step, self.step_ratio)
            pending.due_local_step = max(pending.due_local_step, due)

    def _on_round_ended(self, event: ev.RoundEnded) -> list[LearnerEffect]:
        effects: list[LearnerEffect] = []
        if self._answered.pop(event.round, None) is not None:
            effects.append(CancelUpload(event.round))
        elif self._asks.pop(event.round, None) is not None:
            self._rebase(event.global_step, self.local_step)
        if not event.committed:
            self._fragments[event.fragment].sent = None
            self._barrier_rounds.discard(event.round)
        return effects + self._leave_if_done()

    def _on_published(self, fragment: int, version: Version, global_step: int) -> list[LearnerEffect]:
        state = self._fragments[fragment]
        newest = state.wanted or state.held
        if newest is not None and (version.timeline, version.number) <= (newest.timeline, newest.number):
            return []
        state.wanted, state.wanted_global_step = version, global_step
        return self._start_download(state, fragment)

    def _start_download(self, state: FragmentRecord, fragment: int) -> list[LearnerEffect]:
        if state.downloading is not None or state.wanted is None or state.wanted == state.held:
            return []
        state.downloading = state.wanted
        return [Download(fragment, state.wanted, state.held, state.wanted_global_step)]

    def _on_downloaded(self, fragment: int, version: Version, global_step: int) -> list[LearnerEffect]:
        state = self._fragments[fragment]
        state.downloading = None
        held = state.held
        if held is None or (version.timeline, version.number) > (held.timeline, held.number):
            state.held, state.held_global_step = version, global_step
        if self._drain is not None:
            return self._leave_if_done()
        return self._start_download(state, fragment)

    def _on_download_failed(self, fragment: int, version: Version) -> list[LearnerEffect]:
        state = self._fragments[fragment]
        if state.downloading == version:
            state.downloading = None
        return self._start_download(state, fragment)

    def _on_recover_asked(self) -> list[LearnerEffect]:
        """What was copied so far is worth nothing: no ask or last call is answered with it, no upload goes on."""
        self._recovering = self._restart_optimizer = True
        for state in self._fragments:
            state.copy = None
        effects: list[LearnerEffect] = [CancelUpload(r) for r in self._answered]
        effects += [DeclineRound(r, Decline.NO_COPY) for r in self._asks]
        self._answered.clear()
        self._asks.clear()
        return effects

    def _on_drain_asked(self, reason: str, leaves: bool) -> list[LearnerEffect]:
        self._leaves_after_drain = self._leaves_after_drain or leaves
        if self._drain is None:
            self._drain = reason
        return self._leave_if_done()

    def _leave_if_done(self) -> list[LearnerEffect]:
        """A draining learner leaves when every fragment was answered once, or holds nothing that can be merged."""
        if not (self._leaves_after_drain and self._drain_copied) or self._left:
            return []
        if any(self._fragments[fragment_of(r, self.policy)].sent is not None for r in self._answered):
            return []
        if any(state.sent is None and state.could_be_merged for state in self._fragments):
            return []
        self._left = True
        return [Leave(self._drain or "")]

    # ---- the device thread -------------------------------------------------------------------------------------------

    def step_finished(self, token_count: int) -> None:
        """One inner step is done. Call `at_boundary` next."""
        self.local_step += 1
        self.token_count += token_count
        self.cursor += 1
        for state in self._fragments:
            state.step_count += 1
            state.token_count += token_count
        self._advance_schedule()

    def at_boundary(self) -> Boundary:
        """What to do before the next step. May be called again while a hold lasts."""
        if self._finished:
            return Boundary((), (), (), Hold.FINISHED, self.schedule_step)
        if self._drain is not None:
            return self._drain_boundary()
        if self._recovering:
            return self._recovery_boundary()
        applies = tuple(self._apply(fragment) for fragment in self._arrived())
        # With the barrier on, a later round that is answered would hold an older one up for ever: so in their order.
        ready = takewhile if self.policy.barrier else filter
        due = [r for r, _ in ready(lambda ask: self._is_due(ask[1]), sorted(self._asks.items()))]
        copies = self._take_copies([self._asks[r].ask.fragment for r in due])
        uploads = tuple(
            self._answer(r, copy) for r in due if (copy := copies.get(self._asks[r].ask.fragment)) is not None
        )
        return Boundary(applies, tuple(copies.values()), uploads, self._hold(), self.schedule_step)

    def _hold(self) -> Hold | None:
        if self._paused is not None:
            return Hold.PAUSED
        if self._detached:
            return Hold.DETACHED
        # With the barrier on, a learner steps neither past an answered round that is open nor past an unknown ask.
        if self.policy.barrier and (self._barrier_rounds or not self._asks):
            return Hold.BARRIER
        return None

    def _drain_boundary(self) -> Boundary:
        copies: dict[int, Copy] = {}
        if not self._drain_copied:
            self._drain_copied = True
            copies = {} if self._recovering else self._take_copies(list(range(self.policy.fragment_count)))
        uploads = []
        for round_number in sorted(self._asks):
            copy = self._fragments[self._asks[round_number].ask.fragment].copy
            if copy is not None and copy.base == self._asks[round_number].ask.base:
                uploads.append(self._answer(round_number, copy))
        return Boundary((), tuple(copies.values()), tuple(uploads), Hold.DRAINING, self.schedule_step)

    def drained(self) -> list[LearnerEffect]:
        """For the network thread after a DRAINING boundary: declines what cannot be answered, leaves when done."""
        effects: list[LearnerEffect] = []
        if self._drain_copied:
            for round_number in list(self._asks):
                effects += self._answer_from_copy(round_number)
                self._asks.pop(round_number, None)
        return effects + self._leave_if_done()

    def _recovery_boundary(self) -> Boundary:
        """Recovery is done when every fragment holds a published version."""
        if any(state.held is None for state in self._fragments):
            return Boundary((), (), (), Hold.RECOVERING, self.schedule_step)
        self._recovering = False
        restart, self._restart_optimizer = self._restart_optimizer, False
        for state in self._fragments:
            state.applied, state.copy, state.sent = None, None, None
        applies = tuple(self._apply(fragment) for fragment in self._arrived())
        return Boundary(applies, (), (), self._hold(), self.schedule_step, restart)

    def _arrived(self) -> list[int]:
        return [p for p, state in enumerate(self._fragments) if state.held is not None and state.held != state.applied]

    def _apply(self, fragment: int) -> Apply:
        state = self._fragments[fragment]
        assert state.held is not None
        rule, kept_steps, kept_tokens, since = self._kept(state)
        state.applied, state.applied_global_step = state.held, state.held_global_step
        local_since = self.local_step - (state.sent.local_step if state.sent else self.local_step)
        if state.applied_global_step >= self._schedule_base:
            self._schedule_base, self._schedule_local = state.applied_global_step, self.local_step - local_since
        self._advance_schedule()
        state.step_count, state.token_count = kept_steps, kept_tokens
        state.copy = state.sent = None
        self._barrier_rounds = {r for r in self._barrier_rounds if fragment_of(r, self.policy) != fragment}
        return Apply(fragment, state.applied, state.applied_global_step, rule, since, kept_tokens)

    def _kept(self, state: FragmentRecord) -> tuple[ApplyRule, int, int, Copy | None]:
        """The rule to apply by, the steps and tokens that survive, and the copy that they are measured from."""
        rule, sent = self.policy.apply_rule, state.sent
        if state.applied is None or rule == "overwrite" or (rule == "carry" and sent is None):
            return "overwrite", 0, 0, None
        steps = self.local_step - sent.local_step if sent else state.step_count
        tokens = self.token_count - sent.total_token_count if sent else state.token_count
        if rule == "carry":
            return rule, steps, tokens, sent
        kept_steps = round(self.policy.blend_alpha * steps)
        return rule, kept_steps, round(self.policy.blend_alpha * tokens) if kept_steps else 0, None

    def _advance_schedule(self) -> None:
        self.schedule_step = max(self.schedule_step, self._schedule_base + self.local_step - self._schedule_local)

    def _is_due(self, pending: AskRecord) -> bool:
        state = self._fragments[pending.ask.fragment]
        return self.local_step >= pending.due_local_step and state.applied == pending.ask.base and state.step_count >= 1

    def _take_copies(self, due_fragments: list[int]) -> dict[int, Copy]:
        """Copies of what is due, asked for (a due step may be off by a round), or next by the schedule."""
        wanted = set(due_fragments)
        if self.policy.last_call:
            wanted |= {pending.ask.fragment for pending in self._asks.values()}
            overdue_steps = self.local_step - (self._newest.due_local_step if self._newest is not None else 0)
            ahead = rounds_soon_called(overdue_steps, self.step_ratio, self.policy)
            wanted |= {fragment_of(self._newest_round + i, self.policy) for i in range(1, ahead + 1)}
        copies = {}
        for fragment in sorted(wanted):
            state = self._fragments[fragment]
            if state.applied is None or state.step_count < 1 or state.sent is not None:
                continue
            state.copy = copies[fragment] = Copy(
                fragment,
                state.applied,
                self.local_step,
                self.token_count,
                state.step_count,
                state.token_count,
                self.cursor,
            )
        return copies

    # ---- display -----------------------------------------------------------------------------------------------------

    @property
    def held_versions(self) -> dict[int, Version]:
        """Newest downloaded version of every fragment."""
        return {p: state.held for p, state in enumerate(self._fragments) if state.held is not None}

    @property
    def applied_versions(self) -> dict[int, Version]:
        """What the parameters hold, by fragment; nothing of worth until a recovery is over."""
        if self._recovering:
            return {}
        return {p: state.applied for p, state in enumerate(self._fragments) if state.applied is not None}
