"""Where the suite and its members put files: checked before anything runs, and gone when it is over.

A member is ended by force where it takes too long, and cannot tidy up then. All that it puts into TMPDIR, into shared
memory or below `runs` lies in folders that the suite has made, and that the suite removes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.ending import undisturbed

ROOT: Final = Path(__file__).resolve().parents[1]
MIB: Final = 1 << 20

FREE_MIB_MIN: Final = 2048
"""In TMPDIR before a full run: states of syncers, and payloads where shared memory is too small."""
FREE_MIB_MIN_QUICK: Final = 200
"""The same of a quick one."""
FULL_MIB: Final = 32
"""A folder with less free space is full: what fails there may fail for that."""

SHARED_MEMORY_VARIABLE: Final = "BENCHMARKS_SHARED_MEMORY"
DISK_VARIABLE: Final = "BENCHMARKS_DISK"
"""Environment of members: a folder in shared memory, and one on the disk of this checkout."""
SHARED_MEMORY: Final = Path("/dev/shm")
DISK: Final = ROOT / "runs"


class PlaceError(ValueError):
    """A folder that does not serve; says which and why."""


def shared_memory() -> Path:
    """Folder in shared memory; may be absent."""
    return Path(os.environ.get(SHARED_MEMORY_VARIABLE, SHARED_MEMORY))


def disk(default: Path) -> Path:
    """Folder on the disk of this checkout: the suite's, else the default."""
    return Path(os.environ.get(DISK_VARIABLE, default))


def free_mib(folder: Path) -> int:
    """Free space for this user, in MiB."""
    return shutil.disk_usage(folder).free // MIB


def lack_of_space(folder: Path) -> str:
    """What to add to the reason of a failure whose files lie in a folder: "" unless it is full."""
    free = free_mib(folder)
    return f"; {folder} is full: {free} MiB free" if free < FULL_MIB else ""


def check_writable(folder: Path) -> None:
    """Makes a folder, and writes to it once.

    Raises:
        PlaceError: it cannot be written.
    """
    if folder.exists() and not folder.is_dir():
        raise PlaceError(f"{folder} cannot be written: it is no folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".probe-") as probe:
            probe.write(bytes(MIB))
            probe.flush()
    except OSError as error:
        raise PlaceError(f"{folder} cannot be written: {error.strerror or error}") from error


def check_temporary(is_quick: bool) -> None:
    """Looks whether TMPDIR has the space that a run takes.

    Raises:
        PlaceError: it has less, or cannot be written.
    """
    asked = os.environ.get("TMPDIR")
    try:
        found = Path(tempfile.gettempdir())
    except OSError as error:
        raise PlaceError(f"no temporary folder can be written: {error.strerror}; TMPDIR may name one") from error
    if asked and not (Path(asked).exists() and found.samefile(asked)):
        raise PlaceError(
            f"TMPDIR={asked}: cannot be written, or is full; a folder with {needed(is_quick)} MiB is right"
        )
    if (free := free_mib(found)) < needed(is_quick):
        kind = "quick" if is_quick else "full"
        raise PlaceError(
            f"{found}: {free} MiB free, a {kind} run takes up to {needed(is_quick)} MiB; TMPDIR names another folder"
        )


def needed(is_quick: bool) -> int:
    """MiB that TMPDIR must have free."""
    return FREE_MIB_MIN_QUICK if is_quick else FREE_MIB_MIN


@contextmanager
def temporary_places() -> Iterator[tuple[Path, Mapping[str, str]]]:
    """Folders that are gone afterwards: one in TMPDIR, and those that the environment of members names."""
    stack = ExitStack()

    def made(parent: Path) -> Path:
        folder = tempfile.TemporaryDirectory(prefix="benchmarks-", dir=parent, ignore_cleanup_errors=True)
        return Path(stack.enter_context(folder))

    try:
        environment = {}
        if os.access(SHARED_MEMORY, os.W_OK):
            environment[SHARED_MEMORY_VARIABLE] = str(made(SHARED_MEMORY))
        DISK.mkdir(exist_ok=True)
        environment[DISK_VARIABLE] = str(made(DISK))
        yield made(Path(tempfile.gettempdir())), environment
    finally:
        with undisturbed():
            stack.close()
