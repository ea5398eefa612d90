"""Waits for the step before, and takes its loss along: at most one step is ever under way on the device."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax


class LossMeter:
    """Turns losses into numbers without letting the device run dry.

    On the host's own processor a step is waited for at its own boundary, because host and device share the cores. On an
    accelerator the loss of the step before is waited for: the next one is under way meanwhile, and the time from
    boundary to boundary is still that of a step.

    Args:
        take: gets every finite loss.
    """

    def __init__(self, take: Callable[[float], None]) -> None:
        self._take = take
        self._pending: tuple[jax.Array, int] | None = None
        self.newest: float | None = None
        """The last finite loss."""
        self.judged = 0
        """The batch of the loss that `settle` looked at last."""

    def settle(self, loss: Any, cursor: int = 0) -> bool:
        """Takes in a step's loss; returns false if one that is known by now is not finite.

        Args:
            loss: number or scalar array.
            cursor: the number of its batch.
        """
        if not isinstance(loss, jax.Array) or _is_on_cpu(loss):
            return self._record(float(loss), cursor)
        before, self._pending = self._pending, (loss, cursor)
        return before is None or self._record(float(before[0]), before[1])

    def forget(self) -> None:
        """The parameters were taken anew: a loss that is still under way is of others."""
        self._pending = None

    def _record(self, loss: float, cursor: int) -> bool:
        self.judged = cursor
        if not math.isfinite(loss):
            return False
        self.newest = loss
        self._take(loss)
        return True


def wait_on_cpu(params: Any) -> None:
    """Waits for the step that made these parameters, if it ran on the host's own processor."""
    leaf = next((leaf for leaf in jax.tree_util.tree_leaves(params) if isinstance(leaf, jax.Array)), None)
    if leaf is not None and _is_on_cpu(leaf):
        jax.block_until_ready(leaf)


def _is_on_cpu(array: jax.Array) -> bool:
    return all(device.platform == "cpu" for device in array.devices())
