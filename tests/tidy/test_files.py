"""House rules that hold file by file: size, names, one word per concept, nothing of one machine."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.tidy.source_tree import GENERATED, ROOT, parse, project_files, python_files

LINES_MAX = 400
FUNCTION_LINES_MAX = 60
SHAPELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "manager", "misc", "stuff"}
SHIPPED = ("decoupled_diloco", "syncer_service", "learner_service", "syncerctl")

# An identifier is split at underscores and capitals; none of its words may be one of these.
# "gradient" is the inner optimizer's; what a learner sends is a delta.
OTHER_WORDS_FOR_OUR_CONCEPTS = {
    "worker": "learner, or name the thread",
    "workers": "learners, or name the threads",
    "num": "..._count",
    "nums": "..._count",
    "pseudogradient": "delta",
    "pseudogradients": "deltas",
}
# Names that other people's interfaces dictate.
DICTATED_NAMES = {"max_workers", "num_threads", "worker_count"}

MACHINE_PATHS = re.compile(r"/(work|root|home/[a-z]+|Users|opt/[a-z]+|tmp/[a-z_]+)/")
REGISTRIES = re.compile(r"(pypi|pythonhosted|npmjs|debian)\.(org|com)|--(extra-)?index|--find-links")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b|raise NotImplementedError")
EVERYWHERE = {"a machine": MACHINE_PATHS, "a registry": REGISTRIES, "unfinished work": UNFINISHED}


def text_files() -> Iterator[tuple[str, str]]:
    """Hand-written text files with their text, except this one, which spells out what it looks for."""
    for path in project_files():
        if path == "tests/tidy/test_files.py" or path.startswith(GENERATED):
            continue
        content = (ROOT / path).read_bytes()
        if b"\0" not in content:
            yield path, content.decode("utf-8")


def matches(pattern: re.Pattern[str]) -> list[str]:
    """`path:line text` for every line of every text file that the pattern finds."""
    return [
        f"{path}:{number} {line.strip()[:100]}"
        for path, text in text_files()
        for number, line in enumerate(text.splitlines(), 1)
        if pattern.search(line)
    ]


def test_files_fit_a_reader() -> None:
    lengths = {path: (ROOT / path).read_text(encoding="utf-8").count("\n") for path in python_files()}
    assert {path: lines for path, lines in lengths.items() if lines > LINES_MAX} == {}


def test_functions_fit_a_screen() -> None:
    long = [
        f"{path}:{node.lineno} {node.name} has {(node.end_lineno or 0) - node.lineno + 1} lines"
        for path in python_files()
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if (node.end_lineno or 0) - node.lineno >= FUNCTION_LINES_MAX
    ]
    assert long == []


def test_no_file_is_named_after_nothing() -> None:
    parts = [(path, part) for path in python_files() for part in path.removesuffix(".py").split("/")]
    assert [path for path, part in parts if part in SHAPELESS_NAMES] == []


def test_one_word_per_concept() -> None:
    found = []
    for path in python_files(*SHIPPED):
        source = io.StringIO((ROOT / path).read_text(encoding="utf-8"))
        for token in tokenize.generate_tokens(source.readline):
            if token.type != tokenize.NAME or token.string in DICTATED_NAMES:
                continue
            words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+", token.string)
            for word in (word.lower() for word in words):
                if word in OTHER_WORDS_FOR_OUR_CONCEPTS:
                    better = OTHER_WORDS_FOR_OUR_CONCEPTS[word]
                    found.append(f"{path}:{token.start[0]} {token.string}: say {better}")
    assert found == []


def test_protos_use_signed_integers_and_our_words() -> None:
    refused = re.compile(r"\b(uint32|uint64)\b|\bnum_|\bworker\b")
    protos = [(path, text) for path, text in text_files() if path.endswith(".proto")]
    assert protos
    found = [
        f"{path}:{number} {line.strip()}"
        for path, text in protos
        for number, line in enumerate(text.splitlines(), 1)
        if refused.search(line.split("//")[0])
    ]
    assert found == []


@pytest.mark.parametrize("what", EVERYWHERE)
def test_no_file_names(what: str) -> None:
    assert matches(EVERYWHERE[what]) == []


def test_packages_carry_a_docstring() -> None:
    bare = [
        path
        for path in python_files(*SHIPPED)
        if not path.startswith(GENERATED) and ast.get_docstring(parse(path)) is None
    ]
    assert bare == []
