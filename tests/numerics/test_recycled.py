"""Memory of results: used again when nothing refers to it, never before."""

import gc

import numpy as np
import pytest

from decoupled_diloco.arrays.outer import FragmentState, outer_step
from decoupled_diloco.arrays.recycled import ALIGNMENT_BYTES, KEPT_BLOCKS_MAX, RECYCLED_BYTES_MIN, Recycler

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
    vectors = [recycler.take(SIZE) for _ in range(2 * KEPT_BLOCKS_MAX)]
    assert recycler.free_bytes == 0
    vectors.clear()
    assert recycler.free_bytes == KEPT_BLOCKS_MAX * (SIZE + ALIGNMENT_BYTES)


def test_versions_that_are_held_keep_their_values() -> None:
    size = SIZE // 2
    state = FragmentState.initial(np.zeros(size, np.float32))
    versions = []
    for number in range(2 * KEPT_BLOCKS_MAX):
        delta = np.full(size, -1, np.float32)
        step = outer_step(state, delta, learning_rate=1.0, mu=0.0, download_encoding="bf16")
        state = step.state
        if number % 2:
            versions.append((number + 1, state.theta[::7], step.delta_payload))
    for number, theta, payload in versions:
        assert (theta == number).all()
        assert payload == np.full(size, 0x3F80, np.uint16).tobytes()
