"""Fragments on the learner's devices: copied out at a step boundary, written back at another.

Needs jax; only learners import it. Every device is served by itself, with plain single-device programs on the
shards that lie there: no collective, no demand on how a leaf is sharded, and the same code for one device.

The device thread calls `DeviceFragments.copy` and the `overwrite` family; both only enqueue work.
`DeviceCopy.to_host` and `DeviceFragments.stage` move bytes between host and devices and belong on another thread.

Leaves of less than float32 are the learner's choice; what is exchanged is float32. Copies are widened exactly, and
what is applied is computed in float32 and rounded once, to nearest even, when it is written. Deltas must then be
taken against `fragments.as_held` of the base.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragment, Fragmentation
from decoupled_diloco.arrays.placement import Cut, Group, Part, Placement, joined, observed_placement, shards_of
from decoupled_diloco.arrays.tree import ParameterTree, Params

_GroupedArrays = tuple[tuple[jax.Array, ...], ...]
"""Arrays of the parts of each group."""


@dataclass(frozen=True)
class DeviceCopy:
    """A fragment as it was at one step boundary; immutable, and on its way to the host."""

    fragment: Fragment
    _placement: Placement = field(repr=False)
    _arrays: _GroupedArrays = field(repr=False)

    def to_host(self, out: FloatVector | None = None) -> FloatVector:
        """Waits for the copy and flattens it into a float32 vector; not for the device thread.

        Args:
            out: float32 vector of `fragment.size` elements to fill, or None for a new one.
        """
        flat = np.empty(self.fragment.size, np.float32) if out is None else out
        for part, array in self._parts():
            piece = self.fragment.pieces[part.piece]
            host = jax.device_get(array)
            source = host if piece.axis is None else np.moveaxis(host, piece.axis, 0)
            np.copyto(part.of(piece, flat), source, casting="unsafe")
        return flat

    def _parts(self) -> Iterator[tuple[Part, jax.Array]]:
        for group, arrays in zip(self._placement.reading, self._arrays, strict=True):
            yield from zip(group.parts, arrays, strict=True)

    def _laid_out(self, placement: Placement) -> _GroupedArrays:
        """The copy once for every replica, as `placement.writing` wants it."""
        if placement is not self._placement:
            return _staged(self.fragment, self.to_host(), placement)._values
        copied = {(part.piece, part.place): array for part, array in self._parts()}
        return tuple(
            tuple(_beside(group.device, copied[part.piece, part.place]) for part in group.parts)
            for group in placement.writing
        )


@dataclass(frozen=True)
class StagedFragment:
    """A published fragment on the devices, ready to be applied; keeps `flat`, which must not be written to."""

    fragment: Fragment
    flat: FloatVector = field(repr=False)
    _placement: Placement = field(repr=False)
    _values: _GroupedArrays = field(repr=False)


class DeviceFragments:
    """Copies and applies the fragments of one model.

    Args:
        tree: where the tensors sit.
        fragmentation: of `tree.schema`.
        params: the current parameters, which tell how the leaves are placed. That may change later.
    """

    def __init__(self, tree: ParameterTree, fragmentation: Fragmentation, params: Params) -> None:
        if fragmentation.schema != tree.schema:
            raise ValueError("the fragmentation was made for another schema than the parameters have")
        self._tree = tree
        self._fragments = fragmentation.fragments
        self._known: dict[tuple[Any, ...], Placement] = {}
        self.check = tree.check
        """See `ParameterTree.check`."""
        leaves = tree.leaves(params)
        self._placements = {fragment.index: self._placement(fragment, leaves) for fragment in self._fragments}

    def copy(self, params: Params, indexes: Iterable[int]) -> dict[int, DeviceCopy]:
        """Copies fragments on the devices and starts their way to the host; never waits and never donates.

        Args:
            params: the parameters at a step boundary; they may be donated to the next step at once.
            indexes: which fragments.
        """
        leaves = self._tree.leaves(params)
        return {index: self._copy(self._fragments[index], leaves) for index in indexes}

    def stage(self, index: int, flat: FloatVector) -> StagedFragment:
        """Puts a published fragment on the devices where its leaves are; for the network thread.

        Args:
            index: which fragment.
            flat: its new value. Kept, and moved again should the leaves lie elsewhere when it is applied.
        """
        fragment = self._fragments[index]
        if flat.shape != (fragment.size,) or flat.dtype != np.float32:
            raise ValueError(f"fragment {index} is a float32 vector of {fragment.size}, not {flat.dtype} {flat.shape}")
        return _staged(fragment, flat, self._placements[index])

    def overwrite(self, params: Params, staged: StagedFragment) -> Params:
        """Sets theta <- Theta, the paper's rule.

        Args:
            params: the parameters. Their leaves that get a new value are donated: no reference to them, in
                this tree or another, can be read again.
            staged: the published fragment.

        Returns:
            The pytree with new leaves in the old placement; all other leaves are the same objects.
        """
        return self._apply(params, staged, _overwrite)

    def carry(self, params: Params, staged: StagedFragment, copy: DeviceCopy) -> Params:
        """Sets theta <- Theta + (theta - copy): keeps the steps made since `copy`; donates as `overwrite`."""
        return self._apply(params, staged, _carry, copy)

    def blend(self, params: Params, staged: StagedFragment, alpha: float) -> Params:
        """Sets theta <- alpha*theta + (1-alpha)*Theta, as in Streaming DiLoCo; donates as `overwrite`.

        Args:
            params: the parameters.
            staged: the published fragment.
            alpha: share of the learner's own value, 0 to 1; 0 is `overwrite`, 1 ignores what was published.
        """
        share = np.float32(alpha)
        return self._apply(params, staged, partial(_blend, share=share))

    def warm(self, params: Params) -> Params:
        """Compiles `copy` and `overwrite` for every fragment, by writing each one's own value back."""
        for fragment in self._fragments:
            own = self.copy(params, [fragment.index])[fragment.index].to_host()
            params = self.overwrite(params, self.stage(fragment.index, own))
        return params

    def _copy(self, fragment: Fragment, leaves: Mapping[str, jax.Array]) -> DeviceCopy:
        placement = self._placements[fragment.index] = self._placement(fragment, leaves)
        shards = [shards_of(leaves[piece.tensor]) for piece in fragment.pieces]
        arrays = []
        for group in placement.reading:
            with _programs_on(group.device):
                own = tuple(shards[part.piece][part.shard] for part in group.parts)
                arrays.append(_copied(own, group.cuts))
        for array in chain.from_iterable(arrays):
            array.copy_to_host_async()
        return DeviceCopy(fragment, placement, tuple(arrays))

    def _apply(
        self,
        params: Params,
        staged: StagedFragment,
        program: Callable[..., tuple[jax.Array, ...]],
        copy: DeviceCopy | None = None,
    ) -> Params:
        """Runs `program(shards, values, [copies,] cuts)` on every device and joins the leaves again."""
        fragment = staged.fragment
        leaves = _unshared(fragment, self._tree.leaves(params))
        placement = self._placements[fragment.index] = self._placement(fragment, leaves)
        if placement is not staged._placement:
            staged = _staged(fragment, staged.flat, placement)
        shards = [shards_of(leaves[piece.tensor]) for piece in fragment.pieces]
        operands = [staged._values, *([copy._laid_out(placement)] if copy else [])]
        for group, *arrays in zip(placement.writing, *operands, strict=True):
            old = tuple(shards[part.piece][part.shard] for part in group.parts)
            with _programs_on(group.device):
                new = program(old, *arrays, cuts=group.cuts)
            for part, array in zip(group.parts, new, strict=True):
                shards[part.piece][part.shard] = array
        changed = {
            piece.tensor: joined(leaves[piece.tensor], own) for piece, own in zip(fragment.pieces, shards, strict=True)
        }
        return self._tree.replace(params, changed)

    def _placement(self, fragment: Fragment, leaves: Mapping[str, jax.Array]) -> Placement:
        own = [leaves[piece.tensor] for piece in fragment.pieces]
        key = (fragment.index, *((leaf.sharding, leaf.committed) for leaf in own))
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = observed_placement(fragment, own)
        return known


def _staged(fragment: Fragment, flat: FloatVector, placement: Placement) -> StagedFragment:
    def put(group: Group, part: Part) -> jax.Array:
        piece = fragment.pieces[part.piece]
        elements: npt.NDArray[np.float32] = part.of(piece, flat)
        if piece.axis is not None:
            elements = np.moveaxis(elements, 0, piece.axis)
        # A copy of its own: on the CPU the device array may go on using this memory.
        private = np.array(elements, order="C")
        committed = placement.committed[part.piece]
        with contextlib.nullcontext() if committed else jax.default_device(group.device):
            array: jax.Array = jax.device_put(private, group.device if committed else None)
        return array

    values = tuple(tuple(put(group, part) for part in group.parts) for group in placement.writing)
    return StagedFragment(fragment, flat, placement, values)


def _unshared(fragment: Fragment, leaves: Mapping[str, jax.Array]) -> Mapping[str, jax.Array]:
    """Copies what stands at several places of the tree: donated at one, it would be lost at the others."""
    uses = Counter(id(leaf) for leaf in leaves.values())
    own = {piece.tensor: leaves[piece.tensor] for piece in fragment.pieces}
    return {name: jnp.copy(leaf) if uses[id(leaf)] > 1 else leaf for name, leaf in own.items()}


def _beside(device: jax.Device, array: jax.Array) -> jax.Array:
    moved: jax.Array = array if array.devices() == {device} else jax.device_put(array, device)
    return moved


_NO_MESH: Final = jax.sharding.Mesh(np.empty((), dtype=object), ())


@contextlib.contextmanager
def _programs_on(device: jax.Device) -> Iterator[None]:
    """Lets programs run on one device, whatever the caller has set.

    A mesh would forbid them, and arrays that are not bound to a device would be moved to the default one.
    """
    with jax.set_mesh(_NO_MESH), jax.default_device(device):
        yield


def _read(shard: jax.Array, cut: Cut) -> jax.Array:
    if cut.axis is None:
        return shard
    return lax.slice_in_dim(shard, cut.start, cut.stop, axis=cut.axis)


def _write(shard: jax.Array, cut: Cut, value: jax.Array) -> jax.Array:
    rounded = value.astype(shard.dtype)
    if cut.axis is None:
        return jnp.copy(rounded)  # never the input itself, which jit would hand through
    return lax.dynamic_update_slice_in_dim(shard, rounded, cut.start, cut.axis)


_Arrays = tuple[jax.Array, ...]
_Cuts = tuple[Cut, ...]
_applied = partial(jax.jit, static_argnames="cuts", donate_argnums=0, keep_unused=True)


@partial(jax.jit, static_argnums=1)
def _copied(shards: _Arrays, cuts: _Cuts) -> _Arrays:
    return tuple(jnp.copy(_read(shard, cut)) for shard, cut in zip(shards, cuts, strict=True))


@_applied
def _overwrite(shards: _Arrays, values: _Arrays, *, cuts: _Cuts) -> _Arrays:
    return tuple(_write(shard, cut, value) for shard, value, cut in zip(shards, values, cuts, strict=True))


@_applied
def _carry(shards: _Arrays, values: _Arrays, copies: _Arrays, *, cuts: _Cuts) -> _Arrays:
    def carried(shard: jax.Array, value: jax.Array, copy: jax.Array, cut: Cut) -> jax.Array:
        since = _read(shard, cut).astype(jnp.float32) - copy.astype(jnp.float32)
        return _write(shard, cut, value + since)

    return tuple(map(carried, shards, values, copies, cuts))


@_applied
def _blend(shards: _Arrays, values: _Arrays, *, share: jax.Array, cuts: _Cuts) -> _Arrays:
    def blended(shard: jax.Array, value: jax.Array, cut: Cut) -> jax.Array:
        return _write(shard, cut, share * _read(shard, cut).astype(jnp.float32) + (1 - share) * value)

    return tuple(map(blended, shards, values, cuts))
