"""What is lost with a disk, against the lag of its mirror as the syncer had shown it."""

from __future__ import annotations

import re
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from chaos.evidence import Ledger
from syncer_service.checkpoint_files import read_manifest
from syncer_service.checkpoint_storage import open_folder

SECONDS_MAX: Final = 2.0
"""For one look at the metrics."""


@dataclass(frozen=True, slots=True)
class ShownLag:
    """The syncer's own figures at one look: committed rounds, and how many of them the mirror did not have."""

    committed_count: int
    lag_rounds: int


def mirror_lag(http_port: int) -> ShownLag | None:
    """Asks the syncer's metrics; None if it does not answer, or shows none."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{http_port}/metrics", timeout=SECONDS_MAX) as answer:
            return lag_in(answer.read().decode())
    except OSError:
        return None


def lag_in(metrics: str) -> ShownLag | None:
    """The two figures in a page of metrics."""
    committed = re.search(r'^\w*_rounds_total\{[^}]*"committed"\} ([0-9.e+]+)$', metrics, re.MULTILINE)
    lag = re.search(r"^\w*_mirror_lag_rounds ([0-9.e+]+)$", metrics, re.MULTILINE)
    if committed is None or lag is None:
        return None
    return ShownLag(int(float(committed[1])), int(float(lag[1])))


def compare_loss(lost: Ledger, mirrored_count: int, shown: ShownLag | None) -> tuple[str, bool]:
    """Compares a lost disk with its mirror.

    Args:
        lost: the ledger on the disk.
        mirrored_count: committed rounds that the mirror holds.
        shown: what the syncer had shown just before.

    Returns:
        What was lost, in words, and whether that is within the lag that was shown.
    """
    committed = lost.state.committed_count
    loss = committed - mirrored_count
    if shown is None:
        return f"{loss} of {committed} rounds were lost with the disk; the syncer had shown no lag", True
    later = committed - shown.committed_count
    text = (
        f"{loss} of {committed} rounds were lost with the disk; the mirror's lag had been shown as {shown.lag_rounds}, "
        f"and {later} were committed after that look"
    )
    return text, loss <= shown.lag_rounds + later


def mirrored_count(mirror: Path) -> int:
    """Committed rounds that a mirror holds."""
    return read_manifest(open_folder(str(mirror)), "").state.committed_count
