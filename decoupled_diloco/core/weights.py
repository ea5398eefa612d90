"""How much a contribution counts: quantity times quality (section "merge" of the paper)."""

from __future__ import annotations

import math

FLOAT32_SAFE_MAX = 1e30
"""Norms and weights above this would overflow float32 in the merge; such contributions are refused as NONFINITE."""


def contribution_weight(token_count: int, step_count: int) -> float:
    """w_m = c_tokens * (c_tokens / c_steps).

    Args:
        token_count: c_tokens, tokens since the fragment was received, >= 1.
        step_count: c_steps, inner steps since then, >= 1.
    """
    return token_count * (token_count / step_count)


def is_safe(value: float) -> bool:
    """Whether a norm or weight is finite and within float32's safe range."""
    return math.isfinite(value) and abs(value) <= FLOAT32_SAFE_MAX
