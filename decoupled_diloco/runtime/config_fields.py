"""The fields of a settings model: finding them by path, reading them from text, and saying what they accept.

A settings model is a tree of `Section` classes. A *path* is a tuple of names, for example `("quorum",
"minimum")`; its dotted form is what people write. A field whose type is a dictionary is a *free table*: any
key below it is accepted.
"""

from __future__ import annotations

import difflib
import enum
import tomllib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

FieldPath = tuple[str, ...]

_TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
_FALSE_WORDS = frozenset({"false", "no", "off", "0"})


@dataclass(frozen=True, slots=True)
class Expect:
    """Metadata for an annotated field: what is right, in words, where the type alone does not say it."""

    text: str


@dataclass(frozen=True, slots=True)
class FieldEntry:
    """One leaf field of a model."""

    path: FieldPath
    info: FieldInfo

    @property
    def annotation(self) -> object:
        """The field's type without its metadata."""
        return self.info.annotation


def dotted(path: FieldPath) -> str:
    """The written form of a path, for example "quorum.minimum"."""
    return ".".join(path)


def section_class(annotation: object) -> type[BaseModel] | None:
    """The model class if the annotation is a section, else None."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return None


def is_free_table(annotation: object) -> bool:
    """Whether any key is accepted below a field of this type."""
    return annotation is dict or get_origin(annotation) is dict


def leaf_fields(model: type[BaseModel], prefix: FieldPath = ()) -> Iterator[FieldEntry]:
    """All fields that hold a value, in the order of the classes. A free table counts as one field."""
    for name, info in model.model_fields.items():
        below = section_class(info.annotation)
        if below is None:
            yield FieldEntry((*prefix, name), info)
        else:
            yield from leaf_fields(below, (*prefix, name))


def find_field(model: type[BaseModel], path: FieldPath) -> FieldEntry | None:
    """The leaf field that a path names, or None for sections and unknown names.

    For a path into a free table it is that table's field.
    """
    for position, name in enumerate(path):
        info = model.model_fields.get(name)
        if info is None:
            return None
        below = section_class(info.annotation)
        if below is None:
            is_end = position == len(path) - 1
            return FieldEntry(path[: position + 1], info) if is_end or is_free_table(info.annotation) else None
        model = below
    return None


def is_section(model: type[BaseModel], path: FieldPath) -> bool:
    """Whether the path names a section (a table) of the model."""
    current: type[BaseModel] | None = model
    for name in path:
        info = current.model_fields.get(name) if current is not None else None
        current = section_class(info.annotation) if info is not None else None
        if current is None:
            return False
    return True


def suggestion(model: type[BaseModel], path: FieldPath) -> str:
    """A hint for an unknown path: '; did you mean "quorum.minimum"?', or a list of what there is."""
    known = [entry.path for entry in leaf_fields(model)]
    parent, name = path[:-1], path[-1]
    siblings = [below[-1] for below in known if below[:-1] == parent]
    near = difflib.get_close_matches(name, siblings, n=1, cutoff=0.5) if parent else []
    if near:
        return f'; did you mean "{dotted((*parent, near[0]))}"?'
    sections = sorted({below[0] for below in known if len(below) > 1})
    elsewhere = [dotted(below) for below in known if below[-1] == name]
    candidates = elsewhere or [dotted(below) for below in known if not siblings] + sections * (not siblings)
    near = difflib.get_close_matches(dotted(path), candidates, n=1, cutoff=0.0 if elsewhere else 0.6)
    if near:
        return f'; did you mean "{near[0]}"?'
    if siblings and parent:
        return f"; [{dotted(parent)}] has: {', '.join(siblings)}"
    return f"; sections are: {', '.join(sections)}" if sections else ""


def _without_none(annotation: object) -> tuple[object, bool]:
    """The type of an optional field and whether None is allowed."""
    if get_origin(annotation) in (Union, types.UnionType):
        arguments = get_args(annotation)
        others = [argument for argument in arguments if argument is not type(None)]
        if len(others) == 1:
            return others[0], len(others) < len(arguments)
    return annotation, False


def value_from_text(annotation: object, text: str) -> object:
    """Reads a value given as text (environment or flag) for a field of this type.

    Text that does not fit is returned as it is, so that validation reports it like any other wrong value.
    """
    kind, is_optional = _without_none(annotation)
    if is_optional and text == "":
        return None
    if kind is bool:
        lowered = text.strip().lower()
        if lowered in _TRUE_WORDS | _FALSE_WORDS:
            return lowered in _TRUE_WORDS
        return text
    if kind in (int, float):
        try:
            return int(text) if kind is int else float(text)
        except ValueError:
            return text
    if get_origin(kind) in (list, tuple) and not text.lstrip().startswith("["):
        return [part.strip() for part in text.split(",") if part.strip()]
    if kind is object or kind is Any or get_origin(kind) in (dict, list, tuple) or kind is dict:
        return _toml_value(text)
    return text


def free_value_type(annotation: object) -> object:
    """The type of the values of a free table."""
    arguments = get_args(annotation)
    return arguments[1] if len(arguments) == 2 else object


def _toml_value(text: str) -> object:
    """The text as a TOML value, or as plain text if it is none."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def expectation(info: FieldInfo) -> str:
    """What a field accepts, in words: "a whole number >= 1", "one of on, off"."""
    for item in info.metadata:
        if isinstance(item, Expect):
            return item.text
    kind, is_optional = _without_none(info.annotation)
    words = _type_words(kind) + _bounds_words(info.metadata)
    return f"{words}, or nothing" if is_optional else words


def _type_words(kind: object) -> str:
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(argument) for argument in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return "one of " + ", ".join(str(member.value) for member in kind)
    plain: Mapping[object, str] = {
        bool: "true or false",
        int: "a whole number",
        float: "a number",
        str: "text",
        Path: "a path",
    }
    if kind in plain:
        return plain[kind]
    if get_origin(kind) in (list, tuple):
        return "a list of " + _type_words(get_args(kind)[0]).removeprefix("a ")
    if is_free_table(kind):
        return "a table"
    return "a value"


def _bounds_words(metadata: list[Any]) -> str:
    bounds = []
    for item in metadata:
        if isinstance(item, annotated_types.Ge):
            bounds.append(f">= {item.ge}")
        elif isinstance(item, annotated_types.Gt):
            bounds.append(f"> {item.gt}")
        elif isinstance(item, annotated_types.Le):
            bounds.append(f"<= {item.le}")
        elif isinstance(item, annotated_types.Lt):
            bounds.append(f"< {item.lt}")
        elif isinstance(item, annotated_types.MinLen) and item.min_length == 1:
            bounds.append("that is not empty")
    return " " + " and ".join(bounds) if bounds else ""
