"""Results of the suite as a page of Markdown: `benchmarks/results/latest.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.figures import Figure, Section, cell, rounded, target_heading
from benchmarks.record import Results


def page(results: Results, pictures: Mapping[str, Sequence[str]]) -> str:
    """The whole page.

    Args:
        results: What was measured.
        pictures: Names of picture files by section; those of all sections together under "".
    """
    return "\n".join(_lines(results, pictures)).rstrip() + "\n"


def _lines(results: Results, pictures: Mapping[str, Sequence[str]]) -> Iterator[str]:
    kind = "quick run: small sizes, few repetitions; for a first look only" if results.is_quick else "full run"
    yield f"# Benchmarks, {results.taken_at} ({kind})"
    yield ""
    yield ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in results.machine.items()) + "  "
    yield ", ".join(f"{name} {value}" for name, value in results.versions.items())
    yield ""
    yield "What is measured, and how to read it: `docs/benchmarks.md`."
    yield ""
    yield from _verdict(results)
    for picture in pictures.get("", ()):
        yield ""
        yield f"![all targets]({picture})"
    for section in results.sections:
        yield ""
        yield from _section(results, section, pictures.get(section.name, ()))
    yield ""
    yield "## How long it took"
    yield ""
    yield from table(("benchmark", "seconds"), [(name, f"{took:g}") for name, took in results.seconds.items()])


def verdict(results: Results) -> str:
    """How the figures stand to the targets, in a sentence."""
    if results.is_quick:
        return "A quick run: targets are those of a full run, and for orientation only."
    return f"Targets met: {results.met_count}, missed: {len(results.missed)}."


def _verdict(results: Results) -> Iterator[str]:
    yield verdict(results)
    if results.missed:
        yield ""
        rows = [(section.name, figure.name, value_of(figure), target_of(figure)) for section, figure in results.missed]
        yield from table(("benchmark", "missed", "value", "target"), rows)
    for failure in results.failures:
        yield ""
        yield f"**{failure.name} came to nothing**: {failure.reason}"
        yield ""
        yield "```"
        yield failure.output.rstrip().replace("```", "'''")
        yield "```"
    if results.left_out:
        yield ""
        yield f"Not measured yet: {', '.join(results.left_out)}."


def _section(results: Results, section: Section, pictures: Sequence[str]) -> Iterator[str]:
    yield f"## {section.title} (`{section.name}`)"
    yield ""
    yield f"{section.conditions} {_origin(results, section)}"
    yield ""
    for picture in pictures:
        yield f"![{section.title}]({picture})"
        yield ""
    rows = [
        (
            f"{figure.name} ({figure.note})" if figure.note else figure.name,
            value_of(figure),
            "" if figure.low is None else f"{rounded(figure.low)} to {rounded(figure.high or 0)}",
            target_of(figure),
            {True: "met", False: "**missed**", None: ""}[None if results.is_quick else figure.is_met],
        )
        for figure in section.figures
    ]
    yield from table(("figure", "value", "range", target_heading(results.is_quick), ""), rows)
    for data in section.details.get("tables", ()):
        yield ""
        yield f"**{data['title']}**"
        yield ""
        yield from table(data["columns"], [[cell(value) for value in row] for row in data["rows"]])


def _origin(results: Results, section: Section) -> str:
    """When a section was taken, and what was different from the newest run then."""
    origin = results.origins[section.name]
    now = {**_lasting(results.machine), **results.versions}
    then = {**_lasting(origin.machine), **origin.versions}
    others = [f"{name} {then.get(name, 'absent')}" for name in now | then if then.get(name) != now.get(name)]
    return f"Taken at {origin.taken_at}" + (f" with {', '.join(others)}." if others else ".")


def _lasting(machine: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in machine.items() if name != "load_before"}


def value_of(figure: Figure) -> str:
    """A figure's value with its unit."""
    return f"{rounded(figure.value)} {figure.unit}"


def target_of(figure: Figure) -> str:
    """A figure's target in words; nothing without one."""
    return "" if figure.target is None else f"{figure.target.bound} {figure.target.value:g}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines of a table; bars within cells are escaped."""
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(text.replace("|", "\\|").replace("\n", " ") for text in row) + " |"
