"""Where a learner's time goes: every second of an incarnation falls into exactly one activity."""

from __future__ import annotations

from collections import defaultdict

from decoupled_diloco.core.ids import Activity

Spans = tuple[tuple[Activity, float], ...]
"""Seconds by activity since the previous report."""

STEP_GAIN = 0.125
"""Gain of the moving average of the step time, the syncer's own for its averages."""
STEP_GROWTH_MAX = 4.0
"""A step counts for at most this many average ones, so that a process that was stopped is soon itself again."""


class ActivityAccount:
    """Books time. Not thread-safe; its owner locks.

    Args:
        activity: What is being done.
        since: The instant at which that began.
    """

    def __init__(self, activity: Activity, since: float) -> None:
        self.current = activity
        self._since = since
        self._unreported: defaultdict[Activity, float] = defaultdict(float)
        self._total: defaultdict[Activity, float] = defaultdict(float)

    def switch(self, activity: Activity, now: float) -> Activity:
        """Books the time up to `now` and goes over to another activity; returns the one before."""
        before = self.current
        self._book(now)
        self.current = activity
        return before

    def take(self, now: float) -> Spans:
        """What has not been reported yet, up to `now`; it counts as reported from here on."""
        self._book(now)
        spans = tuple((activity, seconds) for activity, seconds in self._unreported.items() if seconds > 0.0)
        self._unreported.clear()
        return spans

    def give_back(self, spans: Spans) -> None:
        """The report with these spans did not go out; the next one carries them."""
        for activity, seconds in spans:
            self._unreported[activity] += seconds

    def start_over(self, now: float) -> None:
        """A new incarnation begins: what was not reported belonged to the old one, which nobody hears of any more."""
        self.take(now)

    def totals(self, now: float) -> dict[Activity, float]:
        """Seconds by activity since the start of the process."""
        self._book(now)
        return dict(self._total)

    def _book(self, now: float) -> None:
        seconds = max(0.0, now - self._since)
        self._unreported[self.current] += seconds
        self._total[self.current] += seconds
        self._since = max(self._since, now)


class StepTimer:
    """The smoothed duration of a step from boundary to boundary, without holds. Not thread-safe; its owner locks."""

    def __init__(self) -> None:
        self._running_since: float | None = None
        self._finished_count = 0
        self.step_seconds: float | None = None

    def begin(self, now: float) -> None:
        """A step begins."""
        self._running_since = now

    def end(self, now: float) -> float | None:
        """The step that ran is over, its boundary included; returns its seconds.

        The first one, which may have compiled, does not go into the average.
        """
        if self._running_since is None:
            return None
        seconds = now - self._running_since
        self._running_since = None
        self._finished_count += 1
        if self._finished_count > 1:
            average = self.step_seconds
            if average is None:
                self.step_seconds = seconds
            else:
                self.step_seconds = average + STEP_GAIN * (min(seconds, STEP_GROWTH_MAX * average) - average)
        return seconds

    def running_seconds(self, now: float) -> float | None:
        """Age of the running step; None between steps."""
        return None if self._running_since is None else max(0.0, now - self._running_since)
