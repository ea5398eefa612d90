"""The command line of every service: a run file, flags from its own settings, validate, --print-config.

A service's `__main__` stays a single call: `return run_program(PROGRAM, sys.argv[1:], os.environ, serve)`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Generic, TextIO, TypeVar

from pydantic import BaseModel

from decoupled_diloco.config import PRESET_FIELD, RunConfig
from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.run_file import RUN_FILE_VARIABLE, resolve_run
from decoupled_diloco.runtime.config import ConfigError, Resolved, with_origins
from decoupled_diloco.runtime.config_fields import (
    FieldEntry,
    expectation,
    is_free_table,
    leaf_fields,
)
from decoupled_diloco.runtime.config_layers import Layer, Setting
from decoupled_diloco.runtime.config_print import print_config
from decoupled_diloco.runtime.lifecycle import ExitCode

DocumentT = TypeVar("DocumentT", bound=RunConfig)

_FLAG_PREFIX = "setting:"


@dataclass(frozen=True, slots=True)
class Program(Generic[DocumentT]):
    """One executable.

    Attributes:
        name: As it is called, for example "decoupled-diloco-syncer".
        summary: What it does, one sentence.
        document: The run file with the process's own section.
        section: Name of that section; each of its fields becomes a flag.
    """

    name: str
    summary: str
    document: type[DocumentT]
    section: str

    def own_fields(self) -> Iterator[FieldEntry]:
        """The process settings that have a flag of their own; free tables are set with --set."""
        for entry in leaf_fields(self.document):
            if entry.path[0] == self.section and not is_free_table(entry.annotation):
                yield entry


def build_parser(program: Program[DocumentT]) -> argparse.ArgumentParser:
    """The parser of a program's command line."""
    parser = argparse.ArgumentParser(
        prog=program.name,
        description=program.summary,
        epilog="Settings come from flags, then the environment (DECOUPLED_DILOCO_SECTION__KEY), then the run file, "
        "then the preset, then the defaults.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "command",
        nargs="?",
        choices=("run", "validate"),
        default="run",
        help="run: do the work (default). validate: check all settings and stop.",
    )
    parser.add_argument("--version", action="version", version=f"{program.name} {software_version()}")
    parser.add_argument(
        "--run-file",
        type=Path,
        metavar="FILE",
        help=f"TOML file with what all processes of the run agree on (else {RUN_FILE_VARIABLE} names it)",
    )
    parser.add_argument("--preset", metavar="NAME", help="set of values below the run file: small or paper")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="set any setting; may be repeated",
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all settings with the origin of each as TOML, and stop",
    )
    group = parser.add_argument_group(f"settings of this process, also [{program.section}] in the run file")
    for entry in program.own_fields():
        _add_flag(group, entry)
    return parser


def _add_flag(group: argparse._ArgumentGroup, entry: FieldEntry) -> None:
    name = "--" + entry.path[-1].replace("_", "-")
    text = (entry.info.description or "").replace("%", "%%")
    destination = _FLAG_PREFIX + ".".join(entry.path)
    if entry.annotation is bool:
        group.add_argument(name, dest=destination, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        accepts = expectation(entry.info).replace("%", "%%")
        group.add_argument(name, dest=destination, metavar="VALUE", help=f"{text} Accepts {accepts}.")


def load(program: Program[DocumentT], options: argparse.Namespace, environ: Mapping[str, str]) -> Resolved[DocumentT]:
    """Resolves all settings.

    Args:
        program: The program.
        options: What `build_parser(program)` parsed.
        environ: The environment.

    Raises:
        ConfigError: With all problems together.
    """
    flags = []
    if options.preset is not None:
        flags.append(Setting(PRESET_FIELD, options.preset, "flag --preset"))
    for destination, value in vars(options).items():
        if destination.startswith(_FLAG_PREFIX) and value is not None:
            path = tuple(destination.removeprefix(_FLAG_PREFIX).split("."))
            name = "--" + path[-1].replace("_", "-")
            origin = f"flag {'--no' + name[1:] if value is False else name}"
            flags.append(Setting(path, value, origin, is_text=isinstance(value, str)))
    return resolve_run(
        program.document,
        run_file=options.run_file,
        environ=environ,
        assignments=options.set,
        flags=Layer(tuple(flags)),
    )


def run_program(
    program: Program[DocumentT],
    arguments: Sequence[str],
    environ: Mapping[str, str],
    serve: Callable[[Resolved[DocumentT]], int],
    *,
    operator_errors: tuple[type[Exception], ...] = (),
    out: TextIO | None = None,
    err: TextIO | None = None,
) -> int:
    """Parses, resolves, and validates, prints, or serves.

    What the operator or the other side did wrong ends as one paragraph on `err`, without a traceback.

    Args:
        program: The program.
        arguments: Without the program's name.
        environ: The environment.
        serve: Does the work with the settings; returns the exit code. May raise ConfigError, PeerError and
            UnreachableError.
        operator_errors: Further exceptions of `serve` whose text tells the operator what to change; the exit code is
            their attribute `exit_code`, or 2.
        out: Where to print; default standard output.
        err: Where to complain; default standard error.

    Returns:
        The exit code, see `ExitCode`.
    """
    out, err = out or sys.stdout, err or sys.stderr
    options = build_parser(program).parse_args(list(arguments))
    try:
        resolved = load(program, options, environ)
        if options.print_config or options.command == "validate":
            for warning in resolved.warnings:
                print(f"{program.name}: warning: {warning}", file=err)
            print(_answer(options.print_config, resolved), file=out, end="")
            return ExitCode.OK
        try:
            return serve(resolved)
        except ConfigError as error:
            raise with_origins(error, resolved) from error
    except ConfigError as error:
        print(error_text(program.name, error), file=err)
        return ExitCode.CONFIG
    except operator_errors as error:
        print(f"{program.name}: {error}", file=err)
        return int(getattr(error, "exit_code", ExitCode.CONFIG))
    except PeerError as error:
        print(f"{program.name}: {error.explanation()}", file=err)
        return ExitCode.REFUSED
    except UnreachableError as error:
        print(f"{program.name}: {error.text} [{error.code}]", file=err)
        return ExitCode.DETACHED


def _answer(wants_print: bool, resolved: Resolved[DocumentT]) -> str:
    document: BaseModel = resolved.value
    if wants_print:
        return print_config(Resolved(document, resolved.origins, resolved.warnings), "Settings as resolved")
    return (
        f"The settings are valid. Digest of what all processes must agree on: {resolved.value.digest()}\n"
        "The workload was not loaded; whether it can be shows when a learner starts, or with "
        "`decoupled-diloco-learner warm`.\n"
    )


def error_text(program_name: str, error: ConfigError) -> str:
    """A configuration error as one paragraph."""
    if len(error.problems) == 1:
        return f"{program_name}: {error.problems[0]}"
    lines = "\n".join(f"  - {problem}" for problem in error.problems)
    return f"{program_name}: {len(error.problems)} settings cannot be used:\n{lines}"


def software_version() -> str:
    """The installed release of the distribution, or "0+source" where it runs without being installed."""
    try:
        return metadata.version("decoupled-diloco")
    except metadata.PackageNotFoundError:
        return "0+source"
