"""Patterns of tensor names with numbers in them: "layer_{layer:02}/attention/query"."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_FIELD = re.compile(r"\{([a-z_]\w*)(:0(\d+)|\.\.\.)?\}")


class PatternError(ValueError):
    """A pattern cannot be read; the message shows it and what would be right."""


@dataclass(frozen=True)
class NamePattern:
    """A pattern of names.

    `{layer}` stands for a whole number, `{layer:02}` for one with at least two digits, `{rest...}` for any text.

    Attributes:
        text: the pattern.
        numbers: names of the fields that are numbers.
        texts: names of the fields that are text.

    Raises:
        PatternError: braces that are no field, or a field twice.
    """

    text: str
    numbers: frozenset[str] = field(init=False)
    texts: frozenset[str] = field(init=False)
    _expression: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = _FIELD.findall(self.text)
        names = [name for name, _, _ in fields]
        if not self.text or re.search(r"[{}]", _FIELD.sub("", self.text)):
            raise PatternError(
                f"{self.text!r} is no pattern of names; fields are written {{layer}}, {{layer:02}} or {{rest...}}"
            )
        if len(set(names)) != len(names):
            raise PatternError(f"{self.text!r} has a field twice")
        object.__setattr__(self, "numbers", frozenset(name for name, kind, _ in fields if kind != "..."))
        object.__setattr__(self, "texts", frozenset(name for name, kind, _ in fields if kind == "..."))
        expression = ""
        for part in re.split(r"(\{[^}]*\})", self.text):
            found = _FIELD.fullmatch(part)
            if found is None:
                expression += re.escape(part)
            elif found[2] == "...":
                expression += f"(?P<{found[1]}>.+)"
            else:
                expression += f"(?P<{found[1]}>\\d{{{int(found[3] or 1)},}})"
        object.__setattr__(self, "_expression", re.compile(expression))

    @property
    def fields(self) -> frozenset[str]:
        """Names of all fields."""
        return self.numbers | self.texts

    def match(self, name: str) -> dict[str, int | str] | None:
        """What the fields stand for if the pattern is to be `name`, else None."""
        found = self._expression.fullmatch(name)
        if found is None:
            return None
        values = {key: int(text) if key in self.numbers else text for key, text in found.groupdict().items()}
        return values if self.fill(values) == name else None  # layer_007 is not what {layer:02} writes

    def fill(self, values: Mapping[str, int | str]) -> str:
        """The name with these values of the fields."""
        return _FIELD.sub(
            lambda found: str(values[found[1]]) if not found[3] else f"{values[found[1]]:0{int(found[3])}d}", self.text
        )
