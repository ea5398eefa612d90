"""The inner optimizer's state in parts: what of it belongs to each fragment, and what belongs to none.

Needs jax; only learners import it.

An optimizer keeps some trees that are built like the parameters (Adam's mu and nu, a momentum's trace), each a *slot*,
and a few other leaves (step counts, injected hyperparameters, factored moments). A leaf of the state belongs to a
parameter if its path ends with the whole path of that parameter and it has the parameter's shape and a floating-point
type; the longest such path wins, and what stands before it names the slot. So it needs no help from the optimizer: it
holds for all of optax (chained, masked and partitioned states too, in which a slot has only some of the parameters) and
for a velocity that somebody wrote by hand.

Part p < P is fragment p: for every slot, by name, the fragment's pieces of it as one flat float32 vector, cut like the
parameters' own. Part P is the rest: every other array of the state, whole, in its own type. Random keys, Python numbers
and functions stay as each learner has them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.device import DeviceCopy, DeviceFragments
from decoupled_diloco.arrays.encoding import encoding_named, float32_elements
from decoupled_diloco.arrays.fragments import Fragment, Fragmentation, Piece
from decoupled_diloco.arrays.schema import FLOAT_DTYPES, Schema, SchemaError
from decoupled_diloco.arrays.staging import StagedFragment
from decoupled_diloco.arrays.state_entry import StateEntry
from decoupled_diloco.arrays.tree import ParameterTree, Params, leaf_name

OptimizerState = Any
"""Any pytree: an optax state, or whatever a training loop keeps beside its parameters."""

Payload = npt.NDArray[np.uint8]
"""The bytes of one part, its entries one after another."""

_Keys = tuple[str, ...]
_Slots = Mapping[str, Mapping[str, str]]
"""Name of the state's leaf by slot and parameter."""


@dataclass(frozen=True)
class PartCopy:
    """A part as it was at one step boundary; immutable, and on its way to the host."""

    part: int
    _fragment: DeviceCopy | None = field(repr=False)
    _leaves: tuple[Any, ...] = field(repr=False)

    def to_host(self) -> Payload:
        """Waits for the copy and writes it as bytes; not for the device thread."""
        if self._fragment is not None:
            return np.frombuffer(encoding_named("float32").encode(self._fragment.to_host()), np.uint8)
        pieces = [np.frombuffer(np.asarray(jax.device_get(leaf)).tobytes(), np.uint8) for leaf in self._leaves]
        return np.concatenate(pieces) if pieces else np.empty(0, np.uint8)


@dataclass(frozen=True)
class StagedPart:
    """A part that has arrived, on the devices and ready to be written."""

    part: int
    _fragment: StagedFragment | None = field(repr=False)
    _leaves: tuple[Any, ...] = field(repr=False)


class OptimizerFragments:
    """Copies and writes the parts of one optimizer's state.

    Args:
        params: the parameters.
        fragmentation: of their exchanged tensors.
        state: the optimizer's state for them; tells how its leaves are placed. That may change later.

    Attributes:
        entries: what each part consists of; one tuple for each fragment, and one for the rest.

    Raises:
        SchemaError: two leaves of the state have one name.
    """

    def __init__(self, params: Params, fragmentation: Fragmentation, state: OptimizerState) -> None:
        found, structure = jax.tree_util.tree_flatten_with_path(state)
        self._structure: Any = structure
        slots, taken = _slots_of(params, fragmentation.schema, found)
        self._rest = tuple(
            position for position, (_, leaf) in enumerate(found) if position not in taken and _is_array(leaf)
        )
        self._device: DeviceFragments | None = None
        fragment_count = len(fragmentation.fragments)
        entries: list[tuple[StateEntry, ...]] = [()] * fragment_count
        if slots:
            fragments, entries = _cut(slots, fragmentation, {leaf_name(path): leaf for path, leaf in found})
            tree = _state_tree(state, slots, fragmentation.schema)
            self._device = DeviceFragments(tree, Fragmentation(tree.schema, fragments), state)
        rest = tuple(
            StateEntry(leaf_name(found[position][0]), str(found[position][1].dtype), tuple(found[position][1].shape))
            for position in self._rest
        )
        self.entries: tuple[tuple[StateEntry, ...], ...] = (*entries, rest)

    @property
    def part_count(self) -> int:
        """Fragments, and the rest."""
        return len(self.entries)

    def payload_bytes(self, part: int) -> int:
        """Length of the payload of a part."""
        return sum(entry.payload_bytes for entry in self.entries[part])

    def copy(self, state: OptimizerState, part: int) -> PartCopy:
        """Copies a part on the devices and starts its way to the host; never waits and never donates.

        Raises:
            SchemaError: the state is built differently from the one that this object was made for.
        """
        leaves = self._flat(state)
        if part < self.part_count - 1:
            copied = self._device.copy(state, (part,))[part] if self._device is not None else None
            return PartCopy(part, copied, ())
        rest = tuple(_copied(leaves[position]) for position in self._rest)
        return PartCopy(part, None, rest)

    def warm(self, state: OptimizerState) -> None:
        """Compiles `copy` for every part, so that the first one for somebody takes no longer than the next."""
        for part in range(self.part_count):
            self.copy(state, part)

    def stage(self, state: OptimizerState, part: int, payload: Payload) -> StagedPart:
        """Puts a part that has arrived on the devices.

        Args:
            state: the state that it will be written into, or one placed like it.
            part: which.
            payload: its bytes, `payload_bytes(part)` of them; not to be written to any more.
        """
        if payload.size != self.payload_bytes(part):
            raise ValueError(f"part {part} has {self.payload_bytes(part)} bytes, the payload {payload.size}")
        if part < self.part_count - 1:
            if self._device is None:
                return StagedPart(part, None, ())
            flat = float32_elements(payload)
            return StagedPart(part, self._device.stage(part, flat), ())
        leaves, values, offset = self._flat(state), [], 0
        for entry, position in zip(self.entries[part], self._rest, strict=True):
            raw = payload[offset : offset + entry.payload_bytes]
            values.append(_placed(raw.view(entry.numpy_dtype).reshape(entry.shape), leaves[position]))
            offset += entry.payload_bytes
        return StagedPart(part, None, tuple(values))

    def write(self, state: OptimizerState, staged: StagedPart) -> OptimizerState:
        """The state with a part in place of its own; leaves that get a new value are donated, as in `overwrite`."""
        if staged._fragment is not None:
            assert self._device is not None
            return self._device.overwrite(state, staged._fragment)
        leaves = self._flat(state)
        if staged.part == self.part_count - 1:
            for position, value in zip(self._rest, staged._leaves, strict=True):
                leaves[position] = value
        return jax.tree_util.tree_unflatten(self._structure, leaves)

    def _flat(self, state: OptimizerState) -> list[Any]:
        leaves: list[Any]
        structure: Any
        leaves, structure = jax.tree_util.tree_flatten(state)
        if structure != self._structure:
            raise SchemaError(
                "The optimizer's state changed its structure during the run; pass a state of the same optimizer at "
                "every step boundary."
            )
        return leaves


def _slots_of(params: Params, schema: Schema, found: Sequence[tuple[Any, Any]]) -> tuple[_Slots, set[int]]:
    """The slots of a state, and the positions of their leaves among all of its leaves."""
    parameters: dict[_Keys, str] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]:
        if (name := leaf_name(path)) in schema.by_name:
            parameters[_keys(path)] = name
    slots: defaultdict[str, dict[str, str]] = defaultdict(dict)
    taken = set()
    for position, (path, leaf) in enumerate(found):
        if not _is_array(leaf) or str(leaf.dtype) not in FLOAT_DTYPES:
            continue
        keys = _keys(path)
        for start in range(len(keys) + 1):
            parameter = parameters.get(keys[start:])
            if parameter is not None and schema.by_name[parameter].shape == tuple(leaf.shape):
                slots["/".join(keys[:start])][parameter] = leaf_name(path)
                taken.add(position)
                break
    return dict(sorted(slots.items())), taken


def _state_tree(state: OptimizerState, slots: _Slots, schema: Schema) -> ParameterTree:
    """Where the leaves of the slots sit in the state; each is cut along the axis of its parameter."""
    parameter_of = {leaf: name for leaves in slots.values() for name, leaf in leaves.items()}

    def rule_of(leaf: str, _: tuple[int, ...]) -> Any:
        spec = schema.by_name[parameter_of[leaf]]
        return SimpleNamespace(rule=spec.rule, stack_axis=spec.stack_axis)

    return ParameterTree(state, rule_of, chosen=parameter_of)


def _cut(
    slots: _Slots, fragmentation: Fragmentation, leaves: Mapping[str, Any]
) -> tuple[tuple[Fragment, ...], list[tuple[StateEntry, ...]]]:
    """The pieces of the slots, fragment by fragment, slot after slot; and the entry of each slot."""
    fragments, entries = [], []
    for fragment in fragmentation.fragments:
        pieces: list[Piece] = []
        own: list[StateEntry] = []
        offset = 0
        for slot, names in slots.items():
            start = offset
            for piece in fragment.pieces:
                if (leaf := names.get(piece.tensor)) is None:
                    continue
                spec = replace(piece.spec, name=leaf, dtype=str(leaves[leaf].dtype))
                pieces.append(replace(piece, spec=spec, offset=offset))
                offset += piece.size
            if offset > start:
                own.append(StateEntry(slot, "float32", (offset - start,)))
        fragments.append(Fragment(fragment.index, tuple(pieces)))
        entries.append(tuple(own))
    return tuple(fragments), entries


def _keys(path: tuple[Any, ...]) -> _Keys:
    keys = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
    # As in `leaf_name`: the box of a flax variable does not count.
    boxed = len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    return keys[:-1] if boxed else keys


def _is_array(leaf: object) -> bool:
    """Whether the leaf has bytes that mean the same elsewhere; a random key and an object have none."""
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSU"
    return isinstance(leaf, jax.Array) and not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    copy = jnp.copy(leaf)
    copy.copy_to_host_async()
    return copy


def _placed(value: npt.NDArray[np.generic], leaf: Any) -> Any:
    """The value as an array of its own, where the leaf is."""
    private = np.array(value, order="C")
    if isinstance(leaf, np.ndarray):
        return private
    if leaf.committed:
        return jax.device_put(private, leaf.sharding)
    with jax.default_device(next(iter(leaf.devices()))):
        return jnp.array(private)
