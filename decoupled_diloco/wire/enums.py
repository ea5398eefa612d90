"""Enumerations of the protocol: the core's names to and from the numbers on the wire."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from decoupled_diloco.core.ids import Activity, Decline, Fate, Role
from decoupled_diloco.v1 import fragment_pb2 as fpb
from decoupled_diloco.v1 import syncer_pb2 as spb


class CodecError(ValueError):
    """A message holds a value that is not allowed; the text names field, value and what would be right."""


_ENCODINGS: Final[dict[str, fpb.Encoding]] = {
    "float32": fpb.ENCODING_FLOAT32,
    "bf16": fpb.ENCODING_BF16,
    "int8": fpb.ENCODING_INT8,
    "int4": fpb.ENCODING_INT4,
}
_ROLES: Final[dict[Role, spb.Role]] = {role: getattr(spb, f"ROLE_{role.name}") for role in Role}
_ACTIVITIES: Final[dict[Activity, spb.Activity]] = {
    activity: getattr(spb, f"ACTIVITY_{activity.name}") for activity in Activity if activity is not Activity.LOST
}
_FATES: Final[dict[Fate, spb.ContributionFate]] = {
    fate: getattr(spb, f"CONTRIBUTION_FATE_{fate.name}") for fate in Fate
}
_DECLINES: Final[dict[Decline, spb.DeclineReason]] = {
    reason: getattr(spb, f"DECLINE_REASON_{reason.name}") for reason in Decline
}
_RULES: Final[dict[str, fpb.MergeRule]] = {"rda": fpb.MERGE_RULE_RDA, "avg": fpb.MERGE_RULE_AVG}

_ENCODING_NAMES: Final[dict[int, str]] = {number: name for name, number in _ENCODINGS.items()}
_ROLE_NUMBERS: Final[dict[int, Role]] = {number: role for role, number in _ROLES.items()}
_ACTIVITY_NUMBERS: Final[dict[int, Activity]] = {number: activity for activity, number in _ACTIVITIES.items()}
_FATE_NUMBERS: Final[dict[int, Fate]] = {number: fate for fate, number in _FATES.items()}
_DECLINE_NUMBERS: Final[dict[int, Decline]] = {number: reason for reason, number in _DECLINES.items()}
_RULE_NAMES: Final[dict[int, str]] = {number: name for name, number in _RULES.items()}


def encoding_to_wire(name: str) -> fpb.Encoding:
    """The number of an encoding of `arrays.encoding`."""
    return _ENCODINGS[name]


def encoding_from_wire(number: int, field: str = "encoding") -> str:
    """The name of an encoding.

    Raises:
        CodecError: This release does not know the encoding.
    """
    if number not in _ENCODING_NAMES:
        raise CodecError(f"{field} = {number}: this release knows {_choices(_ENCODING_NAMES)}")
    return _ENCODING_NAMES[number]


def known_encodings(numbers: Iterable[int]) -> frozenset[str]:
    """The names of those encodings that this release knows too."""
    return frozenset(_ENCODING_NAMES[number] for number in numbers if number in _ENCODING_NAMES)


def role_to_wire(role: Role) -> spb.Role:
    """The number of a role."""
    return _ROLES[role]


def role_from_wire(number: int) -> Role:
    """A role.

    Raises:
        CodecError: Neither a learner nor an observer.
    """
    if number not in _ROLE_NUMBERS:
        raise CodecError(f"role = {number}: must be one of {_choices(_ROLE_NUMBERS)}")
    return _ROLE_NUMBERS[number]


def activity_to_wire(activity: Activity) -> spb.Activity:
    """The number of an activity; LOST is the syncer's own and has none."""
    return _ACTIVITIES[activity]


def activity_from_wire(number: int) -> Activity:
    """An activity that a learner may report.

    Raises:
        CodecError: Not such an activity.
    """
    if number not in _ACTIVITY_NUMBERS:
        raise CodecError(f"activity = {number}: must be one of {_choices(_ACTIVITY_NUMBERS)}")
    return _ACTIVITY_NUMBERS[number]


def fate_to_wire(fate: Fate) -> spb.ContributionFate:
    """The number of a fate."""
    return _FATES[fate]


def fate_from_wire(number: int) -> Fate:
    """A fate. One that this release does not know counts as ABORTED: not merged, and may be sent again."""
    return _FATE_NUMBERS.get(number, Fate.ABORTED)


def decline_to_wire(reason: Decline) -> spb.DeclineReason:
    """The number of a reason to decline."""
    return _DECLINES[reason]


def decline_from_wire(number: int) -> Decline:
    """A reason to decline; an unknown one is as good as having no copy."""
    return _DECLINE_NUMBERS.get(number, Decline.NO_COPY)


def merge_rule_to_wire(rule: str) -> fpb.MergeRule:
    """The number of a merge rule of `arrays.schema`."""
    return _RULES[rule]


def merge_rule_from_wire(number: int, field: str) -> str:
    """The name of a merge rule.

    Raises:
        CodecError: This release does not know the rule.
    """
    if number not in _RULE_NAMES:
        raise CodecError(f"{field} = {number}: this release knows {_choices(_RULE_NAMES)}")
    return _RULE_NAMES[number]


def _choices(known: Mapping[int, str]) -> str:
    return ", ".join(f"{number} ({name})" for number, name in sorted(known.items()))
