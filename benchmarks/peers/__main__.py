"""Our calls beside others' for the same payload, there and back, in turns: `python -m benchmarks.peers`.

Each way is a pair of processes on the loopback; the malloc of all of them is tuned as ours is. gloo and torchft need
`make bench-env`; flower, hivemind and nvflare come by name (`--peers flower`) and have environments of their own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

from benchmarks.figures import Figure, Section, Target, machine, of_repetitions, reported, result_path
from benchmarks.peers.pairs import Pair, PairError, Trip
from benchmarks.peers.ways import Way, chosen

MIB: Final = 1 << 20
PAYLOAD_MIB: Final = 256
PAYLOAD_MIB_QUICK: Final = 32
REPETITIONS: Final = 9
REPETITIONS_QUICK: Final = 5
REPETITIONS_BY_REQUEST: Final = 3
"""Of the slow ones, at most."""
WARM_UPS: Final = 3
"""Round trips before those that count; buffers that are kept for good are touched in the first ones. Slow ones: 1."""
TORCHFT_SHARE: Final = 0.5
BEATEN_TIMES: Final = 5.0

COLUMNS: Final = (
    "way",
    "kind",
    "GB/s",
    "ours to it",
    "CPU-s/GiB",
    "ours to it",
    "peak MiB",
    "of it programs",
    "ours to it",
    "work beside moving bytes",
)


def measure(quick: bool, by_request: str = "", payload_mib: int = 0) -> Section:
    """All ways that are there, in turns.

    Args:
        quick: A smaller payload and fewer repetitions.
        by_request: Slow peers to add.
        payload_mib: Size of the payload; 0: as usual.
    """
    byte_count = MIB * (payload_mib or (PAYLOAD_MIB_QUICK if quick else PAYLOAD_MIB))
    repetitions = REPETITIONS_QUICK if quick else REPETITIONS
    ways = chosen(by_request)
    absent = {way.name: way.absence for way in ways if way.absence}
    trips = _trips([way for way in ways if not way.absence], byte_count, repetitions, absent)
    conditions = (
        f"{byte_count // MIB} MiB of float32 from one process to another on the loopback and back (GB/s count both "
        f"directions), in turns; medians of {repetitions} repetitions (slow peers {REPETITIONS_BY_REQUEST}) after "
        f"{WARM_UPS} (slow peers 1) that do not count, the first one's content checked. "
        "Malloc is tuned in all processes. Memory is the resident peak of both processes; "
        "ratios of speed are of repetitions next to each other, of memory above interpreter and libraries."
    )
    if absent:
        conditions += " Not measured: " + "; ".join(f"{name} ({why})" for name, why in absent.items()) + "."
    return section_of(conditions, trips, byte_count, absent)


def _trips(ways: Sequence[Way], byte_count: int, repetitions: int, absent: dict[str, str]) -> dict[Way, list[Trip]]:
    """Round trips by way; a way that fails goes to `absent` with the reason.

    Raises:
        PairError: ours failed.
    """
    trips: dict[Way, list[Trip]] = {}
    with ExitStack() as stack:
        pairs: dict[Way, Pair] = {}
        for way in ways:
            try:
                pair = stack.enter_context(Pair(way, byte_count))
                for _ in range(1 if way.is_by_request else WARM_UPS):
                    pair.round_trip()
            except PairError as error:
                _give_up(way, error, absent)
                continue
            pairs[way], trips[way] = pair, []
        for repetition in range(repetitions):
            for way, pair in list(pairs.items()):
                if way.is_by_request and repetition >= REPETITIONS_BY_REQUEST:
                    continue
                try:
                    trips[way].append(pair.round_trip())
                except PairError as error:
                    _give_up(way, error, absent)
                    del pairs[way], trips[way]
    return trips


def _give_up(way: Way, error: PairError, absent: dict[str, str]) -> None:
    if way.kind == "ours":
        raise error
    print(f"{way.name} does not work here: {error}", file=sys.stderr)
    absent[way.name] = str(error).splitlines()[0]


def section_of(conditions: str, trips: dict[Way, list[Trip]], byte_count: int, absent: dict[str, str]) -> Section:
    """Figures, the table side by side, and what the picture needs.

    Args:
        conditions: In sentences.
        trips: By way; ours is among them.
        byte_count: Of the payload.
        absent: Ways that were not measured, with the reasons.
    """
    ours = next(found for way, found in trips.items() if way.kind == "ours")
    gib, gb = 2 * byte_count / (1 << 30), 2 * byte_count / 1e9
    figures: list[Figure] = []
    ways: list[dict[str, Any]] = []
    rows: list[list[str | float | None]] = []
    for way, found in trips.items():
        entry = _entry(way, found, gb, gib)
        ways.append(entry)
        figures.append(of_repetitions(f"{way.name}: there and back", [gb / trip.seconds for trip in found], "GB/s"))
        figures.append(
            of_repetitions(
                f"{way.name}: processor time of both ends", [trip.cpu_seconds / gib for trip in found], "CPU-s/GiB"
            )
        )
        figures.append(Figure(f"{way.name}: peak memory of both ends", entry["peak_mib"], "MiB"))
        ratios = [theirs.seconds / own.seconds for own, theirs in zip(ours, found, strict=False)]
        if way.kind != "ours":
            figures.append(of_repetitions(f"speed, ours to {way.name}", ratios, "x", _target(way)))
        rows.append(_row(way, entry, _entry(way, ours, gb, gib), median(ratios)))
    details = {"ways": ways, "absent": absent, "payload_bytes": byte_count}
    details["tables"] = [{"title": "Side by side", "columns": list(COLUMNS), "rows": rows}]
    return Section("peers", "The same payload by our calls and by others'", conditions, tuple(figures), details)


def _entry(way: Way, found: Sequence[Trip], gb: float, gib: float) -> dict[str, Any]:
    return {
        "name": way.name,
        "kind": way.kind,
        "gb_per_second": gb / median(trip.seconds for trip in found),
        "cpu_seconds_per_gib": median(trip.cpu_seconds for trip in found) / gib,
        "peak_mib": max(trip.peak_bytes for trip in found) / MIB,
        "base_mib": found[0].base_bytes / MIB,
        "work": way.work,
    }


def _row(way: Way, entry: dict[str, Any], ours: dict[str, Any], speed: float) -> list[str | float | None]:
    is_other = way.kind != "ours"

    def above(one: dict[str, Any]) -> float:
        return float(one["peak_mib"] - one["base_mib"])

    return [
        way.name,
        way.kind,
        entry["gb_per_second"],
        speed if is_other else None,
        entry["cpu_seconds_per_gib"],
        ours["cpu_seconds_per_gib"] / entry["cpu_seconds_per_gib"] if is_other else None,
        entry["peak_mib"],
        entry["base_mib"],
        above(ours) / above(entry) if is_other else None,
        way.work,
    ]


def _target(way: Way) -> Target | None:
    if way.kind != "peer":
        return None
    return Target("at least", BEATEN_TIMES if way.is_by_request else TORCHFT_SHARE)


def main(arguments: Sequence[str]) -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help=f"{PAYLOAD_MIB_QUICK} MiB and fewer repetitions")
    parser.add_argument("--json", type=result_path, metavar="PATH", help="also write the figures there")
    parser.add_argument("--peers", default="", metavar="A,B", help="add slow peers: flower, hivemind, nvflare")
    parser.add_argument("--mib", type=int, default=0, help="size of the payload")
    options = parser.parse_args(arguments)
    try:
        chosen(options.peers)
    except ValueError as error:
        parser.error(str(error))
    before = machine()
    return reported(lambda: measure(options.quick, options.peers, options.mib), before, options.json, options.quick)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
