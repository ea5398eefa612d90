"""Which windows a slot sees: a function of seed, slot and cursor, disjoint between slots, each once per epoch."""

from __future__ import annotations

import multiprocessing
from itertools import chain, islice

import numpy as np
import pytest

from learner_service.workloads.language_model.batches import SlotBatches, TokenWindows

LENGTH = 4
TOKENS = np.arange(LENGTH * 25 + 1, dtype=np.uint16)
"""25 windows, of which window i starts with token 4 i."""


def slots(seed: int = 3, batch_size: int = 2, slot_count: int = 3) -> SlotBatches:
    return SlotBatches(TokenWindows(TOKENS, LENGTH), batch_size, slot_count, seed)


def windows_of(batches: SlotBatches, slot: int, first: int, count: int) -> list[int]:
    return [int(row[0]) // LENGTH for number in range(first, first + count) for row in batches.batch(slot, number)]


def _batch_elsewhere(slot: int, cursor: int) -> bytes:
    return slots().batch(slot, cursor).tobytes()


def test_a_window_holds_its_inputs_and_the_targets_that_follow() -> None:
    windows = TokenWindows(TOKENS, LENGTH)
    assert len(windows) == 25
    assert windows.take([0, 24]).tolist() == [[0, 1, 2, 3, 4], [96, 97, 98, 99, 100]]
    assert windows.take([0]).dtype == np.int32


@pytest.mark.parametrize(("token_count", "window_count"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_only_whole_windows_count(token_count: int, window_count: int) -> None:
    assert len(TokenWindows(TOKENS[:token_count], LENGTH)) == window_count


def test_another_process_gets_the_same_batch() -> None:
    keys = [(0, 0), (1, 7), (2, 1000), (5, 3)]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.starmap(_batch_elsewhere, keys)
    assert there == [_batch_elsewhere(*key) for key in keys]


def test_slots_are_disjoint_within_an_epoch_and_take_each_window_once() -> None:
    batches = slots()
    assert batches.batches_per_epoch == 4
    for epoch in range(3):
        seen = [windows_of(batches, slot, epoch * 4, 4) for slot in range(3)]
        together = list(chain(*seen))
        assert len(together) == len(set(together)) == 24


def test_each_epoch_has_an_order_of_its_own() -> None:
    orders = {tuple(windows_of(slots(), 1, epoch * 4, 4)) for epoch in range(5)}
    assert len(orders) == 5


def test_slots_beyond_the_count_have_orders_of_their_own() -> None:
    assert windows_of(slots(), 1, 0, 4) != windows_of(slots(), 4, 0, 4) != windows_of(slots(), 7, 0, 4)
    further = chain(*(windows_of(slots(), slot, 0, 4) for slot in (3, 4, 5)))
    assert len(set(further)) == 24


def test_resuming_at_a_cursor_is_continuing() -> None:
    through = list(islice(slots().iterate(2, 0), 20))
    for cursor in (0, 3, 4, 11):
        resumed = islice(slots().iterate(2, cursor), 20 - cursor)
        assert [batch.tolist() for batch in resumed] == [batch.tolist() for batch in through[cursor:]]


def test_another_seed_is_another_order() -> None:
    assert windows_of(slots(seed=3), 0, 0, 4) != windows_of(slots(seed=4), 0, 0, 4)


def test_a_far_cursor_reads_no_more_than_a_near_one() -> None:
    class Counted(np.ndarray):
        reads = 0

        def __getitem__(self, key: object) -> np.ndarray:
            Counted.reads += 1
            return np.asarray(self)[key]  # type: ignore[index]

    batches = SlotBatches(TokenWindows(TOKENS.view(Counted), LENGTH), 2, 3, 0)
    batches.batch(1, 10**9)
    assert Counted.reads == 1
