"""Which fragment is synchronised when: pure arithmetic of rounds, global steps and due local steps.

Round r = 1, 2, ... is one pair (global step t(r), fragment p(r) = (r-1) mod P) with t(r) mod H = t_p = floor(p*H/P).
Round r is due after t(r)+1 steps.
"""

from __future__ import annotations

import math

from decoupled_diloco.core.policy import Policy

CALLED_EARLY_STEPS = 2
"""A last call may come so many steps before the learner would answer by itself, or the steps between two rounds."""
LONG_STEP = 1.5
"""A step that lasts so many average ones is provided for."""
PACE_DEPTH_STEPS = 0.5
"""How much earlier than its pace a round may leave OPEN to make up for a late one before it, in steps of the fastest
learner. Without it every late step would stretch the sync interval for good; with much more there would be bursts."""
PACE_TOLERANCE_STEPS = 0.1
"""Learners whose speeds differ by less than this share of a step between two rounds count as equally fast; otherwise
measurement noise of a hair would make one of two equal learners answer a whole step early."""


def fragment_of(round_number: int, policy: Policy) -> int:
    """p(r): the fragment that a round synchronises."""
    return (round_number - 1) % policy.fragment_count


def global_step_of(round_number: int, policy: Policy) -> int:
    """t(r), from 0; round 0 (nothing has closed yet) stands at -1, one step before round 1."""
    if round_number < 1:
        return -1
    cycle, fragment = divmod(round_number - 1, policy.fragment_count)
    return cycle * policy.interval_steps + fragment * policy.interval_steps // policy.fragment_count


def last_round_of(total_steps: int, policy: Policy) -> int:
    """The newest round with t(r) < total_steps; 0 if there is none."""
    cycle, rest = divmod(max(total_steps, 0), policy.interval_steps)
    return cycle * policy.fragment_count + sum(offset < rest for offset in policy.fragment_offsets)


def due_local_step(local_step: float, global_step: int, based_on_global_step: int, pace_ratio: float) -> int:
    """due_m(r) = max(s_m + 1, floor(s_m + (t(r) - t(q)) * xi_step / xi_m)).

    Args:
        local_step: s_m, the learner's local step when q was answered, left OPEN or closed; with the part of the
            running step that was done, where that is known.
        global_step: t(r).
        based_on_global_step: t(q) of the newest round that the learner answered or that closed without it.
        pace_ratio: xi_step / xi_m, the step time of the fastest learner over the learner's own, (0, 1].
    """
    own_steps = (global_step - based_on_global_step) * pace_ratio
    return max(math.floor(local_step) + 1, math.floor(local_step + own_steps + PACE_TOLERANCE_STEPS))


def rounds_soon_called(overdue_steps: int, pace_ratio: float, policy: Policy) -> int:
    """How many rounds after the newest one known may reach their last call within the learner's next step; at most P.

    The pace lets one round leave OPEN every H/P steps of the fastest learner, and makes up for half a step, so that few
    can within one step; and none whose turn by the schedule is still far.

    Args:
        overdue_steps: steps that the learner has made since the newest round it knows was due; negative: it is due
            so much later.
        pace_ratio: xi_step / xi_m, as for `due_local_step`.
        policy: P and H matter here.
    """
    per_step = policy.fragment_count / policy.interval_steps
    steps_between = max(pace_ratio, 1e-3) / per_step
    within_a_step = 1 + math.floor(LONG_STEP * (1.0 / max(pace_ratio, 1e-3) + PACE_DEPTH_STEPS) * per_step)
    soon = math.floor((overdue_steps + max(CALLED_EARLY_STEPS, steps_between)) / steps_between)
    return max(0, min(policy.fragment_count, within_a_step, soon))
