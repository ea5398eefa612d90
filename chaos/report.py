"""What remains of a chaos run: summary.json, and a few lines for people."""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chaos.accounting import merged_tokens
from chaos.checker import RULES
from chaos.inject import Done
from chaos.run import Outcome
from chaos.schedule import SYNCER
from chaos.watch import recovery

RULES_OF_THE_RUN = (
    "loss within the lag",
    "heals",
    "ends in order",
    "processes live",
    "no faults logged",
    "tape replays",
)
NOTE = (
    "Seconds are from outside, by looking every 0.2 s at a run on shared cores. detect: until the syncer no longer "
    "counted on a learner. next_commit: from the fault to the next committed round. back: from the new start or the "
    "healing to the victim's next merged contribution (of a syncer: to the next committed round). What the next fault "
    "of the same victim or of the syncer came in between of is left out."
)


def summarise(outcome: Outcome) -> dict[str, Any]:
    """All figures of one run."""
    faults: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for done in outcome.injector.done:
        if done.began_at is not None:
            faults[done.fault.kind] += 1
        else:
            notes[f"{done.fault.kind}: {done.note}"] += 1
    rules = dict.fromkeys((*RULES, *RULES_OF_THE_RUN), 0)
    for violation in outcome.violations:
        rules[violation.rule] = rules.get(violation.rule, 0) + 1
    newest = outcome.samples[-1] if outcome.samples else None
    return {
        "note": NOTE,
        "seed": outcome.plan.seed,
        "quorum": outcome.plan.quorum,
        "learners": list(outcome.plan.learners),
        "seconds": round(outcome.ended_at - outcome.began_at, 1),
        "faults": dict(sorted(faults.items())),
        "faults_that_were_not_done": dict(sorted(notes.items())),
        "violation_count": len(outcome.violations),
        "violations_by_rule": rules,
        "violations": [str(violation) for violation in outcome.violations],
        "recovery_seconds": _recoveries(outcome),
        "heal_seconds": outcome.heal_seconds,
        "rounds_committed": newest.committed_count if newest else 0,
        "figures": newest.figures if newest else {},
        "tokens": _tokens(outcome),
        "device_threads": _device_threads(outcome),
        "notes": outcome.notes,
    }


def _recoveries(outcome: Outcome) -> dict[str, dict[str, dict[str, float]]]:
    """By kind of fault and figure: count, median, worst."""
    found: defaultdict[str, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for done in outcome.injector.done:
        if done.began_at is None:
            continue
        until = _next_trouble(outcome, done)
        seen = [sample for sample in outcome.samples if sample.t < until]
        times = recovery(seen, done.fault.victim, done.began_at, done.ended_at)
        for name in ("detect", "next_commit", "back"):
            if (seconds := getattr(times, name)) is not None:
                found[done.fault.kind][name].append(seconds)
    return {
        kind: {
            name: {"count": len(values), "median": round(statistics.median(values), 2), "worst": round(max(values), 2)}
            for name, values in by_name.items()
        }
        for kind, by_name in sorted(found.items())
    }


def _next_trouble(outcome: Outcome, done: Done) -> float:
    """When the next fault of the same victim or of the syncer began: what comes after it says nothing of this one."""
    assert done.began_at is not None
    later = (
        other.began_at
        for other in outcome.injector.done
        if other.began_at is not None
        and other.began_at > done.began_at
        and other.fault.victim in (done.fault.victim, SYNCER)
    )
    return min(later, default=float("inf"))


def _tokens(outcome: Outcome) -> dict[str, Any]:
    """What became of every step, weighted by nothing: tokens by fragment, summed."""
    evidence = outcome.evidence
    sums = evidence.ledger.state.ledger
    return {
        "made_by_journals": sum(incarnation.total_tokens for incarnation in evidence.incarnations),
        "processed": sums.tokens_processed,
        "merged_by_fragment": sums.merged_tokens,
        "merged_by_fragment_from_rounds": merged_tokens(evidence.ledger),
        "discarded_by_cause_and_fragment": sums.discarded_tokens,
    }


def _device_threads(outcome: Outcome) -> dict[str, float]:
    pauses = [pause.seconds for i in outcome.evidence.incarnations for pause in i.boundaries]
    waits = [pause.seconds for i in outcome.evidence.incarnations for pause in i.waits if pause.hold != "recovering"]
    return {
        "boundaries": len(pauses),
        "median_seconds": round(statistics.median(pauses), 5) if pauses else 0.0,
        "longest_seconds": round(max(pauses, default=0.0), 3),
        "waited_seconds": round(sum(waits), 3),
    }


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def total(summaries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of several runs together, with each of them below."""
    faults: Counter[str] = Counter()
    rules: Counter[str] = Counter()
    for summary in summaries:
        faults.update(summary["faults"])
        rules.update(summary["violations_by_rule"])
    back = {
        kind: max(s["recovery_seconds"][kind]["back"]["worst"] for s in summaries if _has_back(s, kind))
        for kind in sorted(faults)
        if any(_has_back(s, kind) for s in summaries)
    }
    return {
        "seeds": [summary["seed"] for summary in summaries],
        "faults": dict(sorted(faults.items())),
        "violation_count": sum(summary["violation_count"] for summary in summaries),
        "violations_by_rule": dict(rules),
        "longest_seconds_until_back": back,
        "rounds_committed": sum(summary["rounds_committed"] for summary in summaries),
        "runs": list(summaries),
    }


def _has_back(summary: dict[str, Any], kind: str) -> bool:
    return "back" in summary["recovery_seconds"].get(kind, {})


def total_lines(whole: dict[str, Any]) -> list[str]:
    """The verdict on several runs, for people."""
    return [
        f"seeds {', '.join(map(str, whole['seeds']))}: {whole['rounds_committed']} rounds",
        f"faults: {', '.join(f'{count} {kind}' for kind, count in whole['faults'].items())}",
        f"{whole['violation_count']} violations in all",
    ]


def lines(summary: dict[str, Any]) -> list[str]:
    """The verdict for people."""
    figures, text = summary["figures"], []
    text.append(f"faults: {', '.join(f'{count} {kind}' for kind, count in summary['faults'].items())}")
    text.append(
        f"{summary['rounds_committed']} rounds in {summary['seconds']:.0f} s; "
        + ", ".join(f"{name} {figures[name]:.1%}" for name in ("goodput", "token_goodput", "participation", "uptime"))
        if figures
        else "nothing was seen of the run"
    )
    for kind, times in summary["recovery_seconds"].items():
        shown = ", ".join(f"{name} {t['median']:.1f} (worst {t['worst']:.1f})" for name, t in times.items())
        text.append(f"  {kind:<16} seconds: {shown}")
    text += [f"VIOLATION {violation}" for violation in summary["violations"][:20]]
    text.append(f"{summary['violation_count']} violations")
    return text
