"""Memory of results: used again when nothing refers to it, never before."""

import gc
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from decoupled_diloco.arrays.outer import FragmentState, outer_step
from decoupled_diloco.arrays.recycled import ALIGNMENT_BYTES, KEPT_REGIONS_MAX, RECYCLED_BYTES_MIN, Loan, Recycler

SIZE = RECYCLED_BYTES_MIN


@pytest.mark.parametrize("size", [1, 1000, SIZE - 1, SIZE, SIZE + 1])
def test_a_vector_has_its_size_and_begins_on_a_cache_line(size: int) -> None:
    vector = Recycler().take(size)
    assert vector.shape == (size,)
    assert vector.flags.writeable
    assert vector.ctypes.data % ALIGNMENT_BYTES == 0


def test_memory_is_used_again_once_the_last_view_is_gone() -> None:
    recycler = Recycler()
    vector = recycler.take(SIZE)
    address = vector.ctypes.data
    view = vector.view(np.float32)[10:].view()
    bytes_of_it = view.data
    del vector, view
    other = recycler.take(SIZE)
    assert other.ctypes.data != address
    del bytes_of_it
    gc.collect()
    assert recycler.take(SIZE).ctypes.data == address


def test_a_little_smaller_is_good_enough_and_half_is_not() -> None:
    recycler = Recycler()
    address = recycler.take(4 * SIZE).ctypes.data
    assert recycler.take(2 * SIZE).ctypes.data != address
    assert recycler.take(4 * SIZE + SIZE).ctypes.data != address
    assert recycler.take(4 * SIZE - SIZE // 8).ctypes.data == address


def test_no_more_is_kept_than_a_merge_takes() -> None:
    recycler = Recycler()
    vectors = [recycler.take(SIZE) for _ in range(2 * KEPT_REGIONS_MAX)]
    assert recycler.free_bytes == 0
    vectors.clear()
    assert recycler.free_bytes == KEPT_REGIONS_MAX * SIZE


def address_of(loan: Loan) -> int:
    return int(loan.data.ctypes.data)


def test_a_loan_has_its_size_and_begins_on_a_cache_line() -> None:
    recycler = Recycler()
    for size in (1, SIZE - 1, SIZE, SIZE + 1):
        loan = recycler.lend(size)
        assert loan.data.size == size
        assert loan.data.flags.writeable
        assert address_of(loan) % ALIGNMENT_BYTES == 0
        loan.give_back()


def test_two_loans_of_half_the_size_lie_where_a_result_lies_later() -> None:
    recycler = Recycler()
    first, second = recycler.lend(SIZE, 2 * SIZE), recycler.lend(SIZE, 2 * SIZE)
    assert address_of(second) == address_of(first) + SIZE
    address = address_of(first)
    first.give_back()
    between = recycler.take(2 * SIZE)  # the second is still lent
    assert between.ctypes.data != address
    second.give_back()
    assert recycler.take(2 * SIZE).ctypes.data == address


def test_a_loan_lies_where_a_result_lay_and_not_while_somebody_sees_it() -> None:
    recycler = Recycler()
    result = recycler.take(2 * SIZE)
    address, view = result.ctypes.data, result[5:]
    del result
    assert address_of(recycler.lend(SIZE)) != address
    del view
    assert address_of(recycler.lend(2 * SIZE)) == address


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 9)), max_size=60))
def test_loans_never_overlap_and_all_memory_comes_back(steps: list[tuple[int, int]]) -> None:
    recycler, quarter = Recycler(), SIZE // 4
    lent: dict[int, Loan] = {}
    for key, quarters in steps:
        if key in lent:
            lent.pop(key).give_back()
            continue
        lent[key] = recycler.lend(SIZE + quarters * quarter, 8 * SIZE)
        spans = sorted((address_of(loan), address_of(loan) + loan.data.size) for loan in lent.values())
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    for loan in lent.values():
        loan.give_back()
    assert recycler.free_bytes % (8 * SIZE) == 0  # each region is whole again
    assert not steps or recycler.free_bytes > 0


def test_memory_for_as_many_loans_as_there_were_is_kept() -> None:
    recycler = Recycler()
    for loan in [recycler.lend(SIZE) for _ in range(3 * KEPT_REGIONS_MAX)]:
        loan.give_back()
    assert recycler.free_bytes == 3 * KEPT_REGIONS_MAX * SIZE
    vectors = [recycler.take(SIZE) for _ in range(5 * KEPT_REGIONS_MAX)]
    vectors.clear()
    assert recycler.free_bytes == 4 * KEPT_REGIONS_MAX * SIZE


def test_versions_that_are_held_keep_their_values() -> None:
    size = SIZE // 2
    state = FragmentState.initial(np.zeros(size, np.float32))
    versions = []
    for number in range(2 * KEPT_REGIONS_MAX):
        delta = np.full(size, -1, np.float32)
        step = outer_step(state, delta, learning_rate=1.0, mu=0.0, download_encoding="bf16")
        state = step.state
        if number % 2:
            versions.append((number + 1, state.theta[::7], step.delta_payload))
    for number, theta, payload in versions:
        assert (theta == number).all()
        assert payload == np.full(size, 0x3F80, np.uint16).tobytes()
