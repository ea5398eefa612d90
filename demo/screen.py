"""The demo's live lines: one per learner, one for the run."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from decoupled_diloco.v1 import admin_pb2, syncer_pb2
from demo.plan import Plan
from demo.watch import Sample, Watch

PLAIN_EVERY_SECONDS = 10.0
"""Without a terminal the lines are printed this often instead of redrawn."""


class Screen:
    """Redraws on a terminal, prints now and then elsewhere."""

    def __init__(self, plan: Plan, console: Console, page: str) -> None:
        self.plan, self.console, self.page = plan, console, page
        self.live = Live(console=console, refresh_per_second=4) if console.is_terminal else None
        self._printed_at = float("-inf")

    def __enter__(self) -> Screen:
        if self.live is not None:
            self.live.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live is not None:
            self.live.__exit__(None, None, None)

    def say(self, text: str) -> None:
        """A line that stays."""
        self.console.print(text, highlight=False, soft_wrap=True)

    def show(self, watch: Watch) -> None:
        """The newest sample."""
        sample = watch.samples[-1]
        if self.live is not None:
            self.live.update(Group(self._table(sample), Text("\n".join(self._run_lines(watch)))))
        elif sample.seconds - self._printed_at >= PLAIN_EVERY_SECONDS:
            self._printed_at = sample.seconds
            for line in (*self._learner_lines(sample), *self._run_lines(watch)):
                self.say(line)

    def _table(self, sample: Sample) -> Table:
        table = Table("learner", "state", "step", "tokens/s", "loss", "rounds", box=None, pad_edge=False)
        for learner in _in_order(self.plan, sample):
            table.add_row(*_cells(learner))
        return table

    def _learner_lines(self, sample: Sample) -> Iterator[str]:
        for learner in _in_order(self.plan, sample):
            name, state, step, speed, loss, rounds = _cells(learner)
            yield f"  {name:14} {state:10} step {step:>6}  {speed:>7} tokens/s  loss {loss}  in {rounds} rounds"

    def _run_lines(self, watch: Watch) -> Iterator[str]:
        sample = watch.samples[-1]
        run, figures = sample.run, sample.run.goodput
        quality = (
            f"{sample.bits_per_byte:.3f} bits per byte" if sample.bits_per_byte is not None else "not evaluated yet"
        )
        yield f"  global step {run.global_step} of {run.total_steps}, {quality}, {sample.seconds:.0f} s, {self.page}"
        yield (
            f"  goodput {figures.goodput:.0%}, token goodput {figures.token_goodput:.0%}, "
            f"participation {figures.participation:.0%}, uptime {figures.uptime:.0%}"
        )
        committed = watch.committed()
        if committed:
            newest = committed[-1]
            members = ", ".join(member.learner_id for member in newest.members)
            yield f"  round {newest.round} merged {members} ({newest.reason})"


def _in_order(plan: Plan, sample: Sample) -> list[admin_pb2.Learner]:
    """Learners in the order of the plan, so that lines keep their place."""
    found = [sample.learner(name) for name in plan.learners]
    return [item for item in found if item is not None and item.role == syncer_pb2.ROLE_LEARNER]


def _cells(learner: admin_pb2.Learner) -> tuple[str, str, str, str, str, str]:
    loss = f"{learner.loss:.3f}" if learner.HasField("loss") else "-"
    speed = f"{learner.tokens_per_second:,.0f}"
    return learner.learner_id, learner.state, str(learner.local_step), speed, loss, str(learner.rounds_merged_count)
