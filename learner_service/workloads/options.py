"""Options of a workload: the run file's free table, checked against a declared model."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from learner_service.workload import WorkloadError


class Options(BaseModel):
    """Base of a workload's options: unknown keys are errors, and a value has to have its field's type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


Declared = TypeVar("Declared", bound=Options)


def parse_options(kind: type[Declared], options: Mapping[str, object], workload: str) -> Declared:
    """Checks a table of options.

    Args:
        kind: which options there are.
        options: the table, `[workload] options` of the run file.
        workload: its owner in words, for the message.

    Raises:
        WorkloadError: unknown keys, values of the wrong type or out of range, or values that contradict each other; one
            paragraph that names all of them.
    """
    try:
        return kind.model_validate(dict(options))
    except ValidationError as error:
        problems = [
            _problem(".".join(map(str, entry["loc"])), entry["type"], entry["msg"], entry["input"], kind, workload)
            for entry in error.errors()
        ]
        raise WorkloadError(" ".join(problems)) from None


def _problem(key: str, code: str, words: str, value: object, kind: type[Options], workload: str) -> str:
    """One thing that is wrong, as a sentence."""
    if code == "extra_forbidden":
        known = list(kind.model_fields)
        near = difflib.get_close_matches(key, known, n=1)
        meant = f"did you mean {near[0]!r}? It" if near else "it"
        return f"workload.options.{key} is not an option of {workload}; {meant} has {', '.join(known)}."
    if not key:
        return f"workload.options: {words.removeprefix('Value error, ')}."
    return f"workload.options.{key} = {value!r}: {words[0].lower()}{words[1:]}."
