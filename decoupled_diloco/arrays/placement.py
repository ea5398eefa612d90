"""Where the elements of a fragment lie: on which device, in which shard, and at which place of the flat vector.

Needs jax; only learners import it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import NamedTuple

import jax

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragment, Piece

Span = tuple[int, int]


class Cut(NamedTuple):
    """The part of a shard that belongs to a piece: start..stop along `axis`, or all of it if `axis` is None."""

    axis: int | None
    start: int
    stop: int


WHOLE = Cut(None, 0, 0)


class Part(NamedTuple):
    """The overlap of one piece with one shard of its tensor.

    Attributes:
        piece: position in the fragment.
        shard: position among the addressable shards of the leaf.
        cut: where it lies in the shard.
        place: first and last index plus one, along each axis, in the piece's view of the flat vector.
        is_first_replica: whether this device speaks for its replicas.
    """

    piece: int
    shard: int
    cut: Cut
    place: tuple[Span, ...]
    is_first_replica: bool

    def of(self, piece: Piece, flat: FloatVector) -> FloatVector:
        """The elements of the part as a view of the flat vector; the piece's axis first."""
        index: tuple[slice | EllipsisType, ...] = (*(slice(*span) for span in self.place), ...)
        return flat[piece.flat_slice].reshape(piece.flat_shape)[index]


class Group(NamedTuple):
    """The parts on one device, and their cuts once more as the static argument of its programs."""

    device: jax.Device
    parts: tuple[Part, ...]
    cuts: tuple[Cut, ...]


@dataclass(frozen=True, eq=False)
class Placement:
    """How the leaves of one fragment lie on the devices: what to read, and what to write.

    Attributes:
        committed: for each piece, whether its leaf is bound to its device; kept, because programs that were
            compiled for one kind are compiled again for the other.
        whole: for each piece, whether its leaf has a single shard.
        reading: the parts of first replicas, which together are the fragment.
        writing: all parts.
    """

    committed: tuple[bool, ...]
    whole: tuple[bool, ...]
    reading: tuple[Group, ...]
    writing: tuple[Group, ...]


def observed_placement(fragment: Fragment, leaves: Sequence[jax.Array]) -> Placement:
    """The placement of a fragment whose pieces are of `leaves`, one by one."""
    parts: dict[jax.Device, list[Part]] = {}
    for position, (piece, leaf) in enumerate(zip(fragment.pieces, leaves, strict=True)):
        if is_on_one_device(leaf):
            shards = [(next(iter(leaf.devices())), (slice(None),) * leaf.ndim, True)]
        else:
            shards = [(shard.device, shard.index, shard.replica_id == 0) for shard in leaf.addressable_shards]
        for shard_position, (device, index, is_first) in enumerate(shards):
            overlap = _overlap(piece, index)
            if overlap is not None:
                part = Part(position, shard_position, *overlap, is_first)
                parts.setdefault(device, []).append(part)
    return Placement(
        committed=tuple(leaf.committed for leaf in leaves),
        whole=tuple(map(is_on_one_device, leaves)),
        reading=_grouped(parts, lambda part: part.is_first_replica),
        writing=_grouped(parts, lambda part: True),
    )


def is_on_one_device(leaf: jax.Array) -> bool:
    """Whether the array has a single shard."""
    return len(leaf.sharding.device_set) == 1


def shards_of(leaf: jax.Array, is_whole: bool) -> list[jax.Array]:
    """The addressable shards, as arrays on one device each that share the leaf's memory."""
    # An array on one device is its own shard, but must not be asked: it would keep itself alive in its cache.
    return [leaf] if is_whole else [shard.data for shard in leaf.addressable_shards]


def joined(leaf: jax.Array, shards: list[jax.Array], is_whole: bool) -> jax.Array:
    """The array that has these addressable shards and the sharding of `leaf`."""
    if is_whole:
        return shards[0]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)


def _overlap(piece: Piece, index: tuple[slice, ...]) -> tuple[Cut, tuple[Span, ...]] | None:
    """What a shard with this index has of the piece: where in the shard, and where in the piece."""
    spans = [part.indices(extent)[:2] for part, extent in zip(index, piece.spec.shape, strict=True)]
    if piece.axis is None:
        return WHOLE, tuple(spans)
    first, last = spans.pop(piece.axis)
    start, stop = max(first, piece.start), min(last, piece.stop)
    if start >= stop:
        return None
    is_all = (start, stop) == (first, last)
    cut = WHOLE if is_all else Cut(piece.axis, start - first, stop - first)
    return cut, ((start - piece.start, stop - piece.start), *spans)


def _grouped(parts: Mapping[jax.Device, list[Part]], wanted: Callable[[Part], bool]) -> tuple[Group, ...]:
    chosen = {device: tuple(filter(wanted, on_device)) for device, on_device in parts.items()}
    return tuple(Group(device, some, tuple(part.cut for part in some)) for device, some in chosen.items() if some)
