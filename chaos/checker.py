"""What must hold of every run, whatever was done to it. Each rule takes the evidence and names what breaks it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from chaos.accounting import steps_accounted
from chaos.evidence import Evidence, Incarnation, Pause
from decoupled_diloco.core.ids import Version

BOUNDARY_SECONDS_MAX: Final = 1.0
"""A boundary that takes longer has waited for something: its own work is milliseconds, on busy processors tenths."""

HOLDS_THAT_WAIT_FOR_THE_NETWORK: Final = {"barrier", "detached"}
"""Holds that no run without a barrier may have: a learner that is cut off trains on."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A rule that does not hold, and where."""

    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.text}"


def merged_once(evidence: Evidence) -> Iterator[str]:
    """No contribution is in two rounds, and no batch of data is merged into one fragment twice."""
    seen: dict[tuple[str, int, int], int] = {}
    spans: defaultdict[tuple[int, int], list[tuple[int, int, str]]] = defaultdict(list)
    for row in evidence.ledger.kept_rounds():
        members = [(c.learner, c.incarnation) for c in row.contributions]
        if len(set(members)) != len(members):
            yield f"round {row.round} has a member twice: {members}"
        for c in row.contributions:
            before = seen.setdefault((c.learner, c.incarnation, row.round), row.version.number)
            if before != row.version.number:
                yield f"{c.learner} (incarnation {c.incarnation}) was merged twice for round {row.round}"
            name = f"{c.learner}/{c.incarnation} in round {row.round}"
            spans[c.slot, row.fragment].append((c.cursor - c.step_count, c.cursor, name))
    for (slot, fragment), listed in spans.items():
        listed.sort()
        for (_, end, first), (start, _, second) in pairwise(listed):
            if start < end:
                yield (
                    f"batches {start} to {end} of slot {slot} were merged into fragment {fragment} twice: "
                    f"{first} and {second}"
                )


def versions_grow(evidence: Evidence) -> Iterator[str]:
    """Within a fragment no name is used twice, and neither syncer nor learner goes back, but into a new timeline."""
    for fragment, versions in enumerate(evidence.ledger.versions):
        for before, after in pairwise(versions):
            if after.timeline < before.timeline or (
                after.timeline == before.timeline and after.number <= before.number
            ):
                yield f"fragment {fragment}: version {after} came after {before}"
    newest: dict[tuple[str, int], Version] = {}
    for incarnation in evidence.incarnations:
        for applied in incarnation.applied:
            key = incarnation.learner, applied.fragment
            before_it = newest.get(key)
            if before_it is not None and (applied.version.timeline, applied.version.number) < (
                before_it.timeline,
                before_it.number,
            ):
                yield f"{incarnation.learner} went back from {before_it} to {applied.version} of fragment {key[1]}"
            newest[key] = applied.version


def digests_agree(evidence: Evidence) -> Iterator[str]:
    """Every version has the same values wherever it is, and no learner holds one that the syncer does not know."""
    known = {
        (fragment, version.timeline, version.number): version.digest
        for fragment, versions in enumerate(evidence.ledger.versions)
        for version in versions
    }
    for incarnation in evidence.incarnations:
        for applied in incarnation.applied:
            fragment, version = applied.fragment, applied.version
            where = f"{incarnation.learner}/{incarnation.number}, fragment {fragment}, version {version}"
            if applied.digest != version.digest:
                yield f"{where}: its values have the digest {applied.digest}, its name {version.digest}"
            digest = known.get((fragment, version.timeline, version.number))
            if digest is None:
                yield f"{where}: the syncer does not know it"
            elif digest != version.digest:
                yield f"{where}: {version.digest} there, {digest} at the syncer"


def quorum_held(evidence: Evidence) -> Iterator[str]:
    """No round was merged with fewer contributions than the policy asks for."""
    policy = evidence.ledger.policy
    if policy.below_quorum == "degrade":
        return
    for row in evidence.ledger.rounds:
        if len(row.contributions) < policy.quorum_minimum:
            yield f"round {row.round} has {len(row.contributions)} of {policy.quorum_minimum} members ({row.reason})"


def devices_ran(evidence: Evidence) -> Iterator[str]:
    """No device thread waited for the network, but to begin and to start over."""
    for incarnation in evidence.incarnations:
        if incarnation.is_synchronous:
            continue
        for pause in incarnation.boundaries:
            if pause.seconds > BOUNDARY_SECONDS_MAX and not _was_disturbed(evidence, incarnation, pause):
                yield f"{_who(incarnation)} spent {pause.seconds:.2f} s between two steps (hold: {pause.hold})"
        for pause in incarnation.waits:
            if pause.hold in HOLDS_THAT_WAIT_FOR_THE_NETWORK:
                yield f"{_who(incarnation)} waited {pause.seconds:.2f} s: {pause.hold}"


def _was_disturbed(evidence: Evidence, incarnation: Incarnation, pause: Pause) -> bool:
    began = pause.t - pause.seconds
    return any(
        learner == incarnation.learner and began < until and since < pause.t
        for learner, since, until in evidence.disturbed
    )


def _who(incarnation: Incarnation) -> str:
    return f"{incarnation.learner}/{incarnation.number}"


RULES: Final[dict[str, Callable[[Evidence], Iterable[str]]]] = {
    "merged once": merged_once,
    "every step accounted for": steps_accounted,
    "versions grow": versions_grow,
    "digests agree": digests_agree,
    "quorum held": quorum_held,
    "devices ran": devices_ran,
}
"""The rules that look at evidence alone; whether the run heals and its processes live is seen while it runs."""


def check(evidence: Evidence) -> list[Violation]:
    """All violations."""
    return [Violation(name, text) for name, rule in RULES.items() for text in rule(evidence)]
