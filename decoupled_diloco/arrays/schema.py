"""The schema: which tensors a run exchanges, in what shape and under which merge rule.

Every process of a run must agree on it to the letter, because everything else (fragments, flat vectors,
digests) follows from it alone. It is therefore an ordered list of plain values with one canonical text and
one digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Literal, cast, get_args

MergeRule = Literal["rda", "avg"]

SCHEMA_FORMAT: Final = 1
"""Raised whenever the same schema would be fragmented or flattened differently, so that the digest tells."""

FLOAT_DTYPES: Final = ("float32", "bfloat16", "float16")
"""Leaf types a learner may hold. On the wire and at the syncer every element is float32, exact for all of
them."""

_TENSOR_FIELDS: Final = frozenset({"name", "shape", "dtype", "rule", "stack_axis"})


class SchemaError(ValueError):
    """The schema cannot be used; the message names the tensor, its value and what would be right."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One exchanged tensor.

    Attributes:
        name: unique within the schema, such as `layers/0/mlp/kernel`.
        shape: extents in elements, each at least 1; `()` for a scalar.
        dtype: type of the learner's leaf, one of `FLOAT_DTYPES`; the syncer's copy is float32 whatever it
            says.
        rule: `rda` (radial-directional averaging, one norm per tensor) or `avg` (weighted mean, for
            embeddings).
        stack_axis: axis along which independent tensors are stacked (scanned layers, experts), or None.
            Each slice counts as a tensor of its own, both for RDA and for fragmentation.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    rule: MergeRule = "rda"
    stack_axis: int | None = None

    def __post_init__(self) -> None:
        if not self.name or not self.name.isprintable():
            raise SchemaError(f"Tensor name {self.name!r} must be a non-empty printable string.")
        object.__setattr__(self, "shape", tuple(int(extent) for extent in self.shape))
        if any(extent < 1 for extent in self.shape):
            raise SchemaError(
                f"Tensor {self.name!r} has shape {self.shape}: an extent below 1 leaves no element to "
                "exchange. Leave the tensor out of the exchanged parameters."
            )
        if self.dtype not in FLOAT_DTYPES:
            raise SchemaError(
                f"Tensor {self.name!r} has dtype {self.dtype!r}; only {', '.join(FLOAT_DTYPES)} can be "
                "exchanged (as float32). Cast it, or leave it out of the exchanged parameters."
            )
        if self.rule not in get_args(MergeRule):
            raise SchemaError(f"Tensor {self.name!r} has merge rule {self.rule!r}; use 'rda' or 'avg'.")
        if self.stack_axis is not None and not 0 <= self.stack_axis < len(self.shape):
            raise SchemaError(
                f"Tensor {self.name!r} has stack_axis {self.stack_axis}, but its shape {self.shape} has "
                f"{len(self.shape)} axes; use 0 to {len(self.shape) - 1}, or none."
            )

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON and for the wire codec."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "rule": self.rule,
            "stack_axis": self.stack_axis,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> TensorSpec:
        """The inverse of `to_dict`.

        Raises:
            SchemaError: a field is unknown or missing, or a value is not usable.
        """
        unknown = sorted(set(plain) - _TENSOR_FIELDS)
        missing = sorted({"name", "shape"} - set(plain))
        if unknown or missing:
            raise SchemaError(f"Tensor entry {dict(plain)!r}: unknown fields {unknown}, missing fields {missing}.")
        return cls(
            name=str(plain["name"]),
            shape=tuple(plain["shape"]),
            dtype=str(plain.get("dtype", "float32")),
            rule=cast(MergeRule, plain.get("rule", "rda")),
            stack_axis=plain.get("stack_axis"),
        )


@dataclass(frozen=True)
class Schema:
    """All exchanged tensors, ordered by name (code points); the order given does not matter.

    Raises:
        SchemaError: no tensor at all, or two of the same name.
    """

    tensors: tuple[TensorSpec, ...]

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        ordered = tuple(sorted(tensors, key=lambda spec: spec.name))
        if not ordered:
            raise SchemaError("The parameters contain no float tensor, so there is nothing to exchange.")
        for spec, following in pairwise(ordered):
            if spec.name == following.name:
                raise SchemaError(
                    f"Two tensors are named {spec.name!r} (shapes {spec.shape} and {following.shape}); "
                    "names must be unique."
                )
        object.__setattr__(self, "tensors", ordered)

    @property
    def size(self) -> int:
        """Number of elements of all tensors together."""
        return sum(spec.size for spec in self.tensors)

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """The tensors by name, in order."""
        return {spec.name: spec for spec in self.tensors}

    @cached_property
    def canonical_json(self) -> str:
        """The one text form: sorted keys, no spaces, ASCII."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"), ensure_ascii=True)

    @cached_property
    def digest(self) -> str:
        """SHA-256 of `canonical_json`, 64 hexadecimal digits."""
        return hashlib.sha256(self.canonical_json.encode("ascii")).hexdigest()

    def to_dict(self) -> dict[str, Any]:
        """Plain values only, for JSON and for the wire codec."""
        return {"format": SCHEMA_FORMAT, "tensors": [spec.to_dict() for spec in self.tensors]}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Schema:
        """The inverse of `to_dict`.

        Raises:
            SchemaError: another format, or tensors that are not usable.
        """
        if plain.get("format") != SCHEMA_FORMAT:
            raise SchemaError(
                f"The schema has format {plain.get('format')!r}, this program understands {SCHEMA_FORMAT}; "
                "run the same release on both sides."
            )
        return cls(TensorSpec.from_dict(entry) for entry in plain["tensors"])


def describe_difference(
    ours: Schema,
    theirs: Schema,
    ours_name: str = "the run",
    theirs_name: str = "this learner",
    limit: int = 3,
) -> str:
    """Says in one line how two schemas differ, for the message that refuses a join; empty if they agree.

    Args:
        ours: the schema held against.
        theirs: the schema that was offered.
        ours_name: what to call the owner of `ours`.
        theirs_name: what to call the owner of `theirs`.
        limit: how many tensors to name of each kind of difference.
    """
    missing = [_brief(spec) for name, spec in ours.by_name.items() if name not in theirs.by_name]
    extra = [_brief(spec) for name, spec in theirs.by_name.items() if name not in ours.by_name]
    changed = [
        f"{name} ({_field_differences(spec, theirs.by_name[name], ours_name, theirs_name)})"
        for name, spec in ours.by_name.items()
        if name in theirs.by_name and spec != theirs.by_name[name]
    ]
    parts = (
        _listing(f"only in {ours_name}", missing, limit),
        _listing(f"only in {theirs_name}", extra, limit),
        _listing("different", changed, limit),
    )
    return "; ".join(part for part in parts if part)


def _brief(spec: TensorSpec) -> str:
    return f"{spec.name} {list(spec.shape)}"


def _field_differences(ours: TensorSpec, theirs: TensorSpec, ours_name: str, theirs_name: str) -> str:
    ours_plain, theirs_plain = ours.to_dict(), theirs.to_dict()
    return ", ".join(
        f"{field} {ours_plain[field]} in {ours_name}, {theirs_plain[field]} in {theirs_name}"
        for field in ("shape", "dtype", "rule", "stack_axis")
        if ours_plain[field] != theirs_plain[field]
    )


def _listing(title: str, entries: list[str], limit: int) -> str:
    if not entries:
        return ""
    rest = f" and {len(entries) - limit} more" if len(entries) > limit else ""
    return f"{title}: {', '.join(entries[:limit])}{rest}"
