"""Batches of token windows: which windows batch number n of a slot holds is a function of (seed, slot, n)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count

import grain
import numpy as np
import xxhash


class TokenWindows:
    """The windows of a token sequence.

    Window i is tokens[i*T : i*T + T + 1] with T = `sequence_length`: T inputs and the T targets that follow them, so
    that windows share no target.

    Args:
        tokens: [n] of any integer type; may be memory-mapped, only what is taken is read.
        sequence_length: targets per window, >= 1.
    """

    def __init__(self, tokens: np.ndarray, sequence_length: int) -> None:
        self._tokens = tokens
        self._sequence_length = sequence_length

    def __len__(self) -> int:
        return max(0, len(self._tokens) - 1) // self._sequence_length

    def positions(self, windows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns int64 [len(windows), sequence_length + 1]: where in the sequence the tokens of these windows are."""
        starts = np.asarray(windows, np.int64)[:, None] * self._sequence_length
        return starts + np.arange(self._sequence_length + 1)

    def take(self, windows: Sequence[int] | np.ndarray) -> np.ndarray:
        """Returns int32 [len(windows), sequence_length + 1]: the tokens of these windows."""
        return self._tokens[self.positions(windows)].astype(np.int32)


class SlotBatches:
    """The endless batches of every slot.

    In each epoch the windows are put into a new order (Grain's shuffle: an exact permutation whose k-th entry is
    computed, not stored), the same for all slots, and slot s takes every `slot_count`-th: slots below `slot_count`
    are disjoint within an epoch and together cover all windows but the last few. Slot s + k * `slot_count` takes the
    stripe of slot s in a k-th order of its own.

    Args:
        windows: what to draw from.
        batch_size: windows per batch.
        slot_count: number of stripes.
        seed: of the orders, >= 0.
    """

    def __init__(self, windows: TokenWindows, batch_size: int, slot_count: int, seed: int) -> None:
        self._windows = windows
        self._indices = grain.MapDataset.range(len(windows))
        self._batch_size = batch_size
        self._slot_count = slot_count
        self._seed = seed
        self.batches_per_epoch = len(windows) // slot_count // batch_size
        """How many batches a slot has until it starts over; 0 if there is too little text, then there are none."""

    def batch(self, slot: int, cursor: int) -> np.ndarray:
        """Returns batch number `cursor` (>= 0) of a slot (>= 0): int32 [batch_size, sequence_length + 1]."""
        return next(self.iterate(slot, cursor))

    def iterate(self, slot: int, cursor: int) -> Iterator[np.ndarray]:
        """Yields the batches number `cursor`, `cursor + 1`, ... of a slot, without end."""
        round_of_orders, stripe = divmod(slot, self._slot_count)
        epoch, order = -1, self._indices
        for number in count(cursor):
            due, index = divmod(number, self.batches_per_epoch)
            if due != epoch:
                epoch, order = due, self._order(round_of_orders, due)
            first = index * self._batch_size
            places = range(first, first + self._batch_size)
            yield self._windows.take([order[place * self._slot_count + stripe] for place in places])

    def _order(self, round_of_orders: int, epoch: int) -> grain.MapDataset:
        """All windows in the order of an epoch; reading one entry costs the same everywhere."""
        seed = xxhash.xxh32_intdigest(f"{self._seed}/{round_of_orders}/{epoch}".encode())
        return self._indices.shuffle(seed=seed)
