"""Named points at which a process can be made to die, to fail or to wait, for tests of what survives that.

    failpoints.hit("commit.after_payload_sync")

costs one look at an empty dictionary as long as nothing is armed. A program's `__main__` arms what `VARIABLE` of its
environment says: rules with commas between them, each as POINT=ACTION@WHEN; a point may have several.

    ACTION  kill            SIGKILL to the own process
            enospc          raises OSError(ENOSPC), as a full disk does
            delay:SECONDS   waits, whatever else the calling thread had to do
    WHEN    3               at the third time that the point is reached, and never again
            3+              from the third time on
            /path           as long as that file exists

    DECOUPLED_DILOCO_FAILPOINTS="commit.after_payload_sync=kill@3,publish=delay:2@1+"
"""

from __future__ import annotations

import errno
import os
import re
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn

from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.logs import get_logger

log = get_logger(__name__)

VARIABLE: Final = "DECOUPLED_DILOCO_FAILPOINTS"
"""The environment variable that arms them."""

POINTS: Final[Mapping[str, str]] = {
    "commit.in_payload_write": "The first bytes of a merge's payload are written.",
    "commit.before_payload_sync": "A merge's payload is written, but not synced to the disk.",
    "commit.after_payload_sync": "A merge's payload is on the disk; no row names it yet.",
    "commit.in_transaction": "All rows of a commit are written; they are not committed.",
    "commit.after_transaction": "A commit is durable; the machine has not heard of it.",
    "checkpoint.before_manifest": "All payloads of a checkpoint are written; without its manifest it is none yet.",
    "mirror.before_manifest": "The payloads of a newer position are in the mirror; its manifest names an older one.",
    "publish": "A committed version is about to be served and announced.",
    "upload.after_header": "A contribution was admitted; none of its bytes have been read.",
    "upload.before_answer": "A contribution is complete and has its fate; its sender does not know.",
    "join.after_answer": "A learner has its incarnation and has begun nothing with it.",
    "contribution.before_send": "A learner is about to send a contribution, for the first time or again.",
    "download.after_fetch": "A learner holds a new version in host memory; its parameters do not.",
    "recovery.after_fragment": "A learner that starts over has written one of the fragments.",
    "recovery.after_part": "A recovering learner has one part of its optimizer's state from a peer, in host memory.",
}
"""All points, each with where the process stands when it is reached."""

_RULE = re.compile(r"(?P<point>[a-z_.]+)=(?P<action>kill|enospc|delay:(?P<seconds>\d+(\.\d+)?))@(?P<when>\d+\+?|/.+)")


@dataclass(slots=True)
class _Rule:
    """One armed point."""

    action: str
    seconds: float
    nth: int
    is_lasting: bool
    path: str
    lock: threading.Lock = field(default_factory=threading.Lock)
    hit_count: int = 0

    def is_due(self) -> bool:
        """Counts a hit; whether it is one that acts."""
        if self.path:
            return os.path.exists(self.path)
        with self.lock:
            self.hit_count += 1
            return self.hit_count == self.nth or (self.is_lasting and self.hit_count > self.nth)


_armed: dict[str, list[_Rule]] = {}


def hit(point: str) -> None:
    """The process has come to a point of `POINTS`.

    Raises:
        OSError: ENOSPC, where that was armed.
    """
    rules = _armed.get(point)
    if rules is not None:
        for rule in [rule for rule in rules if rule.is_due()]:  # all of them count the hit, whatever the first one does
            _act(point, rule)


def arm(text: str) -> None:
    """Arms what `text` says in place of all that was armed before; an empty text disarms everything.

    Raises:
        ConfigError: the text cannot be read, or names no point of the table.
    """
    rules = [_rule(part.strip()) for part in text.split(",") if part.strip()]
    _armed.clear()
    for point, rule in rules:
        _armed.setdefault(point, []).append(rule)
    if rules:
        log.warning("failpoints_armed", points=text)


def _rule(text: str) -> tuple[str, _Rule]:
    match = _RULE.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"{VARIABLE}: {text!r} cannot be read; write POINT=ACTION@WHEN, for example publish=kill@3, "
            "with the action kill, enospc or delay:SECONDS, and when as 3, 3+ or the path of a file"
        )
    point, action, when = match["point"], match["action"].partition(":")[0], match["when"]
    if point not in POINTS:
        raise ConfigError(f"{VARIABLE}: there is no point {point!r}; there are {', '.join(POINTS)}")
    path = when if when.startswith("/") else ""
    nth = 0 if path else int(when.rstrip("+"))
    return point, _Rule(action, float(match["seconds"] or 0.0), nth, when.endswith("+"), path)


def _act(point: str, rule: _Rule) -> None:
    match rule.action:
        case "kill":
            _die()
        case "enospc":
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} (failpoint {point})")
        case "delay":
            log.warning("failpoint", point=point, delay_seconds=rule.seconds)
            time.sleep(rule.seconds)


def _die() -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("a process survived its SIGKILL")
