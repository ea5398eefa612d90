"""The printed form of settings: TOML that can be fed back, with sentences and origins."""

from __future__ import annotations

import datetime
import enum
import json
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from decoupled_diloco.runtime.config import DEFAULT_ORIGIN, Resolved, flat_values
from decoupled_diloco.runtime.config_fields import FieldEntry, dotted, expectation, is_free_table, leaf_fields

_BARE_KEY = re.compile(r"^[A-Za-z0-9_-]+$")
_COMMENT_COLUMN = 44


def print_config(resolved: Resolved[BaseModel], title: str = "Settings as resolved") -> str:
    """TOML text of a resolved model: each field's sentence as a comment, then `key = value  # origin`.

    The text read back as a file gives an equal model.
    """
    lines = [f"# {title}. After each value: where it was written."]
    section: tuple[str, ...] | None = None
    values = flat_values(resolved.value)
    for entry in _in_printing_order(type(resolved.value)):
        free = is_free_table(entry.annotation)
        table = entry.path if free else entry.path[:-1]
        if table != section:
            lines += ["", f"[{'.'.join(toml_key(name) for name in table)}]"]
            section = table
        lines += _comment(entry)
        for path, value in values.items():
            if path == entry.path or (free and path[: len(entry.path)] == entry.path):
                lines.append(_assignment(path[-1], value, resolved.origins.get(path, DEFAULT_ORIGIN)))
    return "\n".join(lines) + "\n"


def _in_printing_order(model: type[BaseModel]) -> list[FieldEntry]:
    """Section by section; in each the free tables last, because TOML cannot return to a table."""
    entries = list(leaf_fields(model))
    sections = list(dict.fromkeys(entry.path[:-1] for entry in entries))
    return sorted(entries, key=lambda entry: (sections.index(entry.path[:-1]), is_free_table(entry.annotation)))


def _comment(entry: FieldEntry) -> Iterator[str]:
    sentence = entry.info.description or ""
    yield from textwrap.wrap(sentence, width=104, initial_indent="# ", subsequent_indent="# ")


def _assignment(name: str, value: object, origin: str) -> str:
    if value is None:  # TOML knows no null: absent is written as a comment
        return f"{'# ' + toml_key(name) + ' =':<{_COMMENT_COLUMN}}  # {origin}"
    return f"{toml_key(name) + ' = ' + toml_value(value):<{_COMMENT_COLUMN}}  # {origin}"


def toml_key(name: str) -> str:
    """A key, quoted where TOML wants it."""
    return name if _BARE_KEY.match(name) else _toml_string(name)


def toml_value(value: object) -> str:
    """A value as TOML on one line.

    Raises:
        TypeError: For a type that TOML has no form for.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, enum.Enum):
        return toml_value(value.value)
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (str, Path)):
        return _toml_string(str(value))
    if isinstance(value, (datetime.datetime, datetime.date, datetime.time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_key(str(key))} = {toml_value(below)}" for key, below in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(toml_value(item) for item in value) + "]"
    raise TypeError(f"{type(value).__name__} has no TOML form")


def _toml_string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def settings_table(model: type[BaseModel]) -> str:
    """A Markdown table of every setting: name, what it accepts, default, sentence. For the documentation."""
    rows = ["| setting | accepts | default | meaning |", "|---|---|---|---|"]
    for entry in leaf_fields(model):
        default = entry.info.get_default(call_default_factory=True) if not entry.info.is_required() else None
        shown = "required" if entry.info.is_required() else ("" if default is None else f"`{toml_value(default)}`")
        sentence = (entry.info.description or "").replace("|", "\\|")
        rows.append(f"| `{dotted(entry.path)}` | {expectation(entry.info)} | {shown} | {sentence} |")
    return "\n".join(rows) + "\n"
