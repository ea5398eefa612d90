"""Where checkpoints and mirrors lie: a folder on a local disk, or one behind any fsspec URL.

Paths are relative to the folder, with slashes. A file is there as a whole or not at all: on a local disk it is written
aside, synced and renamed, in an object store it is there once its upload is complete. Every method blocks; what goes
wrong arrives as the exception of the operating system or of the file system's library.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, Protocol

import fsspec
from fsspec.implementations.local import LocalFileSystem

from syncer_service.export import write_atomically
from syncer_service.store.payloads import make_folder, sync_folder

PIECE_BYTES: Final = 8 << 20
"""Bytes that are read, written or hashed at a time."""

REST_SHARE: Final = 2.0
"""Pause after each piece, in the time that it took to write."""

Pieces = Sequence[memoryview]


class StorageFolder(Protocol):
    """A folder."""

    def place(self, path: str = "") -> str:
        """The folder or what lies in it, for people."""

    def write(self, path: str, pieces: Pieces) -> None:
        """Writes a file, in place of one that may be there."""

    def read(self, path: str) -> bytes:
        """A small file.

        Raises:
            FileNotFoundError: It is not there.
        """

    def opened(self, path: str) -> Any:
        """A context: a descriptor for reading the file at any offset.

        Raises:
            FileNotFoundError: It is not there.
        """

    def names(self, path: str = "") -> list[str]:
        """Names of what lies directly in it, sorted; none if it is not there."""

    def remove(self, path: str) -> None:
        """Removes a file; one that is not there is removed already."""

    def remove_folder(self, path: str) -> None:
        """Removes a folder with all that lies in it; one that is not there is removed already."""


def open_folder(url: str, *, rests: bool = False) -> StorageFolder:
    """The folder that a path or URL names; it need not be there yet.

    Args:
        url: A path, or a URL of any kind that fsspec knows.
        rests: Leaves a local disk to others for most of the time while it writes.

    Raises:
        ValueError: No file system of that kind is known.
        ImportError: The package for that kind of file system is not installed.
    """
    # A listing of another process's files, or one from before ours, would be wrong for as long as it is kept.
    system, path = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    if isinstance(system, LocalFileSystem):
        return _LocalFolder(Path(path), rests)
    return _RemoteFolder(system, path.rstrip("/"), url.rstrip("/"))


def check_url(url: str) -> str:
    """Validator: returns a path or URL unchanged; nothing is looked at but the URL itself.

    Raises:
        ValueError: There is no such kind of file system, or its package is not installed.
    """
    protocol = url.partition("://")[0] if "://" in url else "file"
    try:
        fsspec.get_filesystem_class(protocol)
    except (ValueError, ImportError) as error:
        raise ValueError(f"a path, or a URL of a kind that is installed here ({error})") from error
    return url


class _LocalFolder:
    """On a disk of this machine."""

    def __init__(self, folder: Path, rests: bool) -> None:
        self._folder = folder
        self._rests = rests

    def place(self, path: str = "") -> str:
        return str(self._folder / path)

    def write(self, path: str, pieces: Pieces) -> None:
        target = self._folder / path
        _make_folders(target.parent)

        def write(aside: Path) -> None:
            with aside.open("wb", buffering=0) as file:
                for piece in _cut(pieces):
                    started = time.monotonic()
                    _write_all(file, piece)
                    # A commit's sync has to wait for what is written on the same disk and not synced yet.
                    os.fdatasync(file.fileno())
                    if self._rests:
                        time.sleep(REST_SHARE * (time.monotonic() - started))

        write_atomically(target, write)
        sync_folder(target.parent)

    def read(self, path: str) -> bytes:
        return (self._folder / path).read_bytes()

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        descriptor = os.open(self._folder / path, os.O_RDONLY)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def names(self, path: str = "") -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(os.listdir(self._folder / path))
        return []

    def remove(self, path: str) -> None:
        (self._folder / path).unlink(missing_ok=True)

    def remove_folder(self, path: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self._folder / path)


class _RemoteFolder:
    """Behind an fsspec file system."""

    def __init__(self, system: Any, root: str, url: str) -> None:
        self._system = system
        self._root = root
        self._url = url

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}" if path else self._root

    def place(self, path: str = "") -> str:
        return f"{self._url}/{path}" if path else self._url

    def write(self, path: str, pieces: Pieces) -> None:
        try:
            file = self._open_new(path)
        except FileNotFoundError:  # a file system with real folders
            self._system.makedirs(self._at(path).rpartition("/")[0], exist_ok=True)
            file = self._open_new(path)
        try:
            for piece in _cut(pieces):
                file.write(piece)
        except BaseException:
            # Closing it, which its destructor does too, would make what was written so far a file.
            with suppress(Exception):
                file.discard()
                file.closed = True
            raise
        file.close()

    def _open_new(self, path: str) -> Any:
        return self._system.open(self._at(path), "wb", block_size=PIECE_BYTES)

    def read(self, path: str) -> bytes:
        return bytes(self._system.cat_file(self._at(path)))

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """By way of a file without a name on the local disk, so that no more than a piece is in memory."""
        with tempfile.TemporaryFile() as local:
            with self._system.open(self._at(path), "rb", block_size=PIECE_BYTES, cache_type="none") as remote:
                shutil.copyfileobj(remote, local, PIECE_BYTES)
            local.flush()
            yield local.fileno()

    def names(self, path: str = "") -> list[str]:
        self._system.invalidate_cache()
        try:
            found = self._system.ls(self._at(path), detail=False)
        except FileNotFoundError:
            return []
        return sorted({name.rstrip("/").rpartition("/")[2] for name in found} - {""})

    def remove(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._system.rm_file(self._at(path))

    def remove_folder(self, path: str) -> None:
        self._system.invalidate_cache()
        with suppress(FileNotFoundError):
            self._system.rm(self._at(path), recursive=True)


def _make_folders(folder: Path) -> None:
    """Makes a folder and those above it, each durable."""
    if not folder.is_dir():
        _make_folders(folder.parent)
        make_folder(folder)


def _cut(pieces: Pieces) -> Iterator[memoryview]:
    for piece in pieces:
        flat = piece.cast("B")
        for start in range(0, flat.nbytes, PIECE_BYTES):
            yield flat[start : start + PIECE_BYTES]


def _write_all(file: Any, piece: memoryview) -> None:
    done = 0
    while done < piece.nbytes:
        done += file.write(piece[done:])
