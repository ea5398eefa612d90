"""Balanced tensor fragmentation, and the flat vector of a fragment.

A fragment is a set of pieces of tensors that is exchanged as a whole: one flat float32 vector, the pieces
one after another. Both sides compute the fragmentation by themselves from the schema and the number of
fragments P, so it must be a pure function of the two.

Balance. Longest processing time first: pieces by size descending (ties by name), each into the smallest
fragment so far. Tensors that can be cut without changing the arithmetic are cut only if that is needed:
`avg` tensors by rows (a weighted mean is elementwise), stacked tensors by slice (each slice is a merge unit
of its own). We try the whole tensors first, then cut ever finer, and stop as soon as the largest fragment
lies within 5 % of the mean. Once no divisible piece is larger than a quarter of the mean, the piece that
ends the largest fragment is either at most a third of the optimum or indivisible like all those before it,
so the bound of LPT, 4/3 of the optimum, holds for the best of all permitted cuts and not only for the cut
tried.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Final, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.schema import MergeRule, Schema, SchemaError, TensorSpec

_EVEN_ENOUGH: Final = 1.05
"""Largest fragment over mean at which no finer cut is tried."""

_FINEST_CUT: Final = 64
"""Cuts go down to the mean divided by this, unless even that leaves fewer pieces than fragments."""


class Segment(NamedTuple):
    """A range of a flat vector that is merged as one unit: one tensor, or one slice of a stacked one."""

    start: int
    stop: int
    rule: MergeRule


@dataclass(frozen=True, slots=True)
class Piece:
    """A whole tensor, or the part of it whose index along `axis` lies in start..stop.

    Attributes:
        spec: the tensor.
        axis: the axis along which the tensor may be cut, or None if it is indivisible. It comes first in
            the flat vector, whatever its place in the tensor, so that every slice along it is contiguous.
        start: first index along `axis` (0 if there is none).
        stop: one past the last index along `axis` (1 if there is none).
        offset: first element of the piece in the fragment's flat vector.
    """

    spec: TensorSpec
    axis: int | None
    start: int
    stop: int
    offset: int

    @property
    def tensor(self) -> str:
        """Name of the tensor."""
        return self.spec.name

    @property
    def unit_size(self) -> int:
        """Elements of one slice along `axis`."""
        return self.spec.size if self.axis is None else self.spec.size // self.spec.shape[self.axis]

    @property
    def size(self) -> int:
        """Number of elements."""
        return (self.stop - self.start) * self.unit_size

    @property
    def is_whole(self) -> bool:
        """Whether the piece is the entire tensor."""
        return self.size == self.spec.size

    @property
    def flat_shape(self) -> tuple[int, ...]:
        """Shape of the piece as it lies in the flat vector: `axis` first."""
        if self.axis is None:
            return self.spec.shape
        rest = self.spec.shape[: self.axis] + self.spec.shape[self.axis + 1 :]
        return (self.stop - self.start, *rest)

    @property
    def flat_slice(self) -> slice:
        """Where the piece lies in the flat vector."""
        return slice(self.offset, self.offset + self.size)

    def view(self, tensor: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
        """The piece of `tensor` as a view with `axis` first, of shape `flat_shape`."""
        if self.axis is None:
            return tensor
        return np.moveaxis(tensor, self.axis, 0)[self.start : self.stop]

    def segments(self) -> Iterator[Segment]:
        """The merge units of the piece, in order."""
        if self.spec.rule == "avg":
            yield Segment(self.offset, self.offset + self.size, "avg")
            return
        for begin in range(self.offset, self.offset + self.size, self.unit_size):
            yield Segment(begin, begin + self.unit_size, "rda")


@dataclass(frozen=True)
class Fragment:
    """Pieces that travel together, ordered by tensor name, at most one of each tensor.

    Attributes:
        index: 0 to P-1.
        pieces: at least one.
    """

    index: int
    pieces: tuple[Piece, ...]

    @cached_property
    def size(self) -> int:
        """Elements of the flat vector."""
        return sum(piece.size for piece in self.pieces)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The merge units, in order; together they cover the flat vector."""
        return tuple(segment for piece in self.pieces for segment in piece.segments())


@dataclass(frozen=True)
class Fragmentation:
    """Every element of every tensor of `schema`, in exactly one of `fragments`."""

    schema: Schema
    fragments: tuple[Fragment, ...]

    @property
    def imbalance(self) -> float:
        """Elements of the largest fragment over the mean; 1.0 is perfect."""
        return max(fragment.size for fragment in self.fragments) * len(self.fragments) / self.schema.size

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each fragment."""
        return tuple(fragment.size for fragment in self.fragments)


class _Cut(NamedTuple):
    """Some slices of one tensor on the way to a fragment; sorts by size descending, then by name."""

    negative_size: int
    name: str
    slice_count: int


_Bins = list[list[_Cut]]


def fragment_schema(schema: Schema, fragment_count: int) -> Fragmentation:
    """Distributes the tensors of `schema` over `fragment_count` fragments, as even as the tensors allow.

    Raises:
        SchemaError: `fragment_count` is below 1, or above the number of pieces that the tensors can be cut
            into.
    """
    usable = sum(_slice_count(spec) for spec in schema.tensors)
    if not 1 <= fragment_count <= usable:
        raise SchemaError(
            f"fragments.count = {fragment_count} cannot be used with this model: its {len(schema.tensors)} "
            f"tensors can be cut into {usable} pieces (avg tensors by rows, stacked tensors by slice, others "
            f"not at all). Use 1 to {usable}."
        )
    best: _Bins = []
    for cuts in _ever_finer(schema, fragment_count):
        if len(cuts) < fragment_count:
            continue
        bins = _longest_first(cuts, fragment_count)
        if not best or _unevenness(bins) < _unevenness(best):
            best = bins
        if _unevenness(best)[0] * fragment_count <= _EVEN_ENOUGH * schema.size:
            break
    return Fragmentation(schema, _laid_out(schema, best))


def cut_axis(spec: TensorSpec) -> int | None:
    """The axis along which a tensor may be cut.

    For `avg` the first that is longer than 1 (usually the rows), for `rda` the stacked one, or None.
    """
    if spec.rule == "rda":
        return spec.stack_axis
    return next((axis for axis, extent in enumerate(spec.shape) if extent > 1), None)


def _slice_count(spec: TensorSpec) -> int:
    axis = cut_axis(spec)
    return 1 if axis is None else spec.shape[axis]


def _ever_finer(schema: Schema, fragment_count: int) -> Iterator[list[_Cut]]:
    """The schema in whole tensors, then with no divisible piece above mean, mean/2, mean/4, ..."""
    mean = schema.size / fragment_count
    yield _cut_all(schema, math.inf)
    limit = mean
    cut_count = 0
    while limit >= mean / _FINEST_CUT or cut_count < fragment_count:
        cuts = _cut_all(schema, limit)
        cut_count = len(cuts)
        yield cuts
        limit /= 2


def _cut_all(schema: Schema, limit: float) -> list[_Cut]:
    """Cuts each tensor into the fewest even runs of slices of at most `limit` elements, or single slices."""
    cuts = []
    for spec in schema.tensors:
        slice_count = _slice_count(spec)
        slice_size = spec.size // slice_count
        part_count = max(1, min(slice_count, math.ceil(spec.size / limit)))
        bounds = [slice_count * part // part_count for part in range(part_count + 1)]
        for start, stop in pairwise(bounds):
            cuts.append(_Cut(-(stop - start) * slice_size, spec.name, stop - start))
    return cuts


def _longest_first(cuts: list[_Cut], fragment_count: int) -> _Bins:
    """LPT: the largest piece first, each into the smallest fragment so far, the lowest index on a tie."""
    heap = [(0, index) for index in range(fragment_count)]
    bins: _Bins = [[] for _ in range(fragment_count)]
    for cut in sorted(cuts):
        size, index = heap[0]
        heapq.heapreplace(heap, (size - cut.negative_size, index))
        bins[index].append(cut)
    return bins


def _unevenness(bins: _Bins) -> tuple[int, int]:
    """Size of the largest fragment; among equals the sum of squares, which is least where the rest is even."""
    sizes = [-sum(cut.negative_size for cut in cuts) for cuts in bins]
    return max(sizes), sum(size * size for size in sizes)


def _laid_out(schema: Schema, bins: _Bins) -> tuple[Fragment, ...]:
    """Gives each fragment one contiguous run of each tensor it has slices of, and a place in its vector.

    Slices of a tensor are equal in size, so handing them out in the order of the fragments keeps every size.
    """
    next_start: dict[str, int] = defaultdict(int)
    fragments = []
    for index, cuts in enumerate(bins):
        slice_counts: dict[str, int] = defaultdict(int)
        for cut in cuts:
            slice_counts[cut.name] += cut.slice_count
        pieces: list[Piece] = []
        offset = 0
        for name in sorted(slice_counts):
            spec, start = schema.by_name[name], next_start[name]
            next_start[name] = start + slice_counts[name]
            pieces.append(Piece(spec, cut_axis(spec), start, next_start[name], offset))
            offset += pieces[-1].size
        fragments.append(Fragment(index, tuple(pieces)))
    return tuple(fragments)


def gather(
    fragment: Fragment, tensors: Mapping[str, npt.NDArray[np.generic]], out: FloatVector | None = None
) -> FloatVector:
    """Flattens the pieces of `fragment` into one float32 vector.

    Args:
        fragment: whose pieces to take.
        tensors: at least the fragment's tensors by name, in their shapes; any float type.
        out: float32 vector of `fragment.size` elements to fill, or None for a new one.

    Raises:
        SchemaError: a tensor is missing or has another shape.
    """
    flat = np.empty(fragment.size, np.float32) if out is None else out
    for piece in fragment.pieces:
        source = piece.view(_checked(piece, tensors))
        np.copyto(flat[piece.flat_slice].reshape(piece.flat_shape), source, casting="unsafe")
    return flat


def scatter(fragment: Fragment, flat: FloatVector, tensors: Mapping[str, npt.NDArray[np.generic]]) -> None:
    """Writes the flat vector of `fragment` into `tensors`, in place, rounding to their float type.

    Raises:
        SchemaError: a tensor is missing or has another shape.
        ValueError: `flat` has not `fragment.size` elements.
    """
    if flat.shape != (fragment.size,):
        raise ValueError(f"fragment {fragment.index} has {fragment.size} elements, the vector has shape {flat.shape}")
    for piece in fragment.pieces:
        target = piece.view(_checked(piece, tensors))
        np.copyto(target, flat[piece.flat_slice].reshape(piece.flat_shape), casting="unsafe")


def assemble(fragmentation: Fragmentation, flats: Mapping[int, FloatVector]) -> dict[str, npt.NDArray[np.float32]]:
    """All tensors in float32 from the flat vectors of all fragments by index, for export and evaluation."""
    tensors = {spec.name: np.empty(spec.shape, np.float32) for spec in fragmentation.schema.tensors}
    for fragment in fragmentation.fragments:
        scatter(fragment, flats[fragment.index], tensors)
    return tensors


def as_held(fragment: Fragment, flat: FloatVector) -> FloatVector:
    """The vector as a learner holds it: each piece rounded to its leaf's type and back to float32.

    A learner with bfloat16 leaves starts from the rounded value, so its delta must be taken against that:
    otherwise every upload would carry the rounding of Theta as if the learner had moved there. `flat`
    itself if all are float32.
    """
    if all(piece.spec.dtype == "float32" for piece in fragment.pieces):
        return flat
    held = flat.copy()
    for piece in fragment.pieces:
        if piece.spec.dtype != "float32":
            held[piece.flat_slice] = flat[piece.flat_slice].astype(leaf_dtype(piece.spec))
    return held


def leaf_dtype(spec: TensorSpec) -> np.dtype[np.generic]:
    """NumPy's name for the type of a learner's leaf, bfloat16 included."""
    return np.dtype(ml_dtypes.bfloat16 if spec.dtype == "bfloat16" else spec.dtype)


def _checked(piece: Piece, tensors: Mapping[str, npt.NDArray[np.generic]]) -> npt.NDArray[np.generic]:
    tensor = tensors.get(piece.tensor)
    if tensor is None or tensor.shape != piece.spec.shape:
        found = "is missing" if tensor is None else f"has shape {tensor.shape}"
        raise SchemaError(f"Tensor {piece.tensor!r} {found}; the schema gives it shape {piece.spec.shape}.")
    return tensor
