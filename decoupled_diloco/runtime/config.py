"""Layered settings with origins: flags > environment > file > preset > default.

The result is a pydantic model. Every value remembers where it was written, every complaint names the field,
the value, its origin and what would be right, and all complaints come together. The sources are in
`config_layers`, the printed form in `config_print`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from decoupled_diloco.runtime.config_fields import (
    FieldPath,
    dotted,
    expectation,
    find_field,
    free_value_type,
    is_free_table,
    leaf_fields,
    value_from_text,
)
from decoupled_diloco.runtime.config_layers import Layer, Setting, table_layer

DEFAULT_ORIGIN = "default"

_ASSIGNMENTS: Final = re.compile(r'(?:^|(?<=, ))([a-z_]+(?:\.[a-z_]+)+) = "[^"]*"(?! \()')

ModelT = TypeVar("ModelT", bound=BaseModel)
SectionT = TypeVar("SectionT", bound="Section")


class ConfigError(Exception):
    """What the operator wrote cannot be used. The text is complete; no traceback adds anything.

    Attributes:
        problems: One line per problem.
    """

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True)
class Finding:
    """A contradiction between fields (error), or something that is allowed and likely not meant (warning).

    `fields` are paths relative to the section that reports the finding, written with dots.
    """

    fields: tuple[str, ...]
    text: str
    level: Literal["error", "warning"] = "error"


class Section(BaseModel):
    """Base of all settings classes: frozen, strict about types, and no unknown keys."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        strict=True,
        allow_inf_nan=False,
        validate_default=True,
        hide_input_in_errors=True,
    )

    def findings(self) -> Iterable[Finding]:
        """Contradictions and doubts that involve more than one field. Called once all fields are valid."""
        return ()

    @model_validator(mode="after")
    def _refuse_contradictions(self: SectionT) -> SectionT:
        errors = [finding for finding in self.findings() if finding.level == "error"]
        if errors:
            # The text is for those who build a model directly; `resolve` reads the findings and adds the
            # origins.
            text = "; ".join(f"{', '.join(finding.fields)}: {finding.text}" for finding in errors)
            raise PydanticCustomError("contradiction", "{text}", {"text": text, "findings": errors})
        return self


@dataclass(frozen=True, slots=True)
class Presets:
    """Named sets of values below the file. `field` is the setting that chooses one."""

    field: FieldPath
    tables: Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Resolved(Generic[ModelT]):
    """A valid model, where each of its values came from, and warnings, one line each."""

    value: ModelT
    origins: Mapping[FieldPath, str]
    warnings: tuple[str, ...] = ()

    def origin(self, name: str) -> str:
        """Where the value of a field (dotted name) was written; "default" if nowhere."""
        return self.origins.get(tuple(name.split(".")), DEFAULT_ORIGIN)


def with_origins(error: ConfigError, resolved: Resolved[ModelT]) -> ConfigError:
    """The same complaints about values that were found wanting when they were used, with where each was written.

    Args:
        error: Its problems may begin with `section.key = value`, the form in which `resolve` complains too.
        resolved: Knows the origins.
    """

    def told(found: re.Match[str]) -> str:
        return f"{found[0]} ({resolved.origin(found[1])})"

    return ConfigError([_ASSIGNMENTS.sub(told, problem) for problem in error.problems])


def resolve(model: type[ModelT], layers: Sequence[Layer], presets: Presets | None = None) -> Resolved[ModelT]:
    """Merges layers and validates the result.

    Args:
        model: The settings model.
        layers: From the weakest to the strongest, without the preset.
        presets: The presets, weaker than all layers.

    Raises:
        ConfigError: With every problem of every layer, or of the merged values.
    """
    problems = [problem for layer in layers for problem in layer.problems]
    given = _merge(model, layers)
    if presets is not None:
        below = _preset_layer(model, presets, given)
        problems.extend(below.problems)
        given = {**_merge(model, [below]), **given}
    try:
        value = model.model_validate(_nested(given.values()))
    except ValidationError as error:
        problems.extend(_problem_lines(model, given, error))
    if problems:
        raise ConfigError(problems)
    return Resolved(
        value=value,
        origins={path: setting.origin for path, setting in given.items()},
        warnings=tuple(_warning_lines(value, given)),
    )


def _merge(model: type[BaseModel], layers: Sequence[Layer]) -> dict[FieldPath, Setting]:
    merged: dict[FieldPath, Setting] = {}
    for layer in layers:
        for setting in layer.settings:
            merged[setting.path] = _read(model, setting)
    return merged


def _read(model: type[BaseModel], setting: Setting) -> Setting:
    """The setting with its text read by the type of its field."""
    entry = find_field(model, setting.path)
    if not setting.is_text or entry is None:
        return setting
    kind = entry.annotation
    if is_free_table(kind) and setting.path != entry.path:
        kind = free_value_type(kind)
    return Setting(setting.path, value_from_text(kind, str(setting.value)), setting.origin)


def _preset_layer(model: type[BaseModel], presets: Presets, given: Mapping[FieldPath, Setting]) -> Layer:
    chosen = given.get(presets.field)
    entry = find_field(model, presets.field)
    name = chosen.value if chosen is not None else (entry.info.default if entry is not None else None)
    table = presets.tables.get(str(name))
    # An unknown name is reported by the field's own validation.
    return table_layer(model, table, f"preset {name}") if table is not None else Layer()


def _nested(settings: Iterable[Setting]) -> dict[str, object]:
    root: dict[str, object] = {}
    for setting in sorted(settings, key=lambda setting: len(setting.path)):
        table = root
        for name in setting.path[:-1]:
            below = table.setdefault(name, {})
            if not isinstance(below, dict):  # a wrong value where a table belongs; validation says so
                break
            table = below
        else:
            table[setting.path[-1]] = dict(setting.value) if isinstance(setting.value, dict) else setting.value
    return root


def _problem_lines(model: type[BaseModel], given: Mapping[FieldPath, Setting], error: ValidationError) -> Iterator[str]:
    for details in error.errors():
        location = tuple(str(part) for part in details["loc"])
        if details["type"] == "contradiction":
            for finding in details["ctx"]["findings"]:
                yield _finding_line(location, finding, model, given)
        else:
            yield _field_line(model, given, location, details)


def _field_line(
    model: type[BaseModel], given: Mapping[FieldPath, Setting], location: FieldPath, details: ErrorDetails
) -> str:
    path, setting = _closest(given, location)
    entry = find_field(model, path or location)
    if details["type"] == "missing":
        wanted = _expected(model, location, details)
        return f"{dotted(location)} is required and given nowhere; it must be {wanted}"
    if setting is None or entry is None:
        return f"{dotted(location)}: {details['msg']}"
    wanted = _expected(model, path, details)
    return f"{dotted(path)} = {_shown(setting.value)} ({setting.origin}): must be {wanted}"


def _expected(model: type[BaseModel], path: FieldPath, details: ErrorDetails) -> str:
    """What would be right: a validator's own words, else the words of the field."""
    if details["type"] == "value_error":
        return details["msg"].removeprefix("Value error, ")
    entry = find_field(model, path)
    return expectation(entry.info) if entry is not None else "a section"


def _closest(given: Mapping[FieldPath, Setting], location: FieldPath) -> tuple[FieldPath, Setting | None]:
    """The given setting that contains an error's location (which may point into a list)."""
    for length in range(len(location), 0, -1):
        if setting := given.get(location[:length]):
            return location[:length], setting
    return (), None


def _finding_line(prefix: FieldPath, finding: Finding, source: object, given: Mapping[FieldPath, Setting]) -> str:
    parts = []
    for name in finding.fields:
        path = (*prefix, *name.split("."))
        value, origin = _value_and_origin(path, source, given)
        parts.append(f"{dotted(path)} = {_shown(value)} ({origin})")
    return f"{', '.join(parts)}: {finding.text}"


def _value_and_origin(path: FieldPath, source: object, given: Mapping[FieldPath, Setting]) -> tuple[object, str]:
    """A field's value: as given, else its default. `source` is the model class, or the valid model."""
    if setting := given.get(path):
        return setting.value, setting.origin
    if isinstance(source, type) and issubclass(source, BaseModel):
        entry = find_field(source, path)
        return (entry.info.get_default(call_default_factory=True) if entry is not None else None), DEFAULT_ORIGIN
    for name in path:
        source = getattr(source, name)
    return source, DEFAULT_ORIGIN


def _warning_lines(value: BaseModel, given: Mapping[FieldPath, Setting]) -> Iterator[str]:
    for prefix, section in _sections(value, ()):
        for finding in section.findings():
            if finding.level == "warning":
                yield _finding_line((), _moved(finding, prefix), value, given)


def _moved(finding: Finding, prefix: FieldPath) -> Finding:
    return Finding(tuple(dotted((*prefix, name)) for name in finding.fields), finding.text, finding.level)


def _sections(value: BaseModel, prefix: FieldPath) -> Iterator[tuple[FieldPath, Section]]:
    if isinstance(value, Section):
        yield prefix, value
    for name in type(value).model_fields:
        below = getattr(value, name)
        if isinstance(below, BaseModel):
            yield from _sections(below, (*prefix, name))


def _shown(value: object) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    if isinstance(value, bool):
        text = text.lower()
    return text if len(text) <= 120 else f"{text[:117]}..."


def flat_values(value: BaseModel, model: type[BaseModel] | None = None) -> dict[FieldPath, object]:
    """The values of a model by path; a free table gives one entry per key.

    Args:
        value: The model.
        model: The class whose fields are wanted, a base class of the value's own; default: that itself.
    """
    flat: dict[FieldPath, object] = {}
    for entry in leaf_fields(model or type(value)):
        current: object = value
        for name in entry.path:
            current = getattr(current, name)
        if isinstance(current, Mapping) and is_free_table(entry.annotation):
            flat.update({(*entry.path, str(key)): below for key, below in current.items()})
        else:
            flat[entry.path] = current
    return flat
