"""Fragments on the learner's devices: copied out at a step boundary, written back at another.

Needs jax; only learners import it. Every device is served by itself, with plain single-device programs on the
shards that lie there: no collective, no demand on how a leaf is sharded, and the same code for one device.

The device thread opens the parameters of a boundary (`DeviceFragments.open`), copies and overwrites fragments of them,
and takes them back (`OpenParams.params`); all of it only enqueues work. `DeviceCopy.to_host` and
`DeviceFragments.stage` move bytes between host and devices and belong on another thread.

Leaves of less than float32 are the learner's choice; what is exchanged is float32. Copies are widened exactly, and
what is applied is computed in float32 and rounded once, to nearest even, when it is written. Deltas must then be
taken against `fragments.as_held` of the base.

Programs are compiled once for each device and shape of fragment, all of them by `DeviceFragments.warm`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from operator import is_
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragment, Fragmentation
from decoupled_diloco.arrays.placement import Cut, Part, Placement, joined, observed_placement, shards_of
from decoupled_diloco.arrays.staging import GroupedArrays, StagedFragment, spread
from decoupled_diloco.arrays.tree import FlatParams, ParameterTree, Params

_Arrays = tuple[jax.Array, ...]
_Cuts = tuple[Cut, ...]


@dataclass(frozen=True)
class DeviceCopy:
    """A fragment as it was at one step boundary; immutable."""

    fragment: Fragment
    _placement: Placement = field(repr=False)
    _arrays: GroupedArrays = field(repr=False)

    def send_to_host(self) -> None:
        """Starts its way to the host; never waits."""
        for array in chain.from_iterable(self._arrays):
            array.copy_to_host_async()

    def to_host(self, out: FloatVector | None = None) -> FloatVector:
        """Waits for the copy and flattens it into a float32 vector; not for the device thread.

        Args:
            out: float32 vector of `fragment.size` elements to fill, or None for a new one.
        """
        self.send_to_host()
        flat = np.empty(self.fragment.size, np.float32) if out is None else out
        for part, array in self._parts():
            piece = self.fragment.pieces[part.piece]
            host = np.asarray(array)
            source = host if piece.axis is None else np.moveaxis(host, piece.axis, 0)
            np.copyto(part.of(piece, flat), source, casting="unsafe")
        return flat

    def wait(self) -> None:
        """Waits until the devices have made it; not for the device thread."""
        for array in chain.from_iterable(self._arrays):
            array.block_until_ready()

    def _parts(self) -> Iterator[tuple[Part, jax.Array]]:
        for group, arrays in zip(self._placement.reading, self._arrays, strict=True):
            yield from zip(group.parts, arrays, strict=True)

    def _laid_out(self, placement: Placement) -> GroupedArrays:
        """The copy once for every replica, as `placement.writing` wants it."""
        if placement is not self._placement:
            return spread(self.fragment, self.to_host(), placement)
        copied = {(part.piece, part.place): array for part, array in self._parts()}
        return tuple(
            tuple(_beside(group.device, copied[part.piece, part.place]) for part in group.parts)
            for group in placement.writing
        )


class OpenParams:
    """The parameters at one step boundary: copied from, written to, and handed on. For the device thread.

    Args:
        device: whose fragments they are cut into.
        flat: their leaves.
    """

    def __init__(self, device: DeviceFragments, flat: FlatParams) -> None:
        self._device = device
        self._flat = flat
        self._ahead: dict[int, DeviceCopy] = {}

    @property
    def params(self) -> Params:
        """The pytree, with new leaves in the old placement where a fragment was applied; all others are the same."""
        return self._flat.params

    def copy(self, indexes: Iterable[int]) -> dict[int, DeviceCopy]:
        """Copies fragments on the devices; never waits and never donates.

        The parameters may be donated to the next step at once.
        """
        copies = {index: self._ahead.get(index) for index in indexes}
        with _Programs() as programs:
            return {index: copy or self._copy(index, programs) for index, copy in copies.items()}

    def copy_ahead(self, indexes: Iterable[int]) -> None:
        """Enqueues copies behind the step that makes these parameters, for a `copy` that will likely ask for them.

        The device thread does it while it would wait for the step. A copy that nobody asks for was made in vain; one
        whose fragment is applied first is forgotten.
        """
        with _Programs() as programs:
            self._ahead = {index: self._copy(index, programs) for index in indexes}

    def overwrite(self, staged: StagedFragment) -> None:
        """Sets theta <- Theta, the paper's rule.

        Leaves that get a new value are donated: no reference to them, in this tree or another, can be read again.
        """
        self._apply(staged, _overwrite)

    def carry(self, staged: StagedFragment, copy: DeviceCopy) -> None:
        """Sets theta <- Theta + (theta - copy): keeps the steps made since `copy`; donates as `overwrite`."""
        self._apply(staged, _carry, copy)

    def blend(self, staged: StagedFragment, alpha: float) -> None:
        """Sets theta <- alpha*theta + (1-alpha)*Theta, as in Streaming DiLoCo; donates as `overwrite`.

        Args:
            staged: the published fragment.
            alpha: share of the learner's own value, 0 to 1; 0 is `overwrite`, 1 ignores what was published.
        """
        self._apply(staged, partial(_blend, share=np.float32(alpha)))

    def _copy(self, index: int, programs: _Programs) -> DeviceCopy:
        placement, leaves = self._device._placed(index, self._flat)
        shards = list(map(shards_of, leaves, placement.whole))
        arrays = []
        for group in placement.reading:
            programs.go_to(group.device)
            arrays.append(_copied(tuple([shards[part.piece][part.shard] for part in group.parts]), group.cuts))
        return DeviceCopy(self._device.fragments[index], placement, tuple(arrays))

    def _apply(
        self, staged: StagedFragment, program: Callable[..., tuple[jax.Array, ...]], copy: DeviceCopy | None = None
    ) -> None:
        """Runs `program(shards, values, [copies,] cuts)` on every device and joins the leaves again."""
        index, flat = staged.fragment.index, self._flat
        self._ahead.pop(index, None)
        positions = self._device.positions[index]
        placement, leaves = self._device._placed(index, flat)
        if any(map(flat.is_shared, positions)):
            # Donated at one place of the tree, it would be lost at the others.
            leaves = [
                jnp.copy(leaf) if flat.is_shared(position) else leaf
                for leaf, position in zip(leaves, positions, strict=True)
            ]
        if placement is not staged.placement:
            staged = StagedFragment.on_devices(staged.fragment, staged.flat, placement)
        shards = list(map(shards_of, leaves, placement.whole))
        operands = [staged.values, *([copy._laid_out(placement)] if copy else [])]
        with _Programs() as programs:
            for group, *arrays in zip(placement.writing, *operands, strict=True):
                old = tuple([shards[part.piece][part.shard] for part in group.parts])
                programs.go_to(group.device)
                new = program(old, *arrays, cuts=group.cuts)
                for part, array in zip(group.parts, new, strict=True):
                    shards[part.piece][part.shard] = array
        for position, leaf, own, is_whole in zip(positions, leaves, shards, placement.whole, strict=True):
            flat.replace(position, joined(leaf, own, is_whole))


class DeviceFragments:
    """Copies and applies the fragments of one model.

    Args:
        tree: where the tensors sit.
        fragmentation: of `tree.schema`.
        params: the current parameters, which tell how the leaves are placed. That may change later.

    Attributes:
        fragments: by index.
        positions: of each fragment's leaves among those of the tree, one for every piece.
    """

    def __init__(self, tree: ParameterTree, fragmentation: Fragmentation, params: Params) -> None:
        if fragmentation.schema != tree.schema:
            raise ValueError("the fragmentation was made for another schema than the parameters have")
        self._tree = tree
        self.fragments = fragmentation.fragments
        self.positions = [
            tuple(tree.positions[piece.tensor] for piece in fragment.pieces) for fragment in self.fragments
        ]
        self._known: dict[tuple[Any, ...], Placement] = {}
        self._seen: dict[int, tuple[list[Any], Placement]] = {}
        flat = tree.flat(params)
        for fragment in self.fragments:
            self._placed(fragment.index, flat)

    def open(self, params: Params) -> OpenParams:
        """The parameters at a step boundary.

        Raises:
            SchemaError: they can no longer be exchanged; see `ParameterTree.checked`.
        """
        return OpenParams(self, self._tree.checked(params))

    def copy(self, params: Params, indexes: Iterable[int]) -> dict[int, DeviceCopy]:
        """As `OpenParams.copy`, with the copies on their way to the host."""
        copies = self.open(params).copy(indexes)
        for copy in copies.values():
            copy.send_to_host()
        return copies

    def overwrite(self, params: Params, staged: StagedFragment) -> Params:
        """As `OpenParams.overwrite`; returns the parameters."""
        opened = self.open(params)
        opened.overwrite(staged)
        return opened.params

    def carry(self, params: Params, staged: StagedFragment, copy: DeviceCopy) -> Params:
        """As `OpenParams.carry`; returns the parameters."""
        opened = self.open(params)
        opened.carry(staged, copy)
        return opened.params

    def blend(self, params: Params, staged: StagedFragment, alpha: float) -> Params:
        """As `OpenParams.blend`; returns the parameters."""
        opened = self.open(params)
        opened.blend(staged, alpha)
        return opened.params

    def stage(self, index: int, flat: FloatVector) -> StagedFragment:
        """Puts a published fragment on the devices where its leaves are; for the network thread.

        Args:
            index: which fragment.
            flat: its new value. Kept, and moved again should the leaves lie elsewhere when it is applied.
        """
        fragment = self.fragments[index]
        if flat.shape != (fragment.size,) or flat.dtype != np.float32:
            raise ValueError(f"fragment {index} is a float32 vector of {fragment.size}, not {flat.dtype} {flat.shape}")
        return StagedFragment.on_devices(fragment, flat, self._seen[index][1])

    def warm(self, params: Params) -> Params:
        """Compiles `copy` and `overwrite` for every fragment, by writing each one's own value back."""
        for fragment in self.fragments:
            own = self.copy(params, [fragment.index])[fragment.index].to_host()
            params = self.overwrite(params, self.stage(fragment.index, own))
        return params

    def _placed(self, index: int, flat: FlatParams) -> tuple[Placement, list[jax.Array]]:
        """The leaves of a fragment, one for every piece, and where they lie."""
        leaves = [flat.at(position) for position in self.positions[index]]
        where = [part for leaf in leaves for part in (leaf.sharding, leaf.committed)]
        seen = self._seen.get(index)
        if seen is not None and all(map(is_, seen[0], where)):  # hashing shardings costs more than all the rest
            return seen[1], leaves
        key = (index, *where)
        placement = self._known.get(key)
        if placement is None:
            placement = self._known[key] = observed_placement(self.fragments[index], leaves)
        self._seen[index] = where, placement
        return placement, leaves


def _beside(device: jax.Device, array: jax.Array) -> jax.Array:
    moved: jax.Array = array if array.devices() == {device} else jax.device_put(array, device)
    return moved


_NO_MESH: Final = jax.sharding.Mesh(np.empty((), dtype=object), ())


class _Programs:
    """Lets programs run on one device after another, whatever the caller has set.

    A mesh would forbid them, and arrays that are not bound to a device would be moved to the default one.
    """

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._device: jax.Device | None = None

    def __enter__(self) -> _Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def go_to(self, device: jax.Device) -> None:
        """What runs from now on runs there."""
        if device is self._device:
            return
        self._stack.close()
        self._stack.enter_context(jax.set_mesh(_NO_MESH))
        self._stack.enter_context(jax.default_device(device))
        self._device = device


def _read(shard: jax.Array, cut: Cut) -> jax.Array:
    if cut.axis is None:
        return shard
    return lax.slice_in_dim(shard, cut.start, cut.stop, axis=cut.axis)


def _parts_of(values: jax.Array, shards: _Arrays, cuts: _Cuts) -> Iterator[jax.Array]:
    """The parts that were staged one after the other."""
    end = 0
    for shard, cut in zip(shards, cuts, strict=True):
        shape = list(shard.shape)
        if cut.axis is not None:
            shape[cut.axis] = cut.stop - cut.start
        start, end = end, end + math.prod(shape)
        yield values[start:end].reshape(shape)


def _write(shard: jax.Array, cut: Cut, value: jax.Array) -> jax.Array:
    rounded = value.astype(shard.dtype)
    if cut.axis is None:
        return jnp.copy(rounded)  # never the input itself, which jit would hand through
    return lax.dynamic_update_slice_in_dim(shard, rounded, cut.start, cut.axis)


_applied = partial(jax.jit, static_argnames="cuts", donate_argnums=0, keep_unused=True)


@partial(jax.jit, static_argnums=1)
def _copied(shards: _Arrays, cuts: _Cuts) -> _Arrays:
    return tuple(jnp.copy(_read(shard, cut)) for shard, cut in zip(shards, cuts, strict=True))


@_applied
def _overwrite(shards: _Arrays, values: jax.Array, *, cuts: _Cuts) -> _Arrays:
    return tuple(map(_write, shards, cuts, _parts_of(values, shards, cuts)))


@_applied
def _carry(shards: _Arrays, values: jax.Array, copies: _Arrays, *, cuts: _Cuts) -> _Arrays:
    def carried(shard: jax.Array, value: jax.Array, copy: jax.Array, cut: Cut) -> jax.Array:
        since = _read(shard, cut).astype(jnp.float32) - copy.astype(jnp.float32)
        return _write(shard, cut, value + since)

    return tuple(map(carried, shards, _parts_of(values, shards, cuts), copies, cuts))


@_applied
def _blend(shards: _Arrays, values: jax.Array, *, share: jax.Array, cuts: _Cuts) -> _Arrays:
    def blended(shard: jax.Array, value: jax.Array, cut: Cut) -> jax.Array:
        return _write(shard, cut, share * _read(shard, cut).astype(jnp.float32) + (1 - share) * value)

    return tuple(map(blended, shards, _parts_of(values, shards, cuts), cuts))
