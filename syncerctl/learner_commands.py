"""Commands that take learners off a run and let them back in."""

from __future__ import annotations

from typing import Annotated

import typer

from syncerctl.admin_client import AdminClient
from syncerctl.commands import Out, Reason, command

Learner = Annotated[str, typer.Argument(help="The learner's id.")]


@command
def drain(client: AdminClient, out: Out, learner: Learner, reason: Reason = "") -> None:
    """Lets a learner leave in good order: it answers one more round of every fragment, then goes."""
    found = client.drain(learner, reason)
    if out.as_json:
        out.json({"learner": found})
    else:
        out.console.print(f"{learner} is {found['state']}: {found['reason']}", markup=False)


@command
def evict(
    client: AdminClient,
    out: Out,
    learner: Learner,
    reason: Reason = "",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Puts a learner out at once and keeps it out until readmit; its steps since its last merge are lost."""
    if not yes:
        typer.confirm(f"Evict {learner}? Its steps since its last merged contribution are lost", abort=True, err=True)
    client.evict(learner, reason)
    _said(out, learner, "evicted")


@command
def readmit(client: AdminClient, out: Out, learner: Learner) -> None:
    """Lets an evicted learner join again."""
    client.readmit(learner)
    _said(out, learner, "readmitted")


def _said(out: Out, learner: str, what: str) -> None:
    if out.as_json:
        out.json({"learner_id": learner, "done": what})
    else:
        out.console.print(f"{learner} is {what}", markup=False)
