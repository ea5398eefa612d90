"""Processor time by function: stacks from the sampling profiler py-spy, weighed with the time that Linux counted.

py-spy says which Python functions a thread was in, Linux how much processor time each thread took; together they say
what each function took, C code that it called included. Threads without Python code (gRPC's own) count by their name.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.tied import tied

SAMPLES_PER_SECOND: Final = 200

WAITS: Final = frozenset({"wait", "select", "_worker", "get", "_recv", "accept", "_wait_for_tstate_lock"})
"""Functions in which a thread waits; what little time they take goes to those that work."""

OWN_FILES: Final = ("syncer_service/", "learner_service/", "decoupled_diloco/", "benchmarks/")


@dataclass(frozen=True, slots=True)
class Stack:
    """A stack that was seen.

    Attributes:
        thread: id of the thread.
        name: Python's name of it.
        frames: outermost first, "function (path/file.py:line)".
        count: how often.
    """

    thread: int
    name: str
    frames: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a function took.

    Attributes:
        thread: kind of the thread, without its number.
        function: name and file; for threads without Python code, what they are called.
        cpu_seconds: its processor time.
    """

    thread: str
    function: str
    cpu_seconds: float


class Recording:
    """Samples a process for some time, in the background.

    Args:
        py_spy: The program.
        pid: Of the process.
        seconds: How long.
        path: For the stacks.
    """

    def __init__(self, py_spy: Path, pid: int, seconds: float, path: Path) -> None:
        self._path = path
        options = {"--rate": SAMPLES_PER_SECOND, "--duration": round(seconds), "--format": "raw", "--output": path}
        command = [str(py_spy), "record", "--threads", "--nonblocking", "--pid", str(pid)]
        self._process = subprocess.Popen(
            tied([*command, *(str(item) for pair in options.items() for item in pair)]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self._process.poll() is not None

    def stacks(self) -> list[Stack]:
        """What was seen; waits for the end.

        Raises:
            RuntimeError: py-spy could not sample the process.
        """
        output, _ = self._process.communicate()
        if self._process.returncode or not self._path.exists():
            raise RuntimeError(f"py-spy could not sample the process (it needs ptrace, often root): {output[-500:]}")
        return parsed(self._path.read_text(encoding="utf-8").splitlines())


def parsed(lines: Iterable[str]) -> list[Stack]:
    """Stacks from py-spy's raw format, one a line: frames separated by semicolons, a space, the count."""
    stacks = []
    for line in lines:
        text, _, count = line.rpartition(" ")
        head, *frames = text.split(";")
        if (found := re.match(r"thread \((\d+)\): ?(.*)", head)) is not None:
            stacks.append(Stack(int(found[1]), found[2], tuple(frames), int(count)))
    return stacks


def cpu_by_thread(pid: int) -> dict[int, tuple[str, float]]:
    """Name and processor seconds so far of each living thread of a process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            name, spent = (task / "comm").read_text().strip(), (task / "schedstat").read_text().split()[0]
        except OSError:
            continue  # the thread has ended meanwhile
        found[int(task.name)] = (name, int(spent) / 1e9)
    return found


def function_of(frames: Sequence[str]) -> str:
    """The function to which a stack counts: the innermost one, with the one of ours that called it.

    Returns:
        "function (file)", or "function (file) < ours (file)".
    """
    names = [re.sub(r":\d+\)$", ")", frame) for frame in frames]
    own = next((name for name in reversed(names) if any(part in name for part in OWN_FILES)), None)
    if not names:
        return "?"
    return names[-1] if own in (None, names[-1]) else f"{names[-1]} < {own}"


def shares(
    stacks: Sequence[Stack],
    before: Mapping[int, tuple[str, float]],
    after: Mapping[int, tuple[str, float]],
) -> list[Share]:
    """Processor time by function, largest first.

    Args:
        stacks: Samples between the two looks.
        before: What `cpu_by_thread` said at the begin.
        after: What it said at the end.
    """
    took: defaultdict[tuple[str, str], float] = defaultdict(float)
    for thread, (name, late) in after.items():
        spent = late - before.get(thread, (name, 0.0))[1]
        own = [stack for stack in stacks if stack.thread == thread]
        working = [stack for stack in own if not _waits(stack)] or own
        total = sum(stack.count for stack in working)
        kind = re.sub(r"[_-]?\d+$", "", own[0].name if own else name)
        if not total:
            took["", f"threads {kind!r} without Python code"] += spent
        for stack in working:
            took[kind, function_of(stack.frames)] += spent * stack.count / total
    ordered = sorted(took.items(), key=lambda item: item[1], reverse=True)
    return [Share(thread, function, spent) for (thread, function), spent in ordered]


def _waits(stack: Stack) -> bool:
    return bool(stack.frames) and stack.frames[-1].split(" ")[0].rsplit(".", 1)[-1] in WAITS
