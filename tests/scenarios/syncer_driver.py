"""Commands that drive a SyncerMachine. Names of learners come first, then options.

Time stands still unless `at` moves it; timers that are on the way fire.


run P= H= tau= K= ...        a machine with this policy
begin a b ...                these learners join, attach, give the initial parameters, hold them: ready to train
join a [observer]   attach a [step=] [applied=all|none|0,1]   detach a   leaving a   leave a
progress a step= duration= [running=] [activity=] [tokens=] [spans=compute:3,data_wait:1]
initial a fragment= | all    initialized
start a round= [steps=] [tokens=] [base=] [step=] [cursor=] [schema=other]      the header of a contribution
receive a round= [norm=] [nonfinite]            the whole of it
upload a b round= ...                           both
moved a round=   fail a round= [corrupt]   decline a round= [reason=]   applied a fragment= | all
merged 1 [nonfinite]   merge_failed 1   committed 1   commit_failed 1   finish_round 1 (merged and committed)
pause   resume   finish   drain a   evict a   readmit a      the operator
checkpoint   roll_back   rolled_back   roll_back_failed      the run as it stands is kept; it goes back there
storage_failed   storage_recovered
durable 1                    the transaction of round 1 is written, and the machine has not heard of it
restart                      the syncer is killed and started again: with what was saved before an answer or committed
timer                        goes to the machine's next deadline
status   rounds   learners   goodput
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core.ids import Activity, Decline, Fate, Role, Version
from decoupled_diloco.core.syncer import SyncerMachine
from tests.scenarios.policies import policy_of
from tests.scenarios.scenario_file import Command
from tests.scenarios.syncer_tables import goodput_lines, learner_lines, round_lines, status_lines
from tests.scenarios.volume import Volume
from tests.scenarios.words import effect_words, seconds

TOKENS_PER_STEP = 10
SAVED_BEFORE_ANSWER = (
    ev.JoinRequested
    | ev.LearnerLeft
    | ev.PauseRequested
    | ev.ResumeRequested
    | ev.FinishRequested
    | ev.DrainRequested
    | ev.EvictRequested
    | ev.ReadmitRequested
)


class SyncerDriver:
    """One machine, and what a shell and its learners would remember."""

    def __init__(self, options: dict[str, str]) -> None:
        self.machine = SyncerMachine(policy_of(options))
        self.now = 0.0
        self._volume = Volume()
        self._requests = itertools.count(1)
        self._incarnations: dict[str, int] = {}
        self._steps: dict[str, int] = {}
        self._held: dict[str, dict[int, Version]] = {}
        self._commands: dict[str, Callable[[Command], list[str]]] = {
            "begin": self._begin,
            "timer": self._timer,
            "upload": self._upload,
            "finish_round": self._finish_round,
            "checkpoint": self._checkpoint,
            "durable": self._durable,
            "restart": self._restart,
            "status": lambda _: status_lines(self.machine, self.now),
            "rounds": lambda _: round_lines(self.machine, self.now),
            "learners": lambda _: learner_lines(self.machine, self.now),
            "goodput": lambda _: goodput_lines(self.machine, self.now),
        }

    def execute(self, command: Command) -> list[str]:
        """Carries out one command; returns what happened in words."""
        lines = self._wait_until(command.at) if command.at is not None else []
        known = self._commands.get(command.name)
        return lines + (known(command) if known else self._tell(*self._events(command)))

    def _wait_until(self, instant: float) -> list[str]:
        """Lets time pass; the timer fires on the way, and what it does is told."""
        assert instant >= self.now, "time does not go back"
        lines = []
        while (deadline := self.machine.next_deadline()) is not None and deadline <= instant:
            self.now = deadline
            happened = self._tell(ev.TimerFired())
            lines += [f"(at {seconds(deadline)} s) {line}" for line in happened]
        self.now = instant
        return lines

    def _tell(self, *events: ev.Event) -> list[str]:
        before = {item.number: item.state for item in self.machine.rounds.in_order()}
        lines = []
        for event in events:
            for effect in self.machine.handle(event, self.now):
                self._remember(effect)
                lines.append(effect_words(effect))
            if isinstance(event, SAVED_BEFORE_ANSWER | ev.RolledBack | ev.InitialParametersCommitted):
                self._volume.save(self.machine.run_state())
        under_way = self.machine.rounds.in_order()
        changed = [item for item in under_way if before.get(item.number, item.state) is not item.state]
        return lines + [f"round {i.number} is {i.state}: {self.machine.reason_of(i, self.now)}" for i in changed]

    def _remember(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Answer(value=fx.Admitted(learner=learner, incarnation=incarnation)):
                self._incarnations[learner] = incarnation
                self._steps[learner] = 0
                self._held[learner] = {}
            case fx.CommitRound():
                self._volume.propose(effect)

    # ---- what is written down ----------------------------------------------------------------------------------------

    def _checkpoint(self, command: Command) -> list[str]:
        self._volume.checkpoint(self.machine.run_state())
        return []

    def _durable(self, command: Command) -> list[str]:
        self._volume.commit(int(command.words[0]), self.machine.run_state())
        return []

    def _restart(self, command: Command) -> list[str]:
        self.machine, effects = self._volume.restart(self.machine.policy, self.now)
        return [effect_words(effect) for effect in effects]

    # ---- many events at once -----------------------------------------------------------------------------------------

    def _begin(self, command: Command) -> list[str]:
        names = command.words
        for name in names:
            self._tell(ev.JoinRequested(next(self._requests), name))
            self._tell(self._attach(name, command))
        if not self.machine.versions:
            self._tell(*self._initial(names[0], range(self.machine.policy.fragment_count)))
            self._tell(self._initialized())
        lines = []
        for name in names:
            lines += self._tell(*self._applied(name, range(self.machine.policy.fragment_count)))
            report = ev.Progress(0, 0, step_seconds=command.number("duration", 1.0))
            lines += self._tell(ev.ProgressReported(name, self._incarnations[name], report))
        return lines

    def _timer(self, command: Command) -> list[str]:
        deadline = self.machine.next_deadline()
        if deadline is None:
            return ["no deadline"]
        assert deadline >= self.now
        self.now = deadline
        return [f"it is {seconds(self.now)} s", *self._tell(ev.TimerFired())]

    def _upload(self, command: Command) -> list[str]:
        lines = []
        for name in command.words:
            lines += self._tell(self._start(name, command))
            lines += self._tell(self._receive(name, command))
        return lines

    def _finish_round(self, command: Command) -> list[str]:
        number = int(command.words[0])
        lines = self._tell(self._merged(number, command))
        self._durable(command)
        return lines + self._tell(ev.CommitFinished(number, 0.0))

    # ---- one event ---------------------------------------------------------------------------------------------------

    def _events(self, command: Command) -> list[ev.Event]:
        if command.name not in ("applied", "initial"):
            return [self._event(command)]
        make = self._applied if command.name == "applied" else self._initial
        everything = list(range(self.machine.policy.fragment_count))
        return make(command.words[0], everything if command.flag("all") else [command.count("fragment", 0)])

    def _event(self, command: Command) -> ev.Event:
        word = command.words[0] if command.words else ""
        match command.name:
            case "join":
                role = Role.OBSERVER if command.flag("observer") else Role.LEARNER
                return ev.JoinRequested(next(self._requests), word, role)
            case "pause":
                return ev.PauseRequested(next(self._requests), " ".join(command.words))
            case "resume":
                return ev.ResumeRequested(next(self._requests))
            case "finish":
                return ev.FinishRequested(next(self._requests), " ".join(command.words))
            case "roll_back":
                return ev.RollBackRequested(next(self._requests), "monday", self._volume.cut(), "the loss diverged")
            case "rolled_back":
                return ev.RolledBack()
            case "roll_back_failed":
                return ev.RollBackFailed("no space left on device")
            case "storage_failed":
                return ev.StorageFailed("no space left on device")
            case "storage_recovered":
                return ev.StorageRecovered()
            case "drain":
                return ev.DrainRequested(next(self._requests), word, "maintenance")
            case "evict":
                return ev.EvictRequested(next(self._requests), word, "it sends nonsense")
            case "readmit":
                return ev.ReadmitRequested(next(self._requests), word)
            case "initialized":
                return self._initialized()
            case "merged":
                return self._merged(int(word), command)
            case "merge_failed":
                return ev.MergeFailed(int(word), "the merge could not be computed")
            case "committed":
                self._durable(command)
                return ev.CommitFinished(int(word), 0.0)
            case "commit_failed":
                return ev.CommitFailed(int(word), "no space left on device")
        return self._event_of_learner(command, word)

    def _event_of_learner(self, command: Command, name: str) -> ev.Event:
        incarnation = self._incarnation(name, command)
        match command.name:
            case "attach":
                return self._attach(name, command)
            case "detach":
                return ev.LearnerDetached(name, incarnation, "connection reset")
            case "leaving":
                return ev.LeavingAnnounced(name, incarnation, "it was asked to stop")
            case "leave":
                return ev.LearnerLeft(next(self._requests), name, incarnation, "goodbye")
            case "progress":
                return ev.ProgressReported(name, incarnation, self._progress(name, command))
            case "start":
                return self._start(name, command)
            case "receive":
                return self._receive(name, command)
            case "moved":
                return ev.BytesMoved(name, incarnation, command.count("round", 0))
            case "fail":
                fate = Fate.CORRUPT if command.flag("corrupt") else Fate.ABORTED
                return ev.ContributionFailed(name, incarnation, command.count("round", 0), fate, "the stream broke")
            case "decline":
                reason = Decline(command.options.get("reason", "no_copy"))
                return ev.ContributionDeclined(name, incarnation, command.count("round", 0), reason)
        raise ValueError(f"no such command: {command.name}")

    def _incarnation(self, name: str, command: Command) -> int:
        return command.count("incarnation", self._incarnations.get(name, 0))

    def _attach(self, name: str, command: Command) -> ev.LearnerAttached:
        held = self._held[name]
        if command.options.get("applied") == "all":
            held.update(enumerate(self.machine.versions))
        applied = tuple(sorted(held.items()))
        return ev.LearnerAttached(name, self._incarnation(name, command), applied, self._progress(name, command))

    def _progress(self, name: str, command: Command) -> ev.Progress:
        step = self._steps[name] = command.count("step", self._steps[name])
        running = command.options.get("running")
        duration = command.options.get("duration")
        pairs = [pair.split(":") for pair in command.options.get("spans", "").split(",") if pair]
        record = self.machine.membership.learners[name]
        return ev.Progress(
            step,
            command.count("tokens", step * TOKENS_PER_STEP),
            Activity(command.options.get("activity", "compute")),
            float(duration) if duration else record.progress.step_seconds,
            float(running) if running else None,
            tuple((Activity(activity), float(length)) for activity, length in pairs),
        )

    def _initial(self, name: str, fragments: list[int] | range) -> list[ev.Event]:
        incarnation = self._incarnations[name]
        return [ev.InitialFragmentReceived(next(self._requests), name, incarnation, p, f"d{p}") for p in fragments]

    def _initialized(self) -> ev.Event:
        return ev.InitialParametersCommitted(tuple(f"d{p}" for p in range(self.machine.policy.fragment_count)))

    def _applied(self, name: str, fragments: list[int] | range) -> list[ev.Event]:
        step = self._steps[name]
        self._held[name].update({p: self.machine.versions[p] for p in fragments})
        incarnation = self._incarnations[name]
        tokens = step * TOKENS_PER_STEP
        return [
            ev.FragmentApplied(name, incarnation, p, self._held[name][p], step, tokens, download_seconds=0.0)
            for p in fragments
        ]

    def _start(self, name: str, command: Command) -> ev.ContributionStarted:
        number = command.count("round", 0)
        fragment = (number - 1) % self.machine.policy.fragment_count
        base = self.machine.versions[fragment]
        if "base" in command.options:
            timeline, position = command.options["base"].split(".")
            base = Version(int(timeline), int(position))
        steps = command.count("steps", 1)
        step = command.count("step", max(self._steps[name], 1))
        if "incarnation" not in command.options:
            self._steps[name] = step
        header = ev.ContributionHeader(
            learner=name,
            incarnation=self._incarnation(name, command),
            round=number,
            fragment=fragment,
            base=base,
            local_step=step,
            total_token_count=step * TOKENS_PER_STEP,
            step_count=steps,
            token_count=command.count("tokens", steps * TOKENS_PER_STEP),
            cursor=command.count("cursor", step),
            schema_matches=command.options.get("schema") != "other",
        )
        return ev.ContributionStarted(next(self._requests), header)

    def _receive(self, name: str, command: Command) -> ev.ContributionReceived:
        finite, norm = not command.flag("nonfinite"), command.number("norm", 1.0)
        incarnation, number = self._incarnation(name, command), command.count("round", 0)
        return ev.ContributionReceived(next(self._requests), name, incarnation, number, finite, norm)

    def _merged(self, number: int, command: Command) -> ev.MergeFinished:
        return ev.MergeFinished(number, f"digest-{number}", not command.flag("nonfinite"), 0.0)
