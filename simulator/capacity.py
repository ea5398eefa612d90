"""What one syncer sustains: the largest model for so many learners and such steps, and what limits it. Pure.

The rates are measured one at a time, with the machine to itself (`benchmarks.capacity` takes or measures them). In a
run they share it, so the times that they give are added up and not laid over each other: a lower bound.
docs/bandwidth.md has the formulas.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from decoupled_diloco.core.policy import Policy
from simulator.bandwidth import SYNC_LATENCIES, Plan

FLOAT32_BYTES: Final = 4
STATE_VECTORS: Final = 3
"""Theta, outer momentum and downlink residual, read and written by a merge, and held in memory."""
BASE_INTERVAL_COMMITS: Final = 8
"""Commits of a fragment from one whole payload on the disk to the next: default of `syncer.base_interval_commits`."""
UPLOAD_BUFFER_BYTES: Final = 8 * 1024**3
"""Memory for contributions: default of `syncer.upload_buffer_bytes_max`."""
PROGRAM_BYTES: Final = 250 * 1024**2
"""Memory of a syncer without a model: interpreter, libraries, gRPC with what it reads ahead, compiled loops."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What a syncer's machine does, each measured alone, in bytes per second.

    Attributes:
        upload: payload of contributions received, all learners together.
        download: payload of published steps sent, all learners together.
        merge: bytes read and written by merge and outer step, as `merge_bytes` counts them.
        commit: bytes of payload written and synced.
        memory_bytes: resident memory that it may have; None: not looked at.
    """

    upload: float
    download: float
    merge: float
    commit: float
    memory_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Sustained:
    """What fits.

    Attributes:
        parameter_count: the largest N.
        limit: what stands in the way of more, in words.
        seconds_per_parameter: by part of a sync, for one parameter and all learners.
    """

    parameter_count: float
    limit: str
    seconds_per_parameter: Mapping[str, float]


def merge_bytes(plan: Plan) -> float:
    """Bytes read and written per parameter by merge and outer step.

    M contributions and the state are read; the state, the merged delta and the payload for downloads are written.
    """
    contributions = plan.learner_count * plan.upload_bits / 8
    state = STATE_VECTORS * FLOAT32_BYTES
    return contributions + 2 * state + FLOAT32_BYTES + plan.download_bits / 8


def commit_bytes() -> float:
    """Bytes per parameter that a commit writes on average: a base of three vectors, else the merged delta."""
    base = STATE_VECTORS * FLOAT32_BYTES
    return (base + (BASE_INTERVAL_COMMITS - 1) * FLOAT32_BYTES) / BASE_INTERVAL_COMMITS


def sustained(plan: Plan, rates: Rates) -> Sustained:
    """The largest model that one syncer sustains for the learners and the schedule of a plan; its own N is not read.

    Two things must hold. Throughput: within an interval (H steps) every fragment is received from, merged for and sent
    to all learners, and committed. Overlap: one fragment goes through all of that within tau steps, less quorum and
    latencies. Where memory is given: state, contributions in flight and the results of a merge fit it.

    Args:
        plan: M, P, H, tau, the step, the encodings, latency and quorum; `merge_seconds` is not read.
        rates: of the machine.
    """
    count = plan.learner_count
    parts = {
        "the wire (upload)": count * plan.upload_bits / 8 / rates.upload,
        "the wire (download)": count * plan.download_bits / 8 / rates.download,
        "the merge": merge_bytes(plan) / rates.merge,
        "the commit": commit_bytes() / rates.commit,
    }
    seconds = sum(parts.values())
    largest = max(parts, key=lambda name: parts[name])
    window = plan.overlap_steps * plan.step_seconds - plan.quorum_seconds - SYNC_LATENCIES * plan.latency_seconds
    overlap = f"the overlap of {plan.overlap_steps} steps is the limit, most of it for {largest}"
    limits = {
        f"{largest} is the limit": plan.interval_seconds / seconds,
        overlap: max(0.0, window) * plan.fragment_count / seconds,
    }
    if rates.memory_bytes is not None:
        limits["memory is the limit"] = max(0.0, rates.memory_bytes - PROGRAM_BYTES) / resident_bytes(plan)
    limit = min(limits, key=lambda name: limits[name])
    return Sustained(limits[limit], limit, parts)


def resident_bytes(plan: Plan) -> float:
    """Memory of a syncer per parameter of the model, at most, without `PROGRAM_BYTES`."""
    return sum(memory_parts(plan).values())


def memory_parts(plan: Plan) -> dict[str, float]:
    """What a syncer holds, in bytes per parameter of the model; the formula of `syncer_service/buffers.py`.

    At most, that is with all rounds in flight at their largest at once: the state; the newest step of every fragment,
    where downloads are not exact; and of every round in flight its contributions, and of its results the delta, the
    next step, and what of the next state does not fit where its contributions lay.
    """
    state, delta = STATE_VECTORS * FLOAT32_BYTES, FLOAT32_BYTES
    step = plan.download_bits / 8 if plan.download_bits < 8 * FLOAT32_BYTES else 0.0
    results = delta + step + max(0.0, state - plan.learner_count * plan.upload_bits / 8)
    return {
        "state": state,
        "published steps": step,
        "contributions": contribution_bytes(plan),
        "merges": rounds_in_flight(plan) * results / plan.fragment_count,
    }


def contribution_bytes(plan: Plan) -> float:
    """Memory of the contributions to all rounds in flight, per parameter of the model."""
    return rounds_in_flight(plan) * plan.learner_count * plan.upload_bits / 8 / plan.fragment_count


def rounds_in_flight(plan: Plan) -> int:
    """Rounds under way at a time, at most, where syncs take no longer than tau steps."""
    return Policy(plan.fragment_count, plan.interval_steps, plan.overlap_steps).rounds_in_flight_max(None, None)


# --- where rates come from ---

RATE_OPTIONS: Final[Mapping[str, tuple[str, str]]] = {
    "--upload-gbytes-per-second": ("upload", "GB/s of contributions that the syncer receives, all learners together"),
    "--download-gbytes-per-second": ("download", "GB/s of published steps that it sends, all learners together"),
    "--merge-gbytes-per-second": ("merge", "GB/s read and written by merge and outer step"),
    "--commit-gbytes-per-second": ("commit", "GB/s of payload written and synced"),
}
"""Options that give a rate: the field of `Rates`, and what it is."""

RATE_FIGURES: Final[Mapping[str, tuple[str, str]]] = {
    field: ("capacity", f"rate of the {field}") for field in ("upload", "download", "merge", "commit")
}
"""Figures of the benchmark suite that give a rate in GB/s: section and name of the figure, by field of `Rates`."""


RATE_GBYTES_PER_SECOND_MIN: Final = 1e-6
RATE_GBYTES_PER_SECOND_MAX: Final = 1e6
"""What a rate may be, from a kilobyte to a petabyte per second; others are mistakes."""


class ResultsError(ValueError):
    """The file of results cannot be used."""


class MissingRatesError(ValueError):
    """Not all rates are known; the message names those that are not, and where they could come from."""


def known_rates(given: Mapping[str, float | None], results: Path) -> Rates:
    """Rates as given, else from the results of the benchmark suite.

    Args:
        given: GB/s by field of `Rates`.
        results: what `python -m benchmarks` has written, if it is there.

    Raises:
        MissingRatesError: a rate is in neither.
        ResultsError: the file is there, and is no such thing.
    """
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) < len(given) and results.exists():
        found = {**figures_of(results), **found}
    if missing := [option for option, (name, _) in RATE_OPTIONS.items() if name not in found]:
        place = "does not hold" if results.exists() else "would hold, but is not there"
        raise MissingRatesError(
            f"what one syncer sustains takes {len(RATE_OPTIONS)} rates, of which {results} {place}: "
            f"{', '.join(missing)}; give them, or a file that `python -m benchmarks` has left (--results)"
        )
    return Rates(**{name: value * 1e9 for name, value in found.items()})


def figures_of(results: Path) -> dict[str, float]:
    """The figures of `RATE_FIGURES` that a file of results holds, in GB/s.

    Raises:
        ResultsError: it holds no results, or a rate that none can be.
    """
    try:
        sections = json.loads(results.read_text(encoding="utf-8"))["sections"]
        values = {
            (section["name"], figure["name"]): figure["value"] for section in sections for figure in section["figures"]
        }
        found = {field: float(values[place]) for field, place in RATE_FIGURES.items() if place in values}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ResultsError(f"--results {results}: no results of `python -m benchmarks`: {error!r}") from error
    for field, value in found.items():
        if not RATE_GBYTES_PER_SECOND_MIN <= value <= RATE_GBYTES_PER_SECOND_MAX:
            raise ResultsError(
                f"--results {results}: {' / '.join(RATE_FIGURES[field])} = {value:g}: must be from "
                f"{RATE_GBYTES_PER_SECOND_MIN:g} to {RATE_GBYTES_PER_SECOND_MAX:g} GB/s"
            )
    return found
