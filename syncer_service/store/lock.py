"""One syncer per state directory: an advisory lock, held as long as the process lives.

The lock is the system's (`flock`), so it goes with the process however that ends. On file systems that do not carry it
from host to host the epoch in the ledger is what stops a syncer that was replaced.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from pathlib import Path
from typing import Final

from decoupled_diloco.runtime.config import ConfigError

LOCK_NAME: Final = "lock"


class StateError(ConfigError):
    """A state directory cannot be used as it is; the text says what to do."""


class DirectoryLock:
    """Holds a state directory for this process.

    Args:
        folder: The directory; it exists.

    Raises:
        StateError: Another process holds it.
        OSError: The lock file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(os.pread(self._descriptor, 4096, 0))
            os.close(self._descriptor)
            raise StateError(
                f"the state directory {folder} is in use by another syncer{holder}; stop that one first, "
                "or give this one a directory of its own with --state-dir"
            ) from None
        except OSError:
            os.close(self._descriptor)
            raise
        text = json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode() + b"\n"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text, 0)

    def release(self) -> None:
        """Lets another process have it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _holder(text: bytes) -> str:
    """Who has it, as far as that can be read."""
    try:
        known = json.loads(text)
        return f" (process {known['pid']} on host {known['host']})"
    except (ValueError, TypeError, KeyError):
        return ""
