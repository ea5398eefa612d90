"""What an encoding gains on a link of 1 Gbit/s, what it costs in accuracy, and the bytes that really cross the link.

The link is the loopback of a fresh network namespace, shaped by the kernel (tc, tbf); root is not needed where users
may make namespaces of their own. A real syncer runs in a process of its own, and the client is that of a learner.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from benchmarks.figures import Figure, Section, Target, of_repetitions, run
from benchmarks.shaped_link import (
    ALONE_COUNT,
    BURST_BYTES,
    DOWNLOAD,
    ETHERNET_MTU,
    FRAGMENT_COUNT,
    IN_FLIGHT,
    ONE_AT_A_TIME,
    RATE_BITS,
    Entry,
)
from benchmarks.syncer_rig import ROOT
from benchmarks.tied import tied
from decoupled_diloco.arrays.encoding import ENCODINGS, Encoded, encoding_named

VALUES: Final = 10 << 20
"""Values of a fragment."""
VALUES_QUICK: Final = 10 << 18
REPETITIONS: Final = 3
REPETITIONS_QUICK: Final = 2
IN_FLIGHT_COUNT: Final = FRAGMENT_COUNT - ALONE_COUNT
CHILD_SECONDS_MAX: Final = 240.0
ERROR_VALUES: Final = 1 << 20
"""Values that the relative error is taken of."""
GAIN_TARGETS: Final = {"bf16": Target("at least", 1.9), "int4": Target("at least", 7.0)}
FORMULA_TARGET: Final = Target("at most", 1.0)

LOOPBACK: Final = "loopback"
SHAPED: Final = "shaped"
Found = Mapping[str, Mapping[str, Sequence[Entry]]]
"""Entries by link and by what was moved, as `shaped_link` prints them."""


class NotMeasuredError(Exception):
    """This machine does not let anybody shape a link; the text says why."""


def namespace_command() -> list[str]:
    """How to start a program in a network namespace of its own."""
    return ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "--net"]


def measured(value_count: int, repetitions: int) -> Found:
    """Runs `shaped_link` in a namespace.

    Raises:
        NotMeasuredError: with what the system said.
    """
    program = [sys.executable, "-m", "benchmarks.shaped_link", str(value_count), str(repetitions)]
    try:
        done = subprocess.run(
            [*namespace_command(), *tied(program)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=CHILD_SECONDS_MAX,
        )
    except OSError as error:
        raise NotMeasuredError(f"unshare cannot be run: {error}") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        raise NotMeasuredError(lines[-1] if lines else f"the child ended with status {done.returncode}")
    found: Found = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def relative_error(encoding: str, value_count: int = ERROR_VALUES) -> float:
    """Root mean square of the error over that of the values, of a delta of normal values; a ratio."""
    values = np.random.default_rng(1).standard_normal(value_count, np.float32)
    back = Encoded(encoding_named(encoding).encode(values), encoding, value_count).decode()
    return float(np.linalg.norm(back.astype(np.float64) - values) / np.linalg.norm(values))


def rates(entries: Sequence[Entry]) -> list[float]:
    """Values a second of each repetition."""
    return [entry["values"] / entry["seconds"] for entry in entries]


def gains(found: Mapping[str, Sequence[Entry]], kind: str, encoding: str) -> list[float]:
    """Values a second over float32's, of repetitions next to each other."""
    pairs = zip(rates(found[f"{kind} {encoding}"]), rates(found[f"{kind} float32"]), strict=True)
    return [rate / base for rate, base in pairs]


def above_formula(entries: Sequence[Entry], encoding: str) -> list[float]:
    """By how much the link carried more than bits * values / 8, in per cent."""
    bits = encoding_named(encoding).bits_per_element
    return [100 * (entry["wire_bytes"] / (bits * entry["values"] / 8) - 1) for entry in entries]


def section_of(found: Found, conditions: str) -> Section:
    """The section of what was found."""
    errors = {encoding: relative_error(encoding) for encoding in ENCODINGS}
    figures = (*_gain_figures(found), *_error_figures(errors), *_wire_figures(found))
    return Section("shaped", TITLE, conditions, figures, {"tables": [_table(found, errors)], "entries": found})


TITLE: Final = "Encodings on a link of 1 Gbit/s"


def _gain_figures(found: Found) -> Iterator[Figure]:
    kinds = {IN_FLIGHT: f"{IN_FLIGHT_COUNT} uploads in flight", ONE_AT_A_TIME: "one upload at a time"}
    for kind, words in kinds.items():
        link_share = [100 * 32 * rate / RATE_BITS for rate in rates(found[SHAPED][f"{kind} float32"])]
        yield of_repetitions(f"1 Gbit/s, {words}, float32: share of the link", link_share, "%", note="payload alone")
        for encoding in _others():
            name = f"1 Gbit/s, {words}, {encoding}: parameters a second"
            values = gains(found[SHAPED], kind, encoding)
            yield of_repetitions(name, values, "x float32's", GAIN_TARGETS.get(encoding))
    yield of_repetitions(
        "1 Gbit/s, download of a bf16 delta: parameters a second",
        gains(found[SHAPED], DOWNLOAD, "bf16"),
        "x float32's",
    )
    for kind, words in kinds.items():
        for encoding in _others():
            name = f"loopback, {words}, {encoding}: parameters a second"
            yield of_repetitions(name, gains(found[LOOPBACK], kind, encoding), "x float32's")


def _error_figures(errors: Mapping[str, float]) -> Iterator[Figure]:
    for encoding in _others():
        name = f"error of a delta of normal values, {encoding}"
        yield Figure(name, 100 * errors[encoding], "%", note="root mean square, of the values'")


def _wire_figures(found: Found) -> Iterator[Figure]:
    for name, entries in found[LOOPBACK].items():
        kind, _, encoding = name.rpartition(" ")
        if kind == IN_FLIGHT:
            continue
        what = "download" if kind == DOWNLOAD else "upload"
        bits = encoding_named(encoding).bits_per_element
        yield of_repetitions(
            f"bytes on the wire, {what}, {encoding}: above the formula",
            above_formula(entries, encoding),
            "%",
            FORMULA_TARGET,
            note=f"{bits:g} bits a parameter",
        )


def _others() -> list[str]:
    return [encoding for encoding in ENCODINGS if encoding != "float32"]


def _table(found: Found, errors: Mapping[str, float]) -> dict[str, Any]:
    def gain(link: str, kind: str, encoding: str) -> float:
        return round(statistics.median(gains(found[link], kind, encoding)), 2)

    rows = [
        [
            encoding,
            encoding_named(encoding).bits_per_element,
            gain(SHAPED, IN_FLIGHT, encoding),
            gain(SHAPED, ONE_AT_A_TIME, encoding),
            gain(LOOPBACK, IN_FLIGHT, encoding),
            f"{100 * errors[encoding]:.3g} %",
            "the reference" if encoding == "float32" else "see `quality`",
        ]
        for encoding in ENCODINGS
    ]
    columns = [
        "encoding",
        "bits a parameter",
        f"x float32, 1 Gbit/s, {IN_FLIGHT_COUNT} in flight",
        "x float32, 1 Gbit/s, one at a time",
        f"x float32, loopback, {IN_FLIGHT_COUNT} in flight",
        "error of a delta of normal values",
        "training loss",
    ]
    return {"title": "What an encoding gains and costs", "columns": columns, "rows": rows}


def conditions_of(value_count: int, repetitions: int) -> str:
    """How it was measured, in sentences."""
    return (
        f"Uploads of fragments of {value_count / 1e6:.1f}M parameters to a syncer in a process of its own, from values "
        "in memory to the syncer's answer: encoding, the learner's and the syncer's look at the values, checksums and "
        f"digests are in it. One at a time, and {IN_FLIGHT_COUNT} at a time, some encoded while others are sent; "
        "no round merges meanwhile. The link is the loopback of a network namespace, shaped to "
        f"{RATE_BITS / 1e9:g} Gbit/s with bursts of {BURST_BYTES >> 10} KiB and packets of {ETHERNET_MTU} bytes, "
        f"whose headers count. Encodings take turns; medians of {repetitions} turns. Bytes on the wire are those that "
        "the loopback counted, both directions, with packets of 64 KiB; an Ethernet's headers add 4 to 5 %."
    )


def measure(quick: bool) -> Section:
    """Measures, or says why not."""
    value_count = VALUES_QUICK if quick else VALUES
    repetitions = REPETITIONS_QUICK if quick else REPETITIONS
    try:
        found = measured(value_count, repetitions)
    except NotMeasuredError as error:
        return Section("shaped", TITLE, f"Not measured: {error}.", (), {"not_measured": str(error)})
    return section_of(found, conditions_of(value_count, repetitions))


if __name__ == "__main__":
    sys.exit(run(measure, __doc__))
