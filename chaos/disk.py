"""The disk of the syncer's state, and how it becomes full.

Where this process may mount, it is a small tmpfs that a ballast file fills up, so that the syncer meets what a full
disk really does, SQLite included. Elsewhere a failpoint raises what a full disk raises, before a payload is synced.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
from pathlib import Path
from typing import Final

SIZE_BYTES: Final = 256 * 1024**2
PIECE: Final = b"\0" * 65536


class Disk:
    """A folder that can be filled. A context manager.

    Args:
        folder: what the syncer writes to; made here.
        flag: the file that arms the failpoint.
    """

    def __init__(self, folder: Path, flag: Path) -> None:
        self._folder = folder
        self._flag = flag
        self.is_real = False
        """Whether it is a file system of its own."""

    def __enter__(self) -> Disk:
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._folder.is_mount():  # an earlier run was killed
            self._unmount()
        if os.geteuid() == 0:
            command = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "chaos", str(self._folder)]
            with contextlib.suppress(OSError):
                self.is_real = subprocess.run(command, capture_output=True, check=False).returncode == 0
        return self

    def __exit__(self, *_: object) -> None:
        self.empty()
        if self.is_real:
            self._unmount()

    def _unmount(self) -> None:
        subprocess.run(["umount", "--lazy", str(self._folder)], capture_output=True, check=False)

    @property
    def _ballast(self) -> Path:
        return self._folder / "ballast"

    def fill(self) -> None:
        """From now on nothing more goes onto it."""
        if not self.is_real:
            self._flag.touch()
            return
        with self._ballast.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(PIECE)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def empty(self) -> None:
        """There is room again."""
        self._flag.unlink(missing_ok=True)
        self._ballast.unlink(missing_ok=True)
