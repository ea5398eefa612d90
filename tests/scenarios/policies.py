"""Policies from the short names that scenarios use."""

from __future__ import annotations

from dataclasses import fields

from decoupled_diloco.core.policy import Deadlines, Policy

SHORT = {
    "P": "fragment_count",
    "H": "interval_steps",
    "tau": "overlap_steps",
    "K": "quorum_minimum",
    "gamma": "grace_share",
    "cap": "grace_cap_steps",
    "total": "total_steps",
    "apply": "apply_rule",
    "alpha": "blend_alpha",
    "outlier": "norm_outlier_factor",
}
DEADLINES = {field.name for field in fields(Deadlines)}
SHORT_DEADLINES = {"lease": "lease_seconds", "stall": "stall_seconds"}
SMALL = {"fragment_count": 2, "interval_steps": 4, "overlap_steps": 1}
"""P = 2, H = 4, tau = 1 unless a scenario says otherwise: small enough to follow on paper."""


def policy_of(options: dict[str, str]) -> Policy:
    """A policy from options such as {"P": "2", "lease": "10", "last_call": "off"}."""
    values: dict[str, object] = dict(SMALL)
    deadlines: dict[str, float] = {}
    for name, text in options.items():
        if (known := SHORT_DEADLINES.get(name, name)) in DEADLINES:
            deadlines[known] = float(text)
        else:
            values[SHORT.get(name, name)] = _value(text)
    return Policy(deadlines=Deadlines(**deadlines)).changed(**values)


def _value(text: str) -> object:
    if text in ("on", "off"):
        return text == "on"
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return text
