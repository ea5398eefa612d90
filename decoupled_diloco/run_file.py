"""Reading the run file: flags > environment > file > preset > default."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TypeVar

from decoupled_diloco.config import PRESET_FIELD, PROCESS_SECTIONS, RunConfig
from decoupled_diloco.runtime import failpoints
from decoupled_diloco.runtime.config import Presets, Resolved, resolve
from decoupled_diloco.runtime.config_layers import (
    Layer,
    assignment_layer,
    environment_layer,
    file_layer,
    table_layer,
)

ENVIRONMENT_PREFIX = "DECOUPLED_DILOCO_"
RUN_FILE_VARIABLE = "DECOUPLED_DILOCO_RUN_FILE"
"""Names the run file where the flag does not."""
ADMIN_ADDRESS_VARIABLE = "DECOUPLED_DILOCO_ADMIN_ADDRESS"
"""Where syncerctl finds the syncer's admin port."""
OTHER_VARIABLES = frozenset({RUN_FILE_VARIABLE, ADMIN_ADDRESS_VARIABLE, failpoints.VARIABLE})
"""Variables with `ENVIRONMENT_PREFIX` that are no settings of a run: all that syncerctl reads must be here, since one
environment serves all programs."""

_RunConfigT = TypeVar("_RunConfigT", bound=RunConfig)


def presets() -> Presets:
    """The presets that come with the package, from `presets/*.toml`."""
    folder = resources.files("decoupled_diloco") / "presets"
    return Presets(
        PRESET_FIELD,
        {
            item.name.removesuffix(".toml"): tomllib.loads(item.read_text(encoding="utf-8"))
            for item in folder.iterdir()
            if item.name.endswith(".toml")
        },
    )


def resolve_run(
    model: type[_RunConfigT],
    *,
    run_file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    assignments: Sequence[str] = (),
    flags: Layer | None = None,
) -> Resolved[_RunConfigT]:
    """Resolves a run file, with or without a process's own section, from all layers.

    Args:
        model: `RunConfig`, or a subclass with one more section of process settings.
        run_file: The TOML file; without one `RUN_FILE_VARIABLE` may name it.
        environ: Environment variables; only those with `ENVIRONMENT_PREFIX` are looked at.
        assignments: "section.key=value", as given with --set.
        flags: A layer above all others, for flags of their own.

    Raises:
        ConfigError: With all problems together.
    """
    environ = environ or {}
    foreign: Collection[str] = PROCESS_SECTIONS - model.model_fields.keys()
    if run_file is None and environ.get(RUN_FILE_VARIABLE):
        run_file = Path(environ[RUN_FILE_VARIABLE])
    layers = [
        file_layer(model, run_file, foreign) if run_file is not None else Layer(),
        environment_layer(model, environ, ENVIRONMENT_PREFIX, OTHER_VARIABLES, foreign),
        assignment_layer(model, assignments),
        flags or Layer(),
    ]
    return resolve(model, layers, presets())


def no_file_hint(resolved: Resolved[_RunConfigT]) -> str | None:
    """What to tell somebody who may have forgotten the run file; None if values of one are used."""
    if any(origin.startswith("file ") for origin in resolved.origins.values()):
        return None
    preset = resolved.value.run.preset
    return (
        f'no values from a run file are used: what is not set otherwise is that of preset "{preset}" and the defaults '
        f"(--print-config shows all); give --run-file FILE or set {RUN_FILE_VARIABLE}"
    )


def run_config(values: Mapping[str, object] | None = None, run_file: Path | None = None) -> RunConfig:
    """A run configuration from a program: a file, and nested values above it.

    Args:
        values: For example {"fragments": {"count": 4}}.
        run_file: The TOML file.

    Raises:
        ConfigError: With all problems together.
    """
    above = table_layer(RunConfig, values or {}, "the program")
    return resolve_run(RunConfig, run_file=run_file, flags=above).value
