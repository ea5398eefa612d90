"""Parameter pytrees: which leaves are exchanged, and under which names.

Needs jax; only learners import it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from decoupled_diloco.arrays.schema import MergeRule, Schema, SchemaError, TensorSpec

Params = Any
"""Any pytree: dicts, flax.linen variables, flax.nnx states, equinox modules, tuples of these."""


class TensorRule(Protocol):
    """How one tensor is merged; see `schema.TensorSpec` for the meaning of the two."""

    @property
    def rule(self) -> MergeRule: ...  # noqa: D102 (as in TensorSpec)
    @property
    def stack_axis(self) -> int | None: ...  # noqa: D102


@dataclass(slots=True)
class _Exchanged:
    """An exchanged leaf; `seen` describes the newest one that was found to have this shape and type."""

    name: str
    position: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    seen: object = None


class FlatParams:
    """The leaves of one pytree, flattened once. Not for two threads at a time.

    Args:
        structure: of the pytree.
        params: the pytree itself.
        leaves: its leaves in order.
    """

    def __init__(self, structure: Any, params: Params, leaves: list[Any]) -> None:
        self._structure = structure
        self._params = params
        self._leaves = leaves
        self._is_changed = False
        self._shared: set[int] | None = None

    def at(self, position: int) -> jax.Array:
        """A leaf by its position; one that is a NumPy array is copied to the device."""
        leaf = self._leaves[position]
        return leaf if isinstance(leaf, jax.Array) else jnp.array(leaf)

    def replace(self, position: int, leaf: jax.Array) -> None:
        """Puts another leaf in the place of one."""
        self._leaves[position] = leaf
        self._is_changed = True

    def is_shared(self, position: int) -> bool:
        """Whether the leaf there stands at another place, too."""
        if self._shared is None:
            identities = [id(leaf) for leaf in self._leaves]
            counts = Counter(identities) if len(set(identities)) < len(identities) else {}
            self._shared = {identity for identity, count in counts.items() if count > 1}
        return id(self._leaves[position]) in self._shared

    @property
    def params(self) -> Params:
        """The pytree: the very same object while no leaf was replaced."""
        if self._is_changed:
            self._params = jax.tree_util.tree_unflatten(self._structure, self._leaves)
            self._is_changed = False
        return self._params


class ParameterTree:
    """Knows where the exchanged tensors sit in the pytrees of one model.

    Exchanged are the leaves that are arrays of a floating-point type and not empty. Everything else (functions,
    Python numbers, integer counters, random keys) stays as each learner has it. A leaf is named by its path,
    joined with "/", such as `layers/0/mlp/kernel`; the `.value` in which flax boxes a variable is left out.

    Args:
        params: the parameters, or their shapes as `jax.eval_shape` gives them.
        merge_rule: called with name and shape of each exchanged tensor.
        chosen: of these leaves by name; default: all that can be exchanged.

    Attributes:
        schema: the exchanged tensors.
        positions: of the exchanged leaves among all leaves, by name.

    Raises:
        SchemaError: nothing to exchange, two leaves of one name, or a leaf that cannot be exchanged.
    """

    schema: Schema

    def __init__(
        self,
        params: Params,
        merge_rule: Callable[[str, tuple[int, ...]], TensorRule],
        chosen: Container[str] | None = None,
    ) -> None:
        entries, structure = jax.tree_util.tree_flatten_with_path(params)
        self._structure: Any = structure
        self.positions: dict[str, int] = {}
        self._exchanged: list[_Exchanged] = []
        specs = []
        for position, (path, leaf) in enumerate(entries):
            name = leaf_name(path)
            if (chosen is not None and name not in chosen) or not _is_exchanged(leaf):
                continue
            shape = tuple(leaf.shape)
            rule = merge_rule(name, shape)
            if not (hasattr(rule, "rule") and hasattr(rule, "stack_axis")):
                raise SchemaError(
                    f"The merge rule of tensor {name!r} of shape {shape} is a {type(rule).__name__} ({rule!r}); "
                    'merge_rule(name, shape) must return an object with `rule`, "rda" or "avg", and `stack_axis`, an '
                    "axis or None, such as learner_service.workload.MergeRule."
                )
            specs.append(TensorSpec(name, shape, str(leaf.dtype), rule.rule, rule.stack_axis))
            self.positions[name] = position
            self._exchanged.append(_Exchanged(name, position, shape, jax.dtypes.canonicalize_dtype(leaf.dtype)))
        self.schema = Schema(specs)

    def leaves(self, params: Params) -> dict[str, jax.Array]:
        """The exchanged leaves of `params` by name; those that are NumPy arrays are copied to the device.

        Raises:
            SchemaError: `params` is built differently from the parameters that this object was made for.
        """
        flat = self.flat(params)
        return {name: flat.at(position) for name, position in self.positions.items()}

    def flat(self, params: Params) -> FlatParams:
        """The parameters, flattened.

        Raises:
            SchemaError: as for `leaves`.
        """
        return FlatParams(self._structure, params, self._flat(params))

    def checked(self, params: Params) -> FlatParams:
        """The same after a look whether `params` can still be exchanged; cheap enough for every step.

        Raises:
            SchemaError: as for `leaves`, or an exchanged leaf is no array any more, or of another shape or type.
        """
        leaves = self._flat(params)
        for wanted in self._exchanged:
            leaf = leaves[wanted.position]
            # Arrays that one program makes share the object that describes them, step after step.
            description = getattr(leaf, "aval", None)
            if description is None or description is not wanted.seen:
                _check_leaf(wanted, leaf)
                wanted.seen = description
        return FlatParams(self._structure, params, leaves)

    def replace(self, params: Params, changed: Mapping[str, jax.Array]) -> Params:
        """The same pytree with the leaves in `changed`, by name, in place of its own; all others are kept.

        Raises:
            SchemaError: as for `leaves`.
            KeyError: no exchanged leaf has such a name.
        """
        flat = self.flat(params)
        for name, leaf in changed.items():
            flat.replace(self.positions[name], leaf)
        return flat.params

    def _flat(self, params: Params) -> list[Any]:
        leaves: list[Any]
        structure: Any
        leaves, structure = jax.tree_util.tree_flatten(params)
        if structure != self._structure:
            raise SchemaError(
                "The parameters changed their structure during the run: it began with "
                f"{_excerpt(self._structure)} and is now {_excerpt(structure)}. Pass the same kind of pytree "
                "at every step boundary."
            )
        return leaves


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of a leaf from its key path as jax gives it; `params` if the tree is a single leaf."""
    boxed = len(path) > 1 and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
    keys = path[:-1] if boxed else path
    return jax.tree_util.keystr(keys, simple=True, separator="/") or "params"


def _check_leaf(wanted: _Exchanged, leaf: Any) -> None:
    if not isinstance(leaf, jax.Array | np.ndarray):
        raise SchemaError(
            f"Tensor {wanted.name!r} began as an array of shape {wanted.shape} and type {wanted.dtype} and is now a "
            f"{type(leaf).__name__}; pass arrays of the same shape and type at every step boundary."
        )
    is_same = leaf.shape == wanted.shape and (
        leaf.dtype == wanted.dtype or jax.dtypes.canonicalize_dtype(leaf.dtype) == wanted.dtype
    )
    if not is_same:
        raise SchemaError(
            f"Tensor {wanted.name!r} began with shape {wanted.shape} and type {wanted.dtype} and now has shape "
            f"{leaf.shape} and type {leaf.dtype}; pass arrays of the same shape and type at every step boundary."
        )


def _is_exchanged(leaf: object) -> bool:
    if not isinstance(leaf, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return False
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        raise SchemaError(
            f"A parameter of shape {leaf.shape} is of complex type {leaf.dtype}, which cannot be exchanged; "
            "keep its real and imaginary parts as two float32 leaves."
        )
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating)) and leaf.size > 0


def _excerpt(structure: object) -> str:
    text = str(structure)
    return text if len(text) <= 200 else text[:200] + "..."
