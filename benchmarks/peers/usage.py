"""What a process takes, read from Linux. Runs where none of this project's dependencies are."""

from __future__ import annotations

from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Processor time of all living threads of a process so far, to the nanosecond."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except OSError:
            continue  # the thread has ended meanwhile
    return total / 1e9


def resident_bytes(pid: int) -> int:
    """Resident memory of a process now."""
    return _status_bytes(pid, "VmRSS")


def peak_bytes(pid: int) -> int:
    """Most resident memory of a process since it began."""
    return _status_bytes(pid, "VmHWM")


def _status_bytes(pid: int, name: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(status.split(f"{name}:")[1].split()[0])
