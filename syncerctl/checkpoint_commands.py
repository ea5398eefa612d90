"""Commands that keep a run and take it back: `syncerctl checkpoint ...`, `rollback` and `export`."""

from __future__ import annotations

from typing import Annotated

import typer

from syncerctl.admin_client import AdminClient
from syncerctl.commands import Out, Reason, app, command
from syncerctl.screen import show_checkpoint, show_checkpoints

Checkpoint = Annotated[str, typer.Argument(help="The checkpoint's id; `syncerctl checkpoint list` shows them.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]

group = typer.Typer(help="Checkpoints: restore points of the run.", no_args_is_help=True)
app.add_typer(group, name="checkpoint")


def create(
    client: AdminClient,
    out: Out,
    checkpoint: Annotated[str, typer.Argument(help="Its id; without one it says where the run stands.")] = "",
    reason: Reason = "",
) -> None:
    """Keeps the run as it is now, while it goes on; returns when it can be rolled back to."""
    made = client.create_checkpoint(checkpoint, reason)
    if out.as_json:
        out.json({"checkpoint": made})
    else:
        show_checkpoint(out.console, made)


def list_all(client: AdminClient, out: Out) -> None:
    """All checkpoints, newest first."""
    found, unreadable = client.checkpoints()
    if out.as_json:
        out.json({"checkpoints": found, "unreadable": unreadable})
    else:
        show_checkpoints(out.console, found, unreadable)


def show(client: AdminClient, out: Out, checkpoint: Checkpoint) -> None:
    """One checkpoint with its versions."""
    found = client.checkpoint(checkpoint)
    if out.as_json:
        out.json({"checkpoint": found})
    else:
        show_checkpoint(out.console, found)


def delete(client: AdminClient, out: Out, checkpoint: Checkpoint, yes: Yes = False) -> None:
    """Removes a checkpoint for good."""
    if not yes:
        typer.confirm(f"Delete checkpoint {checkpoint} for good?", abort=True, err=True)
    client.delete_checkpoint(checkpoint)
    if out.as_json:
        out.json({"checkpoint_id": checkpoint, "done": "deleted"})
    else:
        out.console.print(f"{checkpoint} is deleted", markup=False)


command(create, group)
command(list_all, group, "list")
command(show, group)
command(delete, group)


@command
def rollback(client: AdminClient, out: Out, checkpoint: Checkpoint, reason: Reason = "", yes: Yes = False) -> None:
    """Has the run go on from a checkpoint; all that was committed since is discarded. Learners join again."""
    if not yes:
        now, then = client.run(), client.checkpoint(checkpoint)
        typer.confirm(
            f"Roll {now['run_id']} back from global step {now['global_step']} to {then['global_step']} "
            f"(checkpoint {checkpoint} of {then['created_at']})? What was committed since is discarded",
            abort=True,
            err=True,
        )
    run = client.roll_back(checkpoint, reason)
    if out.as_json:
        out.json({"run": run})
    else:
        out.console.print(f"{run['run_id']} goes on from {checkpoint}: global step {run['global_step']}", markup=False)


@command
def export(
    client: AdminClient,
    out: Out,
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint's id; without one the model of now.")] = "",
) -> None:
    """Has the model written into the syncer's output directory, as safetensors; the run goes on."""
    written = client.export(checkpoint)
    if out.as_json:
        out.json(written)
    else:
        out.console.print(f"{written['path']} ({written['size_bytes']:,} bytes, step {written['global_step']})")
