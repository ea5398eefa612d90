"""The commands of syncerctl. Each has the same flags for the connection, and --json for programs.

Exit codes: 0 done; 2 the command line cannot be used; 3 no answer from the syncer; 4 the syncer refused.
"""

from __future__ import annotations

import enum
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from decoupled_diloco.core.errors import PeerError, UnreachableError
from decoupled_diloco.runtime.config import ConfigError, resolve
from decoupled_diloco.runtime.config_layers import table_layer
from syncerctl.admin_client import AdminClient, TransportError
from syncerctl.convert import convert_model
from syncerctl.screen import show_learners, show_rounds, show_status
from syncerctl.settings import ADDRESS_VARIABLE, DEFAULT_ADDRESS, ConnectionSettings


class ExitCode(enum.IntEnum):
    """How syncerctl ends."""

    OK = 0
    USAGE = 2
    UNREACHABLE = 3
    REFUSED = 4


class Out:
    """Where the answer goes: a screen, or JSON."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        self.console = Console(highlight=False, soft_wrap=True)

    def json(self, value: object) -> None:
        """Prints a value as JSON."""
        typer.echo(json.dumps(value, indent=2))


app = typer.Typer(
    name="syncerctl",
    help="Looks at a run and steers it, over the syncer's admin port.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_CONNECTION: Final[dict[str, tuple[object, object]]] = {
    "address": (
        Annotated[str, typer.Option("--address", envvar=ADDRESS_VARIABLE, help="The syncer's admin port.")],
        DEFAULT_ADDRESS,
    ),
    "timeout_seconds": (
        Annotated[float, typer.Option("--timeout-seconds", help="How long to wait for each answer.")],
        10.0,
    ),
    "tls_ca": (
        Annotated[
            Path | None,
            typer.Option(
                "--tls-ca", help="PEM file with the authorities that sign the syncer's certificate; turns TLS on."
            ),
        ],
        None,
    ),
    "tls_system_roots": (
        Annotated[bool, typer.Option("--tls-system-roots", help="Turns TLS on with the authorities of the system.")],
        False,
    ),
    "tls_certificate": (
        Annotated[Path | None, typer.Option("--tls-certificate", help="PEM file with the own certificate.")],
        None,
    ),
    "tls_key": (
        Annotated[Path | None, typer.Option("--tls-key", help="PEM file with the key of --tls-certificate.")],
        None,
    ),
    "tls_server_name": (
        Annotated[str, typer.Option("--tls-server-name", help="Name to expect in the syncer's certificate.")],
        "",
    ),
    "insecure": (
        Annotated[bool, typer.Option("--insecure", help="Allow plaintext to addresses that are not loopback.")],
        False,
    ),
    "json": (Annotated[bool, typer.Option("--json", help="Print JSON.")], False),
}
"""Flags of every command: type with its option, default."""


def command(run: Callable[..., None], group: typer.Typer = app, name: str = "") -> Callable[..., None]:
    """Registers a command, by its function's name or another one; it gets a client and `Out`, then its own arguments.

    The flags of `_CONNECTION` are added to its signature, which is where typer looks for them.
    """
    own = list(inspect.signature(run, eval_str=True).parameters.values())[2:]

    def wrapper(**values: Any) -> None:
        connection = {name: values.pop(name) for name in _CONNECTION}
        out = Out(connection.pop("json"))
        with reported(), AdminClient(_settings(connection)) as client:
            run(client, out, **values)

    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _CONNECTION.items()
    ]
    own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in own]
    wrapper.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in [*own, *shared]}
    wrapper.__doc__ = run.__doc__
    return group.command(name or run.__name__)(wrapper)


def _settings(connection: dict[str, Any]) -> ConnectionSettings:
    """Checks the flags.

    Raises:
        ConfigError: With all problems together.
    """
    given = {name: value for name, value in connection.items() if value not in (None, "", False)}
    return resolve(ConnectionSettings, [table_layer(ConnectionSettings, given, "command line")]).value


@contextmanager
def reported() -> Iterator[None]:
    """Turns what went wrong into one paragraph on standard error and an exit code."""
    try:
        yield
    except ConfigError as error:
        _fail(ExitCode.USAGE, "; ".join(error.problems))
    except TransportError as error:
        _fail(ExitCode.UNREACHABLE, str(error))
    except UnreachableError as error:
        _fail(
            ExitCode.UNREACHABLE,
            f"no answer from the syncer: {error.text} ({error.code}). Is it running, and is this its admin port? "
            f"Give --address HOST:PORT or set {ADDRESS_VARIABLE}",
        )
    except PeerError as error:
        _fail(ExitCode.REFUSED, error.explanation())


def _fail(code: ExitCode, text: str) -> None:
    typer.echo(f"syncerctl: {text}", err=True)
    raise typer.Exit(code)


@command
def status(client: AdminClient, out: Out) -> None:
    """What the run is doing, what it waits for, how it does."""
    run, learners = client.run(), client.learners()
    if out.as_json:
        out.json({"run": run, "learners": learners})
    else:
        show_status(out.console, run, learners)


@command
def learners(client: AdminClient, out: Out) -> None:
    """Every learner and observer, worst first."""
    found = client.learners()
    if out.as_json:
        out.json({"learners": found})
    else:
        show_learners(out.console, found)


@command
def rounds(
    client: AdminClient,
    out: Out,
    limit: Annotated[int, typer.Option("--limit", min=1, max=100_000, help="At most this many.")] = 20,
) -> None:
    """The newest rounds: who made it in, who did not, why."""
    found = client.rounds(limit)
    if out.as_json:
        out.json({"rounds": found})
    else:
        show_rounds(out.console, found)


Reason = Annotated[str, typer.Option("--reason", help="In words, for everybody who looks.")]


@command
def pause(client: AdminClient, out: Out, reason: Reason = "") -> None:
    """Stops steps and rounds until resume; leases go on."""
    _after(out, client.pause(reason))


@command
def resume(client: AdminClient, out: Out) -> None:
    """Goes on after a pause."""
    _after(out, client.resume())


@command
def finish(client: AdminClient, out: Out, reason: Reason = "") -> None:
    """Ends the run in good order: one last round of every fragment, export, goodbye."""
    _after(out, client.finish(reason), shows_warnings=True)


def _after(out: Out, run: dict[str, Any], shows_warnings: bool = False) -> None:
    if out.as_json:
        out.json({"run": run})
        return
    out.console.print(f"{run['run_id']} is {run['phase']}: {run['reason']}", markup=False)
    for warning in run["warnings"] if shows_warnings else ():
        out.console.print(f"warning: {warning}", markup=False)


@app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="A safetensors file, a folder of safetensors with its index, or an Orbax tree.")
    ],
    target: Annotated[str, typer.Argument(help="A file that ends in .safetensors, or the folder of a new Orbax tree.")],
    name_map: Annotated[
        str, typer.Option("--map", help="gemma, gemma1, llama, or a TOML file; without one all names stay.")
    ] = "",
    export: Annotated[bool, typer.Option("--export", help="Read the map backwards: from the run's names.")] = False,
    like: Annotated[str, typer.Option("--like", help="A model whose names and shapes are wanted.")] = "",
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
) -> None:
    """Turns a model into safetensors or an Orbax tree, with other names if wanted; talks to no syncer."""
    with reported():
        typer.echo(convert_model(source, target, name_map, export, dtype, like))
