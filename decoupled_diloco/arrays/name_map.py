"""Name maps: which tensors of a foreign file are which tensors of the run, and how their elements lie.

A map is a small TOML text::

    format = 1
    ignore = ["lm_head.weight"]            # tensors of the file that nobody wants

    [alternatives]
    model = ["model.", "language_model.model."]   # {model} is one of these; the first one is written

    [sizes]
    head_dim = 256                         # extents that the shapes alone do not say

    [[tensor]]
    file = "{model}layers.{layer}.self_attn.q_proj.weight"
    run = "layer_{layer:02}/attention/query"
    layout = "out in -> in out"            # axes of the file -> axes of the run
    multiply = 4.0                         # run = file * multiply + add
    add = 0.0

A field that only the file's side has is stacked in the run: `run_axis` says along which axis; the other way
round `file_axis` does (layers scanned with jax.lax.scan). A list on one side is concatenated or split along
that axis. Rules are tried in order; among several rules for one tensor the first one whose other side is
there is used. Read forwards a map imports, read backwards it exports.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.layout import Layout, parse_layout
from decoupled_diloco.arrays.name_pattern import NamePattern, PatternError

NAME_MAP_FORMAT: Final = 1

_MAP_KEYS: Final = {
    "format": int,
    "description": str,
    "ignore": list,
    "alternatives": dict,
    "sizes": dict,
    "tensor": list,
}
_RULE_KEYS: Final = {
    "file": (str, list),
    "run": (str, list),
    "layout": str,
    "file_axis": int,
    "run_axis": int,
    "parts": list,
    "multiply": (int, float),
    "add": (int, float),
}


class RuleError(ValueError):
    """One rule of a map cannot be used."""


class NameMapError(ValueError):
    """A name map cannot be used, or does not fit the tensors.

    Attributes:
        problems: one sentence each; it names the tensor or the rule, what it is, and what would be right.
    """

    shown_max: Final = 40
    """Problems that the message shows."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        shown = list(self.problems[: self.shown_max])
        if len(self.problems) > len(shown):
            shown.append(f"and {len(self.problems) - len(shown)} more")
        super().__init__("; ".join(shown))


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a rule.

    Attributes:
        patterns: one, or several that are parts of the one tensor on the other side.
        axis: along which the tensors of the other side lie in this one, or None.
    """

    patterns: tuple[NamePattern, ...]
    axis: int | None

    @property
    def numbers(self) -> frozenset[str]:
        """Fields that are numbers."""
        return self.patterns[0].numbers

    def match(self, name: str) -> tuple[dict[str, int | str], int] | None:
        """The fields' values, and which of the patterns it was; None if it is none of them."""
        for position, pattern in enumerate(self.patterns):
            if (values := pattern.match(name)) is not None:
                return values, position
        return None


@dataclass(frozen=True, slots=True)
class Rule:
    """How tensors of one side, `source`, become tensors of the other, `target`.

    Attributes:
        source: where tensors are taken from.
        target: where they go.
        layout: from the axes of `source` to those of `target`, or None if they are the same. It acts on one
            slice of a stacked tensor, without the stacked axis.
        parts: shares of the patterns of the side that has several, or none.
        multiply: factor on the way from the file to the run.
        add: what is then added on that way.
        imports: whether `source` is the file.
    """

    source: Side
    target: Side
    layout: Layout | None = None
    parts: tuple[int, ...] = ()
    multiply: float = 1.0
    add: float = 0.0
    imports: bool = True

    @property
    def stacked_field(self) -> str | None:
        """The field over which tensors of the source are stacked in the target."""
        return next(iter(self.source.numbers - self.target.numbers), None)

    @property
    def taken_apart_field(self) -> str | None:
        """The field over which one tensor of the source is taken apart."""
        return next(iter(self.target.numbers - self.source.numbers), None)

    def reversed(self) -> Rule:
        """The way back."""
        layout = self.layout and self.layout.reversed()
        return Rule(self.target, self.source, layout, self.parts, self.multiply, self.add, not self.imports)

    def convert(self, values: npt.NDArray[np.generic], sizes: Mapping[str, int]) -> npt.NDArray[np.float32]:
        """One slice of the source as the target has it, in float32."""
        with np.errstate(over="ignore"):  # what float32 cannot hold becomes infinite, and whoever asked looks for that
            array: npt.NDArray[np.float32] = values.astype(np.float32, copy=False)
        if self.layout is not None:
            array = self.layout.apply(array, sizes)
        factor, offset = np.float32(self.multiply), np.float32(self.add)
        if (self.multiply, self.add) == (1.0, 0.0):
            return array
        return array * factor + offset if self.imports else (array - offset) / factor


@dataclass(frozen=True, slots=True)
class NameMap:
    """The rules of a map.

    Attributes:
        name: what messages call it.
        rules: from the file to the run, in the order in which they are tried.
        ignored: patterns of the file's tensors that may be left over.
        sizes: extents of axes by name.
    """

    name: str
    rules: tuple[Rule, ...]
    ignored: tuple[NamePattern, ...]
    sizes: Mapping[str, int]


def same_names() -> NameMap:
    """The map of files that have the run's own names."""
    everything = Side((NamePattern("{name...}"),), None)
    return NameMap("the run's own names", (Rule(everything, everything),), (), {})


def parse_name_map(text: str, name: str) -> NameMap:
    """Reads a map.

    Args:
        text: TOML.
        name: what messages call the map.

    Raises:
        NameMapError: with all that is wrong.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise NameMapError([f"name map {name} is not valid TOML: {error}"]) from error
    problems = [f"name map {name}: {problem}" for problem in _wrong_keys(table, _MAP_KEYS, "")]
    if table.get("format") != NAME_MAP_FORMAT:
        problems.append(f"name map {name}: format = {table.get('format')!r}; write format = {NAME_MAP_FORMAT}")
    if not table.get("tensor"):
        problems.append(f"name map {name} has no [[tensor]]")
    if problems:
        raise NameMapError(problems)
    sizes, alternatives = table.get("sizes", {}), table.get("alternatives", {})
    for key, extent in sizes.items():
        if type(extent) is not int or extent < 1:
            problems.append(f"name map {name}: sizes.{key} = {extent!r}; an extent is a whole number above 0")
    for key, texts in alternatives.items():
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            problems.append(f"name map {name}: alternatives.{key} = {texts!r}; give a list of texts")
            alternatives[key] = [""]
    rules: list[Rule] = []
    ignored: list[NamePattern] = []
    for number, entry in enumerate(table["tensor"], 1):
        try:
            rules.extend(_rule(variant) for variant in _variants(entry, alternatives))
        except ValueError as error:
            file = entry.get("file") if isinstance(entry, dict) else entry
            problems.append(f"name map {name}, tensor {number} (file = {file!r}): {error}")
    for pattern in table.get("ignore", ()):
        try:
            ignored.append(NamePattern(pattern))
        except (PatternError, TypeError) as error:
            problems.append(f"name map {name}: ignore: {error}")
    if problems:
        raise NameMapError(problems)
    return NameMap(name, tuple(rules), tuple(ignored), sizes)


def _variants(entry: object, alternatives: Mapping[str, Sequence[str]]) -> Iterable[Mapping[str, Any]]:
    """The entry once for each choice of the alternatives that its file's names have."""
    if not isinstance(entry, dict):
        raise RuleError("each [[tensor]] is a table")
    if problems := _wrong_keys(entry, _RULE_KEYS, "tensor."):
        raise RuleError("; ".join(problems))
    if missing := sorted({"file", "run"} - entry.keys()):
        raise RuleError(f"{' and '.join(missing)} must be given")
    files = entry["file"] if isinstance(entry["file"], list) else [entry["file"]]
    used = [key for key in alternatives if any(f"{{{key}}}" in str(file) for file in files)]
    for choice in itertools.product(*(alternatives[key] for key in used)):
        chosen = dict(zip(used, choice, strict=True))
        yield {**entry, "file": [_chosen(file, chosen) for file in files]}


def _chosen(file: object, chosen: Mapping[str, str]) -> object:
    return re.sub(r"\{(\w+)\}", lambda found: chosen.get(found[1], found[0]), file) if isinstance(file, str) else file


def _rule(entry: Mapping[str, Any]) -> Rule:
    """One rule of a map.

    Raises:
        ValueError: what is wrong with it (a rule, a pattern or a layout).
    """
    source, target = _side(entry, "file"), _side(entry, "run")
    rule = Rule(
        source,
        target,
        parse_layout(entry["layout"]) if "layout" in entry else None,
        tuple(entry.get("parts", ())),
        float(entry.get("multiply", 1.0)),
        float(entry.get("add", 0.0)),
    )
    if not (math.isfinite(rule.multiply) and math.isfinite(rule.add)) or rule.multiply == 0:
        raise RuleError("multiply and add must be finite and multiply not 0, or nothing could be exported")
    texts = {pattern.texts for side in (source, target) for pattern in side.patterns}
    if len(texts) > 1:
        raise RuleError("fields for text, {name...}, must be the same on both sides")
    _check_axes(rule)
    return rule


def _check_axes(rule: Rule) -> None:
    """Says which side has the axis that several tensors of the other one lie along."""
    file, run = rule.source, rule.target
    differing = file.numbers ^ run.numbers
    several = [side for side in (file, run) if len(side.patterns) > 1]
    if len(differing) + len(several) > 1:
        raise RuleError(
            "one rule can join tensors along one axis only: by one field that a side lacks "
            f"({', '.join(sorted(differing)) or 'none'}) or by one list"
        )
    needed = {
        "run_axis": len(file.patterns) > 1 or bool(file.numbers - run.numbers),
        "file_axis": len(run.patterns) > 1 or bool(run.numbers - file.numbers),
    }
    for key, axis in (("file_axis", file.axis), ("run_axis", run.axis)):
        if needed[key] and axis is None:
            raise RuleError(f"{key} must say along which axis the tensors of the other side lie")
        if not needed[key] and axis is not None:
            raise RuleError(f"{key} = {axis} has no meaning: the other side has one tensor for each of these")
        if axis is not None and axis < 0:
            raise RuleError(f"{key} = {axis} must be 0 or more")
    if rule.parts and (
        not several
        or len(rule.parts) != len(several[0].patterns)
        or any(type(part) is not int or part < 1 for part in rule.parts)
    ):
        raise RuleError(
            f"parts = {list(rule.parts)} must be whole numbers above 0, one for each tensor of the side with a list"
        )


def _side(entry: Mapping[str, Any], key: str) -> Side:
    texts = entry[key] if isinstance(entry[key], list) else [entry[key]]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise RuleError(f"{key} = {entry[key]!r} must be a name, or a list of names")
    patterns = tuple(NamePattern(text) for text in texts)
    if len({pattern.fields for pattern in patterns}) > 1:
        raise RuleError(f"{key}: all names of a list must have the same fields")
    return Side(patterns, entry.get(f"{key}_axis"))


def _wrong_keys(table: Mapping[str, Any], kinds: Mapping[str, Any], prefix: str) -> list[str]:
    problems = []
    for key, value in table.items():
        if key not in kinds:
            near = difflib.get_close_matches(key, kinds, 1)
            problems.append(f"there is no {prefix}{key}" + (f"; did you mean {near[0]}?" if near else ""))
        elif not isinstance(value, kinds[key]) or isinstance(value, bool):
            problems.append(f"{prefix}{key} = {value!r} has the wrong type")
    return problems
