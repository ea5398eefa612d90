"""Values of the core as plain ones (numbers, texts, lists, mappings) and back, for files that outlive a process.

What a file holds follows from the dataclasses themselves: a field by its name, an enum by its value, a member of a
union of dataclasses with its class name under "type". A field that a file does not have takes its default, so a class
may gain fields; a field that the class does not know is refused. Infinities survive (as texts: JSON has none).
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Value = TypeVar("Value")

_PLAIN_ALREADY = frozenset({int, str, bool, type(None)})
"""Types whose values stay as they are; most of what is written down are lists and mappings of them."""

_INFINITIES = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class PlainError(ValueError):
    """A plain value is not what the type wants; the message says where, what it is and what would be right."""


def to_plain(value: Any) -> Any:
    """Turns a value of the core into numbers, texts, booleans, None, lists and mappings with text keys.

    Raises:
        TypeError: The value is of a type that the core does not speak in.
    """
    kind: Any = type(value)
    if kind is int or kind is str or kind is bool or value is None:
        return value
    if kind is float:
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {name: to_plain(getattr(value, name)) for name in _field_names(kind)}
    if isinstance(value, (list, tuple)):
        return list(value) if _PLAIN_ALREADY.issuperset(map(type, value)) else [to_plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted(to_plain(item) for item in value)
    if isinstance(value, Mapping):
        if all(type(key) is str for key in value):
            if _PLAIN_ALREADY.issuperset(map(type, value.values())):
                return dict(value)
            return {key: to_plain(item) for key, item in value.items()}
        return [[to_plain(key), to_plain(item)] for key, item in value.items()]
    raise TypeError(f"{kind.__name__} cannot be written down: {value!r}")


def tagged(value: Any) -> dict[str, Any]:
    """A dataclass as a plain mapping that also says which class it is of: for unions of classes."""
    return {"type": type(value).__name__, **to_plain(value)}


def from_plain(wanted: type[Value], plain: Any, where: str = "") -> Value:
    """The inverse of `to_plain`.

    Args:
        wanted: The type; a dataclass, or anything that its fields may be.
        plain: As `to_plain` gave it.
        where: Name of the value, for messages.

    Raises:
        PlainError: It does not fit.
    """
    name: Any = wanted
    return _reader(name)(plain, where or getattr(wanted, "__name__", str(wanted)))  # type: ignore[no-any-return]


def from_tagged(wanted: Any, plain: Mapping[str, Any], where: str = "value") -> Any:
    """The inverse of `tagged`.

    Args:
        wanted: A union of dataclasses.
        plain: As `tagged` gave it.
        where: Name of the value, for messages.

    Raises:
        PlainError: It does not fit, or is of no class of the union.
    """
    name = plain.get("type")
    found = next((option for option in get_args(wanted) if option.__name__ == name), None)
    if found is None:
        raise PlainError(f"{where}: there is no {name!r} among {[option.__name__ for option in get_args(wanted)]}")
    return from_plain(found, {key: value for key, value in plain.items() if key != "type"}, where)


_Reader = Callable[[Any, str], Any]


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


@cache
def _reader(wanted: Any) -> _Reader:
    """How a plain value becomes one of a type; worked out once for every type."""
    origin, arguments = get_origin(wanted), get_args(wanted)
    if wanted is Any:
        return lambda plain, where: plain
    if wanted is None or wanted is type(None):
        return _exactly_none
    if origin is Literal:
        return lambda plain, where: _one_of(plain, arguments, where)
    if origin in (Union, types.UnionType):
        return _union_reader(arguments)
    if origin is tuple:
        return _tuple_reader(arguments)
    if origin in (list, set, frozenset):
        item = _reader(arguments[0])
        return lambda plain, where: origin(item(value, where) for value in _list(plain, where))
    if origin is not None and issubclass(origin, Mapping):
        return _mapping_reader(arguments)
    if dataclasses.is_dataclass(wanted):
        return _dataclass_reader(wanted)  # type: ignore[arg-type]
    if isinstance(wanted, type) and issubclass(wanted, Enum):
        return lambda plain, where: _enum(wanted, plain, where)
    return lambda plain, where: _scalar(wanted, plain, where)


def _exactly_none(plain: Any, where: str) -> None:
    if plain is not None:
        raise PlainError(f"{where} = {plain!r}: must be null")


def _one_of(plain: Any, allowed: tuple[Any, ...], where: str) -> Any:
    if plain not in allowed:
        raise PlainError(f"{where} = {plain!r}: must be one of {', '.join(map(repr, allowed))}")
    return plain


def _list(plain: Any, where: str) -> list[Any]:
    if not isinstance(plain, list):
        raise PlainError(f"{where} = {plain!r}: must be a list")
    return plain


def _enum(wanted: type[Enum], plain: Any, where: str) -> Enum:
    try:
        return wanted(plain)
    except ValueError:
        raise PlainError(f"{where} = {plain!r}: must be one of {', '.join(repr(m.value) for m in wanted)}") from None


def _scalar(wanted: Any, plain: Any, where: str) -> Any:
    if wanted is float and type(plain) is str and plain in _INFINITIES:
        return _INFINITIES[plain]
    if wanted is float and type(plain) is int:
        return float(plain)
    if type(plain) is not wanted:
        raise PlainError(f"{where} = {plain!r}: must be of type {getattr(wanted, '__name__', wanted)}")
    return plain


def _union_reader(options: tuple[Any, ...]) -> _Reader:
    """The first option that fits; None only where it is one of them."""
    readers = [_reader(option) for option in options if option is not type(None)]
    takes_none = len(readers) < len(options)

    def read(plain: Any, where: str) -> Any:
        if plain is None and takes_none:
            return None
        failures = []
        for reader in readers:
            try:
                return reader(plain, where)
            except PlainError as error:
                failures.append(str(error))
        raise PlainError("; or ".join(failures))

    return read


def _tuple_reader(arguments: tuple[Any, ...]) -> _Reader:
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        item = _reader(arguments[0])
        return lambda plain, where: tuple(item(value, where) for value in _list(plain, where))
    readers = [_reader(argument) for argument in arguments]

    def read(plain: Any, where: str) -> Any:
        values = _list(plain, where)
        if len(values) != len(readers):
            raise PlainError(f"{where} = {plain!r}: must be {len(readers)} values")
        return tuple(reader(value, where) for reader, value in zip(readers, values, strict=True))

    return read


def _mapping_reader(arguments: tuple[Any, ...]) -> _Reader:
    key_reader, value_reader = _reader(arguments[0]), _reader(arguments[1])

    def read(plain: Any, where: str) -> Any:
        if not isinstance(plain, (dict, list)):
            raise PlainError(f"{where} = {plain!r}: must be a mapping, or a list of pairs")
        pairs = plain.items() if isinstance(plain, dict) else plain
        return {key_reader(key, where): value_reader(value, f"{where}[{key!r}]") for key, value in pairs}

    return read


def _dataclass_reader(wanted: type) -> _Reader:
    hints = get_type_hints(wanted)
    fields = {field.name: field for field in dataclasses.fields(wanted) if field.init}

    def read(plain: Any, where: str) -> Any:
        if not isinstance(plain, dict):
            raise PlainError(f"{where} = {plain!r}: must be a mapping with the fields of {wanted.__name__}")
        unknown = sorted(set(plain) - set(fields))
        if unknown:
            raise PlainError(
                f"{where}: {wanted.__name__} has no field {', '.join(unknown)}; was it written by a newer release?"
            )
        missing = [name for name, field in fields.items() if name not in plain and _is_required(field)]
        if missing:
            raise PlainError(f"{where}: {', '.join(missing)} of {wanted.__name__} is not there")
        return wanted(**{name: _reader(hints[name])(value, f"{where}.{name}") for name, value in plain.items()})

    return read


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
