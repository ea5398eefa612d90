"""Results of the suite as a page of Markdown: `benchmarks/results/latest.md`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.figures import Figure, Section, cell, rounded
from benchmarks.suite import Results


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
        yield from _section(section, pictures.get(section.name, ()))
    yield ""
    yield "## How long it took"
    yield ""
    yield from table(("benchmark", "seconds"), [(name, f"{took:g}") for name, took in results.seconds.items()])


def _verdict(results: Results) -> Iterator[str]:
    yield f"Targets met: {results.met_count}, missed: {len(results.missed)}."
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
        yield f"Not asked for: {', '.join(results.left_out)}."


def _section(section: Section, pictures: Sequence[str]) -> Iterator[str]:
    yield f"## {section.title} (`{section.name}`)"
    yield ""
    yield section.conditions
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
            {True: "met", False: "**missed**", None: ""}[figure.is_met],
        )
        for figure in section.figures
    ]
    yield from table(("figure", "value", "range", "target", ""), rows)
    for data in section.details.get("tables", ()):
        yield ""
        yield f"**{data['title']}**"
        yield ""
        yield from table(data["columns"], [[cell(value) for value in row] for row in data["rows"]])


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
