"""Parameter pytrees: which leaves are exchanged, and under which names.

Needs jax; only learners import it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
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
        self._position: dict[str, int] = {}
        self._kinds: dict[str, tuple[tuple[int, ...], np.dtype[Any]]] = {}
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
            self._position[name] = position
            self._kinds[name] = (shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
        self.schema = Schema(specs)

    def leaves(self, params: Params) -> dict[str, jax.Array]:
        """The exchanged leaves of `params` by name; those that are NumPy arrays are copied to the device.

        Raises:
            SchemaError: `params` is built differently from the parameters that this object was made for.
        """
        leaves = self._flat(params)
        found = {name: leaves[position] for name, position in self._position.items()}
        for name, leaf in found.items():
            if not isinstance(leaf, jax.Array):
                found[name] = jnp.array(leaf)
        return found

    def check(self, params: Params) -> None:
        """Looks whether `params` can still be exchanged; cheap enough for every step.

        Raises:
            SchemaError: as for `leaves`, or an exchanged leaf is no array any more, or of another shape or type.
        """
        leaves = self._flat(params)
        for name, position in self._position.items():
            leaf, (shape, dtype) = leaves[position], self._kinds[name]
            if not isinstance(leaf, jax.Array | np.ndarray):
                raise SchemaError(
                    f"Tensor {name!r} began as an array of shape {shape} and type {dtype} and is now a "
                    f"{type(leaf).__name__}; pass arrays of the same shape and type at every step boundary."
                )
            if leaf.shape != shape or (leaf.dtype != dtype and jax.dtypes.canonicalize_dtype(leaf.dtype) != dtype):
                raise SchemaError(
                    f"Tensor {name!r} began with shape {shape} and type {dtype} and now has shape {leaf.shape} and "
                    f"type {leaf.dtype}; pass arrays of the same shape and type at every step boundary."
                )

    def replace(self, params: Params, changed: Mapping[str, jax.Array]) -> Params:
        """The same pytree with the leaves in `changed`, by name, in place of its own; all others are kept.

        Raises:
            SchemaError: as for `leaves`.
            KeyError: no exchanged leaf has such a name.
        """
        leaves = self._flat(params)
        for name, leaf in changed.items():
            leaves[self._position[name]] = leaf
        return jax.tree_util.tree_unflatten(self._structure, leaves)

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
