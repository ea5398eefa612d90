"""`python -m simulator bandwidth`: what bandwidth a run takes, what fits a link, what one syncer sustains."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from decoupled_diloco.core.encoding_bits import ENCODING_BITS
from decoupled_diloco.core.policy import Policy
from simulator import bandwidth
from simulator.bandwidth import Need, Plan
from simulator.capacity import (
    PROGRAM_BYTES,
    RATE_GBYTES_PER_SECOND_MAX,
    RATE_GBYTES_PER_SECOND_MIN,
    RATE_OPTIONS,
    UPLOAD_BUFFER_BYTES,
    MissingRatesError,
    Rates,
    ResultsError,
    contribution_bytes,
    known_rates,
    memory_parts,
    resident_bytes,
    rounds_in_flight,
    sustained,
)

DEFAULT_RESULTS: Final = Path("benchmarks/results/latest.json")
"""Where `python -m benchmarks` leaves its figures."""

FORMULAS: Final = """\
Decoupled DiLoCo: average bits*N/(H*step); to hide: the largest (n*larger + smaller)/(window + floor((n-1)*H/P)*step),
    n = 1 to P, larger and smaller of a fragment's bits up and down, window = tau*step - quorum - merge - 2 latencies;
    a grace window of g steps takes g/gamma steps from the window; the syncer: M times as much
Streaming DiLoCo: average (M-1)/M*(up + down bits)*N/(H*step); to hide: likewise, with these bits for larger, 0 for
    smaller, window = tau*step - quorum - 2 latencies
data-parallel: average 2*(M-1)/M*gradient bits*N/step; to hide: the same bits/(step - quorum - 2 latencies)
Payload only, one direction. docs/bandwidth.md derives the formulas and says what they assume."""

_POLICY: Final = Policy()

BITS_MIN: Final = 1
BITS_MAX: Final = 64
"""Bits per parameter that can be planned with."""

BOUNDS: Final[Mapping[str, tuple[float, float, str]]] = {
    "params": (1, 1e15, "parameters"),
    "learners": (1, 1024, "learners, as `run.learners_max`"),
    "fragments": (1, 10_000, "fragments"),
    "interval": (1, 1e9, "steps"),
    "overlap": (0, 1e9, "steps"),
    "step_seconds": (1e-6, 1e6, "seconds"),
    "latency_ms": (0, 1e9, "milliseconds"),
    "quorum_ms": (0, 1e9, "milliseconds"),
    "merge_ms": (0, 1e9, "milliseconds"),
    "link_gbit": (1e-6, 1e6, "Gbit/s"),
    "syncer_link_gbit": (1e-6, 1e6, "Gbit/s"),
    **{
        option.removeprefix("--").replace("-", "_"): (RATE_GBYTES_PER_SECOND_MIN, RATE_GBYTES_PER_SECOND_MAX, "GB/s")
        for option in RATE_OPTIONS
    },
}
"""The smallest and the largest number that an option takes, by its name in the namespace, and their unit."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    bits = f"bits per parameter, or one of {', '.join(ENCODING_BITS)}, whose block scales count"
    add = parser.add_argument
    add("--params", type=_whole, required=True, metavar="N", help="parameters of the model, for example 12e9")
    add("--learners", type=_whole, required=True, metavar="M", help="learners, all equally fast")
    add("--fragments", type=_whole, default=_POLICY.fragment_count, metavar="P", help="fragments (%(default)s)")
    add("--interval", type=_whole, default=_POLICY.interval_steps, metavar="H", help="steps per sync (%(default)s)")
    add("--overlap", type=_whole, default=_POLICY.overlap_steps, metavar="TAU", help="overlapped steps (%(default)s)")
    add("--step-seconds", type=_number, required=True, metavar="S", help="duration of an inner step")
    add("--bits", type=_bits, default="bf16", metavar="BITS", help=f"of contributions: {bits} (%(default)s)")
    add(
        "--download-bits", type=_bits, default="bf16", metavar="BITS", help="of published steps, likewise (%(default)s)"
    )
    add("--gradient-bits", type=_bits, default="bf16", metavar="BITS", help="of gradients, likewise (%(default)s)")
    add("--latency-ms", type=_number, default=0.0, metavar="MS", help="one way (%(default)s)")
    add("--quorum-ms", type=_number, default=0.0, metavar="MS", help="from the first start to the last (%(default)s)")
    add("--merge-ms", type=_number, default=0.0, metavar="MS", help="merge and commit of a fragment (%(default)s)")
    add("--link-gbit", type=_number, metavar="GBIT", help="a learner's link, each direction: what would fit it")
    add("--syncer-link-gbit", type=_number, metavar="GBIT", help="the syncer's link: how many learners it serves")
    for option, (_, text) in RATE_OPTIONS.items():
        add(option, type=_number, metavar="RATE", help=f"{text}; with all of these: what one syncer sustains")
    add("--results", type=Path, metavar="PATH", help=f"rates that are not given ({DEFAULT_RESULTS}, if it is there)")
    add("--json", action="store_true", help="print JSON, in bit/s")


def run(options: argparse.Namespace, refuse: Callable[[str], Any]) -> int:
    """Prints the plan; returns the exit code.

    Args:
        options: As `add_arguments` has them.
        refuse: Called with what is wrong with an option; does not return.
    """
    if (problem := problem_of(options)) is not None:
        refuse(problem)
    try:
        report = report_of(options)
    except (ResultsError, MissingRatesError) as error:
        refuse(str(error))
    print(json.dumps(_plain(report), indent=1) if options.json else "\n".join(lines_of(report)))
    return 0


def problem_of(options: argparse.Namespace) -> str | None:
    """The first option with a value that cannot be planned with, and what would be right; None: all can."""
    for name, (low, high, unit) in BOUNDS.items():
        value = getattr(options, name)
        if value is not None and not low <= value <= high:
            return f"{_option_of(name)} {value:g}: must be from {low:g} to {high:g} {unit}"
    if options.fragments > options.interval:
        return (
            f"--fragments {options.fragments}: must be at most {options.interval} (--interval), because every fragment "
            "has a step of its own in the interval"
        )
    if options.overlap >= options.interval:
        return (
            f"--overlap {options.overlap}: must be below {options.interval} (--interval), because a sync must be over "
            "before the next one of the same fragment"
        )
    if options.fragments > options.params:
        return f"--fragments {options.fragments}: must be at most {options.params:g} (--params)"
    return None


def plan_of(options: argparse.Namespace) -> Plan:
    """The plan that the options describe."""
    return Plan(
        parameter_count=options.params,
        learner_count=options.learners,
        fragment_count=options.fragments,
        interval_steps=options.interval,
        overlap_steps=options.overlap,
        step_seconds=options.step_seconds,
        upload_bits=options.bits,
        download_bits=options.download_bits,
        gradient_bits=options.gradient_bits,
        latency_seconds=options.latency_ms / 1e3,
        quorum_seconds=options.quorum_ms / 1e3,
        merge_seconds=options.merge_ms / 1e3,
    )


def report_of(options: argparse.Namespace) -> dict[str, Any]:
    """All that is printed, in types of JSON but for infinite numbers; rates in bit/s.

    Raises:
        ResultsError: The file of results cannot be read.
        MissingRatesError: Some rates were asked for, by an option or a file, and others are not known.
    """
    plan = plan_of(options)
    own = bandwidth.decoupled(plan)
    graced = bandwidth.decoupled(plan, plan.grace_cap_steps)
    report: dict[str, Any] = {
        "plan": asdict(plan),
        "needs": {
            "decoupled": asdict(own),
            "decoupled_syncer": asdict(own.times(plan.learner_count)),
            "decoupled_with_grace": asdict(graced),
            "decoupled_with_grace_syncer": asdict(graced.times(plan.learner_count)),
            "streaming": asdict(bandwidth.streaming(plan)),
            "data_parallel": asdict(bandwidth.data_parallel(plan)),
        },
    }
    count = plan.parameter_count
    report["syncer_memory"] = {
        "bytes": PROGRAM_BYTES + resident_bytes(plan) * count,
        "contribution_bytes": contribution_bytes(plan) * count,
        "parts": {name: value * count for name, value in memory_parts(plan).items()} | {"program": PROGRAM_BYTES},
        "rounds_in_flight": rounds_in_flight(plan),
    }
    if options.link_gbit is not None:
        link = options.link_gbit * 1e9
        report["link"] = {
            "bits_per_second": link,
            "decoupled_fits": own.fits(link),
            "streaming_fits": bandwidth.streaming(plan).fits(link),
            "data_parallel_fits": bandwidth.data_parallel(plan).fits(link),
            "largest_model": bandwidth.largest_model(plan, link),
            "smallest_interval": bandwidth.smallest_interval(plan, link),
            "smallest_overlap": bandwidth.smallest_overlap(plan, link),
            "upload_encodings": list(bandwidth.fitting_encodings(plan, link)),
        }
    if options.syncer_link_gbit is not None:
        link = options.syncer_link_gbit * 1e9
        report["syncer_link"] = {"bits_per_second": link, "most_learners": bandwidth.most_learners(plan, link)}
    match _rates_of(options):
        case Rates() as rates:
            report["sustained"] = {**asdict(sustained(plan, rates)), "rates": asdict(rates)}
        case str() as missing:
            report["not_sustained"] = missing
    return report


def _rates_of(options: argparse.Namespace) -> Rates | str | None:
    """The rates; else why those that nobody asked for by hand are not known, if there is a file; else None.

    Raises:
        ResultsError: The file of results cannot be read, or none of it would be used.
        MissingRatesError: Some rates were given by hand, or a file, and others are not known.
    """
    given = {field: getattr(options, _field_of(option)) for option, (field, _) in RATE_OPTIONS.items()}
    if options.results is not None and None not in given.values():
        raise ResultsError(f"--results {options.results}: has no use where all rates are given")
    results = options.results or DEFAULT_RESULTS
    try:
        return known_rates(given, results)
    except MissingRatesError as error:
        if options.results is not None or any(value is not None for value in given.values()):
            raise
        return str(error) if results.exists() else None


# --- in words ---

_HEADINGS: Final = (("sends", "receives"), ("receives", "sends"))
"""Of the averages of a learner and of the syncer: what goes up, what comes down."""


def lines_of(report: dict[str, Any]) -> list[str]:
    """The report as text, in Gbit/s."""
    plan, needs = Plan(**report["plan"]), {name: Need(**need) for name, need in report["needs"].items()}
    nobody = f"{'-':>9}" * 3
    interval = f"{plan.interval_steps}, tau = {plan.overlap_steps}, steps of {plan.step_seconds:g} s"
    lines = [
        f"{plan.parameter_count:,.0f} parameters, M = {plan.learner_count}, P = {plan.fragment_count}, H = {interval}",
        f"bits per parameter: {plan.upload_bits:g} up, {plan.download_bits:g} down, gradients {plan.gradient_bits:g}",
        f"seconds: latency {plan.latency_seconds:g}, quorum {plan.quorum_seconds:g}, merge {plan.merge_seconds:g}",
        "",
        f"{'payload in Gbit/s':32}{'of one learner':>27}   {'of the syncer':>27}",
        f"{'':32}" + "   ".join(f"{first:>9}{second:>9}{'to hide':>9}" for first, second in _HEADINGS),
    ]
    for title, name in (
        ("Decoupled DiLoCo", "decoupled"),
        (f"  and {plan.grace_cap_steps:g} step of grace", "decoupled_with_grace"),
        ("Streaming DiLoCo (all-reduce)", "streaming"),
        ("data-parallel (all-reduce)", "data_parallel"),
    ):
        syncer = needs.get(f"{name}_syncer")
        lines.append(f"{title:32}{_row(needs[name])}   {_row(syncer) if syncer is not None else nobody}")
    if moved := needs["data_parallel"].up + needs["data_parallel"].down:
        ratio = moved / (needs["decoupled"].up + needs["decoupled"].down)
        words = f"{ratio:.3g} times less than" if ratio >= 1 else f"{1 / ratio:.3g} times as much as"
        lines += ["", f"On average a learner moves {words} in data-parallel training."]
    lines += ["", *_memory_lines(report["syncer_memory"])]
    for name, write in (("link", _link_lines), ("syncer_link", _syncer_link_lines), ("sustained", _sustained_lines)):
        if name in report:
            lines += ["", *write(report[name], plan)]
    if "not_sustained" in report:
        lines += ["", f"Not told: {report['not_sustained']}."]
    return [*lines, "", *FORMULAS.splitlines()]


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    parts = ", ".join(f"{name} {size / 1024**3:,.2f}" for name, size in memory["parts"].items())
    lines = [
        f"The syncer holds up to {memory['bytes'] / 1024**3:,.2f} GiB: {parts}.",
        f"That is with {memory['rounds_in_flight']} rounds in flight; syncs that take longer than tau steps need more.",
    ]
    if memory["contribution_bytes"] > UPLOAD_BUFFER_BYTES:
        default = f"{UPLOAD_BUFFER_BYTES >> 30} GiB"
        lines.append(
            f"Contributions take more than the default of syncer.upload_buffer_bytes_max, {default}: raise it."
        )
    return lines


def _link_lines(link: dict[str, Any], plan: Plan) -> list[str]:
    names = {"decoupled": "Decoupled", "streaming": "Streaming", "data_parallel": "data-parallel"}
    verdicts = (f"{title}: {'yes' if link[f'{name}_fits'] else 'no'}" for name, title in names.items())
    interval, overlap, encodings = link["smallest_interval"], link["smallest_overlap"], link["upload_encodings"]
    return [
        f"Does a learner's link of {_gbit(link['bits_per_second'])} Gbit/s hide its syncs? {', '.join(verdicts)}",
        "Decoupled DiLoCo on it, each with all else as given:",
        f"  largest model         {link['largest_model']:.3g} parameters",
        f"  smallest H            {interval or 'none: a larger tau or more fragments may help, a longer interval not'}",
        f"  smallest tau          {f'none below H = {plan.interval_steps}' if overlap is None else overlap}",
        f"  encodings of uploads  {', '.join(encodings) or 'none'}",
    ]


def _syncer_link_lines(link: dict[str, Any], plan: Plan) -> list[str]:
    count = link["most_learners"]
    words = str(count) if count < 10**9 else f"{count:.3g}"
    return [f"The syncer's link of {_gbit(link['bits_per_second'])} Gbit/s serves {words} learners."]


def _sustained_lines(found: dict[str, Any], plan: Plan) -> list[str]:
    total = sum(found["seconds_per_parameter"].values())
    shares = ", ".join(f"{name} {value / total:.0%}" for name, value in found["seconds_per_parameter"].items())
    size, learners = f"{found['parameter_count']:.3g} parameters", f"{plan.learner_count} learners"
    return [
        f"One syncer with these rates sustains {size} x {learners} / {plan.step_seconds:g} s; {found['limit']}.",
        f"  its time: {shares}",
    ]


def _row(need: Need) -> str:
    return "".join(f"{_gbit(rate):>9}" for rate in (need.up, need.down, need.hidden))


def _gbit(rate: float) -> str:
    if math.isinf(rate):
        return "never"
    digits = f"{rate / 1e9:.3g}"
    return f"{rate / 1e9:.0f}" if "e" in digits and 1e9 < rate < 1e16 else digits


def _plain(value: Any) -> Any:
    """The value with None in place of infinite numbers, which JSON has not."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and math.isinf(value) else value


# --- values of options ---


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no number; write for example 12e9 or 0.5")
    return value


def _whole(text: str) -> int:
    value = _number(text)
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is no whole number")
    return int(value)


def _bits(text: str) -> float:
    if text in ENCODING_BITS:
        return ENCODING_BITS[text]
    try:
        value = _number(text)
    except argparse.ArgumentTypeError:
        value = 0.0
    if not BITS_MIN <= value <= BITS_MAX:
        names = ", ".join(ENCODING_BITS)
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is neither one of {names} nor a number of bits from {BITS_MIN} to {BITS_MAX}"
        )
    return value


def _field_of(option: str) -> str:
    return option.removeprefix("--").replace("-", "_")


def _option_of(field: str) -> str:
    return "--" + field.replace("_", "-")
