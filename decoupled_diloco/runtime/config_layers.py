"""The layers that settings come from: preset, file, environment, flags.

Each remembers where every value was written. A layer only knows which paths were given and as what; whether
the values are right is decided by `config.resolve`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from decoupled_diloco.runtime.config_fields import FieldPath, dotted, find_field, is_section, suggestion

# Variables that Kubernetes puts into every pod for a service of this name. They are not ours, and not a
# typing error.
_KUBERNETES_VARIABLE = re.compile(
    r"_(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_[A-Z]+)?)?)$"
)
_TABLE_LINE = re.compile(r"^\s*\[\s*([A-Za-z0-9_.\-\s]+?)\s*\]\s*(#.*)?$")
_KEY_LINE = re.compile(r"^\s*([A-Za-z0-9_\-]+(?:\s*\.\s*[A-Za-z0-9_\-]+)*)\s*=")


@dataclass(frozen=True, slots=True)
class Setting:
    """One value, its origin, and whether it is still text, to be read by the type of its field."""

    path: FieldPath
    value: object
    origin: str
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class Layer:
    """All settings of one source, and what is wrong with the source itself, one line each."""

    settings: tuple[Setting, ...] = ()
    problems: tuple[str, ...] = ()


def table_layer(
    model: type[BaseModel],
    table: Mapping[str, object],
    origin: str,
    lines: Mapping[FieldPath, int] | None = None,
    foreign_sections: Collection[str] = (),
) -> Layer:
    """A layer from nested tables.

    Args:
        model: The settings model; says which tables are sections.
        table: The values.
        origin: Where they were written, for example "file run.toml".
        lines: Line numbers by path, where known.
        foreign_sections: Top-level sections that belong to another process and are passed over.
    """
    settings: list[Setting] = []
    problems: list[str] = []
    for path, value in _walk(model, table, ()):
        if path[0] in foreign_sections:
            continue
        line = (lines or {}).get(path)
        place = f"{origin} line {line}" if line else origin
        if find_field(model, path) is not None:
            settings.append(Setting(path, value, place))
        elif is_section(model, path):
            problems.append(f"{dotted(path)} = {value!r} ({place}): this is a section; write [{dotted(path)}]")
        else:
            problems.append(f"{dotted(path)} ({place}): there is no such setting{suggestion(model, path)}")
    return Layer(tuple(settings), tuple(problems))


def _walk(model: type[BaseModel], table: Mapping[str, object], prefix: FieldPath) -> Iterator[tuple[FieldPath, object]]:
    """The values of nested tables: down into sections and free tables, up to fields and unknown names."""
    for name, value in table.items():
        path = (*prefix, name)
        entry = find_field(model, (*path, "any"))
        opens_free_table = entry is not None and entry.path == path
        if isinstance(value, Mapping) and (is_section(model, path) or opens_free_table):
            if opens_free_table:
                yield from (((*path, key), below) for key, below in value.items())
            else:
                yield from _walk(model, value, path)
        else:
            yield path, value


def file_layer(model: type[BaseModel], path: Path, foreign_sections: Collection[str] = ()) -> Layer:
    """A layer from a TOML file. A file that cannot be read is a problem of the layer, not an exception."""
    try:
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return Layer(problems=(f"file {path}: there is no such file",))
    except UnicodeDecodeError as error:
        return Layer(problems=(f"file {path}: is not UTF-8 text (byte {error.start}); save it as UTF-8",))
    except OSError as error:
        return Layer(problems=(f"file {path}: cannot be read: {error.strerror}",))
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return Layer(problems=(f"file {path}: is not valid TOML: {error}",))
    return table_layer(model, table, f"file {path}", key_lines(text), foreign_sections)


def key_lines(text: str) -> dict[FieldPath, int]:
    """Line numbers of the keys of a TOML text; quoted and inline keys are left out."""
    lines: dict[FieldPath, int] = {}
    table: FieldPath = ()
    quote: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if quote is not None:
            quote = None if line.count(quote) % 2 else quote
            continue
        if header := _TABLE_LINE.match(line):
            table = tuple(part.strip() for part in header[1].split("."))
            lines.setdefault(table, number)
        elif key := _KEY_LINE.match(line):
            lines.setdefault((*table, *(part.strip() for part in key[1].split("."))), number)
        quote = next((mark for mark in ('"""', "'''") if line.count(mark) % 2), None)
    return lines


def environment_layer(
    model: type[BaseModel],
    environ: Mapping[str, str],
    prefix: str,
    reserved: Collection[str] = (),
    foreign_sections: Collection[str] = (),
) -> Layer:
    """A layer from environment variables named PREFIX + SECTION__KEY.

    Args:
        model: The settings model.
        environ: The environment.
        prefix: Start of all names, for example "MY_SERVICE_".
        reserved: Whole names (with the prefix) that somebody else reads, such as the one that names the file.
        foreign_sections: Top-level sections that belong to another process.
    """
    settings: list[Setting] = []
    problems: list[str] = []
    for variable in sorted(environ):
        if not variable.startswith(prefix) or variable in reserved:
            continue
        path = tuple(part.lower() for part in variable[len(prefix) :].split("__"))
        if path[0] in foreign_sections or _KUBERNETES_VARIABLE.search(variable):
            continue
        origin = f"environment {variable}"
        if find_field(model, path) is None:
            problems.append(f"{dotted(path)} ({origin}): there is no such setting{suggestion(model, path)}")
        else:
            settings.append(Setting(path, environ[variable], origin, is_text=True))
    return Layer(tuple(settings), tuple(problems))


def assignment_layer(model: type[BaseModel], assignments: Sequence[str], flag: str = "--set") -> Layer:
    """A layer from repeated flags of the form `section.key=value`; the last one for a key wins."""
    settings: list[Setting] = []
    problems: list[str] = []
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        path = tuple(part.strip() for part in name.split("."))
        origin = f"flag {flag} {name.strip()}"
        if not equals:
            problems.append(f"flag {flag} {assignment}: write {flag} section.key=value")
        elif find_field(model, path) is None:
            problems.append(f"{dotted(path)} ({origin}): there is no such setting{suggestion(model, path)}")
        else:
            settings.append(Setting(path, text, origin, is_text=True))
    return Layer(tuple(settings), tuple(problems))
