"""Effects of the two machines in words, one line each."""

from __future__ import annotations

from decoupled_diloco.core import effects as fx
from decoupled_diloco.core import learner_effects as lfx
from decoupled_diloco.core.ids import Fate, Version


def seconds(value: float) -> str:
    return f"{value:.3f}".rstrip("0").rstrip(".")


def share(value: float) -> str:
    return f"{100 * value:.0f} %"


def versions(held: dict[int, Version]) -> str:
    return ", ".join(f"{fragment} at {version}" for fragment, version in sorted(held.items())) or "none"


def effect_words(effect: fx.Effect) -> str:
    """One effect of the syncer's machine."""
    match effect:
        case fx.Answer(value=value):
            return f"answer: {_answer_words(value)}"
        case fx.AskContribution():
            return (
                f"ask {effect.learner}: round {effect.round}, fragment {effect.fragment} from {effect.base}, "
                f"global step {effect.global_step}, due at local step {effect.due_local_step}"
            )
        case fx.SendLastCall(learner, _, number):
            return f"last call to {learner}: round {number}"
        case fx.AbortUpload(learner, _, number, reason):
            return f"abort upload of {learner} to round {number}: {reason}"
        case fx.StartMerge():
            total = sum(weight for _, _, weight in effect.contributions)
            parts = ", ".join(f"{learner} {share(weight / total)}" for learner, _, weight in effect.contributions)
            return f"merge round {effect.round} into fragment {effect.fragment} at {effect.base}: {parts}"
        case fx.CommitRound(round=number, fragment=fragment, version=version, global_step=step, reason=reason):
            names = ", ".join(effect.members)
            return f"commit round {number}: fragment {fragment} becomes {version}, t = {step}, of {names} ({reason})"
        case fx.CloseRound(number, _, committed, members, _, reason, _):
            return f"close round {number}: " + (f"committed, of {', '.join(members)}" if committed else reason)
        case fx.PublishFragment(fragment, version, step):
            return f"publish fragment {fragment} at {version}, {step} global steps made"
        case fx.AnnounceFragment(learner, _, fragment, version, step):
            return f"announce to {learner}: fragment {fragment} is at {version}, {step} global steps made"
        case fx.Note(name, text, level):
            return f"{level} {name}: {text}"
        case fx.EndRun(reason, step):
            return f"end the run at global step {step}: {reason}"
        case fx.ChangePolicy():
            return "change policy"
        case fx.RollBack(checkpoint, state):
            return f"roll back to {checkpoint}: {versions(dict(enumerate(state.versions)))}"
    return _to_one(effect)


def _to_one(effect: fx.Effect) -> str:
    match effect:
        case fx.AskInitialParameters(learner, incarnation):
            return f"ask {learner}/{incarnation} for the initial parameters"
        case fx.CommitInitialParameters(learner, incarnation):
            return f"commit the initial parameters of {learner}/{incarnation}"
        case fx.DiscardInitialParameters(learner, incarnation, reason):
            return f"discard the initial parameters of {learner}/{incarnation}: {reason}"
        case fx.RecoverLearner(learner, _, reason):
            return f"recover {learner}: {reason}"
        case fx.ExpireLearner(learner, incarnation, reason):
            return f"cut off {learner}/{incarnation}: {reason}"
        case fx.DrainLearner(learner, _, reason, leave):
            return f"drain {learner}{', then leave' if leave else ''}: {reason}"
        case fx.PauseLearner(learner, _, reason):
            return f"pause {learner}: {reason}"
        case fx.ResumeLearner(learner, _):
            return f"resume {learner}"
        case fx.FinishLearner(learner, _, reason, step):
            return f"finish {learner} at global step {step}: {reason}"
    raise AssertionError(effect)


def _answer_words(value: fx.Admitted | fx.Refusal | fx.Admission | Fate | None) -> str:
    match value:
        case fx.Admitted():
            held = versions({fragment: version for fragment, version, _ in value.versions})
            paused = ", paused" if value.paused else ""
            place = f"slot {value.slot}, cursor {value.cursor}" if value.slot >= 0 else "no data slot"
            return f"admitted as {value.learner}/{value.incarnation}, {place}, fragments: {held}{paused}"
        case fx.Refusal(reason, text):
            return f"refused, {reason}: {text}"
        case fx.Admission(fate, text, known):
            return f"{fate}{' (known already)' if known else ''}{f': {text}' if text else ''}"
        case None:
            return "done"
    return str(value)


def learner_effect_words(effect: lfx.LearnerEffect) -> str:
    """One effect of a learner's machine."""
    match effect:
        case lfx.Upload(number, copy):
            return f"upload to round {number}: {copy_words(copy)}"
        case lfx.DeclineRound(number, reason):
            return f"decline round {number}: {reason}"
        case lfx.Download(fragment, version, held):
            return f"download fragment {fragment} at {version}, holding {held or 'nothing'}"
        case lfx.CancelUpload(number):
            return f"cancel the upload to round {number}"
        case lfx.UploadInitialParameters():
            return "upload the initial parameters"
        case lfx.Leave(reason):
            return f"leave: {reason}"


def copy_words(copy: lfx.Copy) -> str:
    return (
        f"fragment {copy.fragment} from {copy.base}, copied at local step {copy.local_step}, "
        f"{copy.step_count} steps, {copy.token_count} tokens"
    )


def boundary_words(boundary: lfx.Boundary) -> list[str]:
    """What a learner does at a step boundary."""
    lines = ["restart the inner optimizer"] if boundary.restart_optimizer else []
    for apply in boundary.applies:
        since = f" since the copy at local step {apply.since.local_step}" if apply.since else ""
        kept = f", keeps {apply.kept_token_count} tokens{since}" if apply.kept_token_count else ""
        lines.append(f"{apply.rule} fragment {apply.fragment} with {apply.version}{kept}")
    uploaded = {upload.copy for upload in boundary.uploads}
    kept_copies = [str(copy.fragment) for copy in boundary.copies if copy not in uploaded]
    if kept_copies:
        lines.append(f"keep a copy of fragment {', '.join(kept_copies)}")
    lines += [learner_effect_words(upload) for upload in boundary.uploads]
    lines.append(f"schedule step {boundary.schedule_step}" + (f", hold: {boundary.hold}" if boundary.hold else ""))
    return lines
