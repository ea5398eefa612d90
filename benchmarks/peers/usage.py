"""What a process takes, read from Linux. Runs where none of this project's dependencies are."""

from __future__ import annotations

import os
import resource
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Processor time of all living threads of a process so far, to the nanosecond."""
    total = 0
    for task in _tasks(pid):
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue  # the thread has ended meanwhile
    return total / 1e9


def _tasks(pid: int) -> list[Path]:
    """Threads of a process; none once it has ended."""
    try:
        return list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:
        return []


def used_cpu_seconds() -> float:
    """Processor time of this process and of the children that it has waited for."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(entry.ru_utime + entry.ru_stime for entry in usage)


def descendants(pid: int) -> list[int]:
    """Living children of a process, their children, and so on."""
    found = []
    for task in _tasks(pid):
        try:
            children = [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue  # the thread has ended meanwhile
        for child in children:
            found += [child, *descendants(child)]
    return found


def family_cpu_seconds() -> float:
    """Processor time of this process and of its descendants, which some libraries start."""
    return used_cpu_seconds() + sum(cpu_seconds(pid) for pid in descendants(os.getpid()))


def family_peak_bytes() -> int:
    """Most resident memory of this process and of each of its living descendants since they began, added up."""
    return sum(peak_bytes(pid) for pid in (os.getpid(), *descendants(os.getpid())))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process now."""
    return _status_bytes(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """Most resident memory of a process since it began."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, name: str) -> int:
    """A line of a process's status; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    _, found, rest = status.partition(f"{name}:")
    return 1024 * int(rest.split()[0]) if found else 0
