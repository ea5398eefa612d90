"""Processes that do not outlive the one that starts them, even if that one is killed by SIGKILL.

    subprocess.Popen(tied([sys.executable, "-m", "syncer_service", ...]))

As a program, `tied.py PARENT COMMAND...` asks the kernel for SIGKILL at its parent's end (prctl(2),
PR_SET_PDEATHSIG: when the *thread* ends that started it) and becomes the command: same process id, nothing of this one
left in it. A `preexec_fn` would run fork handlers of gRPC and JAX between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


def tied(command: Sequence[str]) -> list[str]:
    """A command line that ends with this process; to be started by a thread that stays."""
    return [sys.executable, "-I", "-S", str(Path(__file__).resolve()), str(os.getpid()), *command]


def main(parent: int, command: Sequence[str]) -> None:
    """Becomes the command; ends at once if the parent has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            sys.exit(f"the parent {parent} has ended")
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
