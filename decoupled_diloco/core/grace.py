"""The adaptive grace window and the moving averages that it is made of.

    xi_slack = tau * xi_step - (xi_quorum + xi_sync)                       (Eq. 3)
    xi_grace = min(gamma * xi_slack, cap * xi_step), never negative

xi_step is the step time of the fastest live learner, xi_quorum the time from the first start to the K-th, xi_sync
upload + merge + commit + download (median of the contributors). The averages survive restarts.
"""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.core.policy import Policy


@dataclass(slots=True)
class Average:
    """An exponential moving average; `value` is None before the first sample."""

    gain: float
    value: float | None = None

    def add(self, sample: float) -> None:
        """Takes one sample in."""
        self.value = sample if self.value is None else self.value + self.gain * (sample - self.value)

    def get(self, default: float = 0.0) -> float:
        """The average, or `default` before the first sample."""
        return default if self.value is None else self.value


def slack_seconds(policy: Policy, step_seconds: float, quorum_seconds: float, sync_seconds: float) -> float:
    """xi_slack: what is left of tau steps after quorum and sync; may be negative."""
    return policy.overlap_steps * step_seconds - (quorum_seconds + sync_seconds)


def grace_seconds(policy: Policy, step_seconds: float | None, quorum_seconds: float, sync_seconds: float) -> float:
    """xi_grace: how long a round that has its quorum waits for more learners, >= 0; 0 while no step time is known."""
    if step_seconds is None:
        return 0.0
    slack = slack_seconds(policy, step_seconds, quorum_seconds, sync_seconds)
    return max(0.0, min(policy.grace_share * slack, policy.grace_cap_steps * step_seconds))


def median(values: list[float]) -> float:
    """The middle value (mean of the two middle ones); 0 of nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
