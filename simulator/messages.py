"""From the syncer's effects to a learner's events: what the wire does in production."""

from __future__ import annotations

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import learner_events as lev


def event_for_learner(effect: fx.Effect) -> lev.LearnerEvent | None:
    """What a learner's machine hears of an effect of the syncer's; None if nothing."""
    match effect:
        case fx.AskContribution():
            return lev.Asked(
                effect.round,
                effect.fragment,
                effect.base,
                effect.global_step,
                effect.due_local_step,
                effect.pace_ratio,
                effect.rounds_in_flight,
            )
        case fx.SendLastCall(round=number):
            return lev.LastCalled(number)
        case fx.AnnounceFragment(fragment=fragment, version=version, global_step=step):
            return lev.Published(fragment, version, step)
        case fx.PublishFragment(fragment, version, step):
            return lev.Published(fragment, version, step)
        case fx.CloseRound(round=number, fragment=fragment, committed=committed, members=members, global_step=step):
            return lev.RoundEnded(number, fragment, committed, members, step)
        case fx.AskInitialParameters():
            return lev.InitialAsked()
        case fx.RecoverLearner(reason=reason):
            return lev.RecoverAsked(reason)
        case fx.DrainLearner(reason=reason, leave=leave):
            return lev.DrainAsked(reason, leave)
        case fx.PauseLearner(reason=reason):
            return lev.PauseAsked(reason)
        case fx.ResumeLearner():
            return lev.ResumeAsked()
        case fx.FinishLearner(reason=reason, global_step=step):
            return lev.Ended(reason, step)
    return None
