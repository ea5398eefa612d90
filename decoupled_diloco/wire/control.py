"""The control stream (Attach): reports of a learner, instructions of the syncer, both directions.

On the syncer a report becomes an event of its machine and an effect becomes an instruction; on the learner
an instruction becomes an event of the learner's machine. The learner id and incarnation are those of the
stream, not of each message.
"""

from __future__ import annotations

import math
from typing import Final

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import events as ev
from decoupled_diloco.core import learner_events as lev
from decoupled_diloco.core.policy import Policy
from decoupled_diloco.v1 import syncer_pb2 as spb
from decoupled_diloco.wire.codec import (
    duration_from_wire,
    duration_to_wire,
    fragment_version_from_wire,
    fragment_version_to_wire,
    peers_to_wire,
    policy_to_wire,
    progress_from_wire,
    progress_to_wire,
    version_from_wire,
    version_to_wire,
)
from decoupled_diloco.wire.enums import CodecError, decline_from_wire, decline_to_wire

EVALUATION_FIGURES_MAX: Final = 16
"""Most named figures of one evaluation."""

APPLIED_MAX: Final = 100_000
"""Most versions in a Hello."""

Report = (
    ev.ProgressReported | ev.FragmentApplied | ev.ContributionDeclined | ev.EvaluationReported | ev.LeavingAnnounced
)

Instruction = (
    fx.AskContribution
    | fx.SendLastCall
    | fx.CloseRound
    | fx.PublishFragment
    | fx.AnnounceFragment
    | fx.AskInitialParameters
    | fx.RecoverLearner
    | fx.DrainLearner
    | fx.PauseLearner
    | fx.ResumeLearner
    | fx.FinishLearner
    | fx.ChangePolicy
)


# --- learner to syncer ---


def hello_to_wire(event: ev.LearnerAttached) -> spb.AttachRequest:
    """The first message of a stream."""
    return spb.AttachRequest(
        hello=spb.Hello(
            learner_id=event.learner,
            incarnation=event.incarnation,
            applied=[fragment_version_to_wire(fragment, version, 0, 0) for fragment, version in event.applied],
            progress=progress_to_wire(event.progress),
        )
    )


def hello_from_wire(message: spb.AttachRequest) -> ev.LearnerAttached:
    """The first message of a stream.

    Raises:
        CodecError: It is another message, or holds a value that is not allowed.
    """
    if message.WhichOneof("message") != "hello":
        raise CodecError(f"message = {message.WhichOneof('message')}: the first message on Attach must be hello")
    hello = message.hello
    if len(hello.applied) > APPLIED_MAX:
        raise CodecError(f"hello.applied holds {len(hello.applied)} versions: at most {APPLIED_MAX} are allowed")
    return ev.LearnerAttached(
        hello.learner_id,
        hello.incarnation,
        tuple((held.fragment, version_from_wire(held.version)) for held in hello.applied),
        progress_from_wire(hello.progress),
    )


def report_to_wire(report: Report) -> spb.AttachRequest:
    """A report; the learner and incarnation in it are left to the stream."""
    match report:
        case ev.ProgressReported(progress=progress):
            return spb.AttachRequest(progress=progress_to_wire(progress))
        case ev.FragmentApplied():
            return spb.AttachRequest(fragment_applied=_applied_to_wire(report))
        case ev.ContributionDeclined(round=round_number, reason=decline):
            declined = spb.ContributionDeclined(round=round_number, reason=decline_to_wire(decline))
            return spb.AttachRequest(contribution_declined=declined)
        case ev.EvaluationReported(global_step=global_step, figures=figures):
            evaluation = spb.Evaluation(global_step=global_step, figures=dict(figures))
            return spb.AttachRequest(evaluation=evaluation)
        case ev.LeavingAnnounced(reason=reason):
            return spb.AttachRequest(leaving=spb.Leaving(reason=reason))


def report_from_wire(message: spb.AttachRequest, learner: str, incarnation: int) -> Report | None:
    """A report, as the syncer's machine takes it; None for a kind that this release does not know.

    Raises:
        CodecError: A second hello, or a value that is not allowed.
    """
    match message.WhichOneof("message"):
        case "progress":
            return ev.ProgressReported(learner, incarnation, progress_from_wire(message.progress))
        case "fragment_applied":
            return _applied_from_wire(message.fragment_applied, learner, incarnation)
        case "contribution_declined":
            declined = message.contribution_declined
            return ev.ContributionDeclined(learner, incarnation, declined.round, decline_from_wire(declined.reason))
        case "evaluation":
            return _evaluation_from_wire(message.evaluation, learner, incarnation)
        case "leaving":
            return ev.LeavingAnnounced(learner, incarnation, message.leaving.reason)
        case "hello":
            raise CodecError("message = hello: only the first message on Attach may be one")
    return None


def _applied_to_wire(event: ev.FragmentApplied) -> spb.FragmentApplied:
    message = spb.FragmentApplied(
        fragment=event.fragment,
        version=version_to_wire(event.version),
        local_step=event.local_step,
        token_count=event.token_count,
        kept_token_count=event.kept_token_count,
    )
    if event.download_seconds is not None:
        message.download_duration.CopyFrom(duration_to_wire(event.download_seconds))
    return message


def _applied_from_wire(message: spb.FragmentApplied, learner: str, incarnation: int) -> ev.FragmentApplied:
    timed = message.HasField("download_duration")
    return ev.FragmentApplied(
        learner=learner,
        incarnation=incarnation,
        fragment=message.fragment,
        version=version_from_wire(message.version),
        local_step=message.local_step,
        token_count=message.token_count,
        kept_token_count=message.kept_token_count,
        download_seconds=max(0.0, duration_from_wire(message.download_duration)) if timed else None,
    )


def _evaluation_from_wire(message: spb.Evaluation, learner: str, incarnation: int) -> ev.EvaluationReported:
    if len(message.figures) > EVALUATION_FIGURES_MAX:
        raise CodecError(
            f"evaluation.figures holds {len(message.figures)} figures: at most {EVALUATION_FIGURES_MAX} are allowed"
        )
    figures = tuple(sorted((name, value) for name, value in message.figures.items() if math.isfinite(value)))
    return ev.EvaluationReported(learner, incarnation, message.global_step, figures)


# --- syncer to learner ---


def alive_to_wire(global_step: int, syncer_epoch: int) -> spb.AttachResponse:
    """Says that the stream lives, and which start of the syncer it is of."""
    return spb.AttachResponse(alive=spb.Alive(global_step=global_step, syncer_epoch=syncer_epoch))


def instruction_to_wire(effect: Instruction, value_count: int = 0) -> spb.AttachResponse:
    """An effect as the message that carries it out.

    Args:
        effect: What is to be said.
        value_count: Number of float32 values of the fragment, for effects that name a version.
    """
    match effect:
        case fx.AskContribution():
            return spb.AttachResponse(ask_contribution=_ask_to_wire(effect))
        case fx.SendLastCall(round=round_number):
            return spb.AttachResponse(last_call=spb.LastCall(round=round_number))
        case fx.CloseRound():
            return spb.AttachResponse(round_closed=_closed_to_wire(effect))
        case (
            fx.PublishFragment(fragment=fragment, version=version, global_step=global_step)
            | fx.AnnounceFragment(fragment=fragment, version=version, global_step=global_step)
        ):
            news = fragment_version_to_wire(fragment, version, global_step, value_count)
            return spb.AttachResponse(fragment_published=spb.FragmentPublished(version=news))
        case fx.AskInitialParameters():
            return spb.AttachResponse(ask_initial_parameters=spb.AskInitialParameters())
        case fx.RecoverLearner(reason=reason, peers=peers):
            return spb.AttachResponse(recover=spb.Recover(reason=reason, peers=peers_to_wire(peers)))
        case fx.DrainLearner(reason=reason, leave=leave):
            return spb.AttachResponse(drain=spb.Drain(reason=reason, leave=leave))
        case fx.PauseLearner(reason=reason):
            return spb.AttachResponse(pause=spb.Pause(reason=reason))
        case fx.ResumeLearner():
            return spb.AttachResponse(resume=spb.Resume())
        case fx.FinishLearner(reason=reason, global_step=global_step):
            return spb.AttachResponse(run_finished=spb.RunFinished(reason=reason, global_step=global_step))
        case fx.ChangePolicy(policy=policy):
            return policy_changed_to_wire(policy)


def policy_changed_to_wire(policy: Policy) -> spb.AttachResponse:
    """The values in force."""
    return spb.AttachResponse(policy_changed=spb.PolicyChanged(policy=policy_to_wire(policy)))


def instruction_from_wire(message: spb.AttachResponse) -> lev.LearnerEvent | None:
    """An instruction, as the learner's machine takes it.

    None for `policy_changed` (the machine's policy is its creator's), and for a kind that this
    release does not know.
    """
    match message.WhichOneof("message"):
        case "ask_contribution":
            return _ask_from_wire(message.ask_contribution)
        case "last_call":
            return lev.LastCalled(message.last_call.round)
        case "round_closed":
            return _closed_from_wire(message.round_closed)
        case "fragment_published":
            return fragment_version_from_wire(message.fragment_published.version)
        case "pause":
            return lev.PauseAsked(message.pause.reason)
        case "resume":
            return lev.ResumeAsked()
        case "drain":
            return lev.DrainAsked(message.drain.reason, message.drain.leave)
        case "recover":
            return lev.RecoverAsked(message.recover.reason)
        case "ask_initial_parameters":
            return lev.InitialAsked()
        case "alive":
            return lev.SyncerSeen(message.alive.syncer_epoch)
        case "run_finished":
            return lev.Ended(message.run_finished.reason, message.run_finished.global_step)
    return None


def _ask_to_wire(effect: fx.AskContribution) -> spb.AskContribution:
    return spb.AskContribution(
        round=effect.round,
        fragment=effect.fragment,
        base=version_to_wire(effect.base),
        global_step=effect.global_step,
        due_local_step=effect.due_local_step,
        pace_ratio=effect.pace_ratio,
        rounds_in_flight=effect.rounds_in_flight,
    )


def _ask_from_wire(message: spb.AskContribution) -> lev.Asked:
    return lev.Asked(
        round=message.round,
        fragment=message.fragment,
        base=version_from_wire(message.base),
        global_step=message.global_step,
        due_local_step=message.due_local_step,
        pace_ratio=message.pace_ratio,
        rounds_in_flight=message.rounds_in_flight,
    )


def _closed_to_wire(effect: fx.CloseRound) -> spb.RoundClosed:
    return spb.RoundClosed(
        round=effect.round,
        fragment=effect.fragment,
        outcome=spb.ROUND_OUTCOME_COMMITTED if effect.committed else spb.ROUND_OUTCOME_ABANDONED,
        members=effect.members,
        global_step=effect.global_step,
    )


def _closed_from_wire(message: spb.RoundClosed) -> lev.RoundEnded:
    return lev.RoundEnded(
        round=message.round,
        fragment=message.fragment,
        committed=message.outcome == spb.ROUND_OUTCOME_COMMITTED,
        members=tuple(message.members),
        global_step=message.global_step,
    )
