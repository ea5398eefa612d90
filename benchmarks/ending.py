"""How a benchmark is told to end: Ctrl-C, SIGTERM, or a terminal that closes (SIGHUP). All clean up what they began."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ended(KeyboardInterrupt):
    """A signal that asks to end came.

    Attributes:
        number: which.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def status_of(error: KeyboardInterrupt) -> int:
    """The exit status of a program that a signal has ended: 128 and its number, 130 after Ctrl-C."""
    return 128 + (error.number if isinstance(error, Ended) else signal.SIGINT)


def _raise(number: int, frame: object) -> None:
    raise Ended(number)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP raise `Ended` within the block, as Ctrl-C raises KeyboardInterrupt.

    A signal that was ignored stays so (nohup). To be used in the main thread.
    """
    before = {number: signal.getsignal(number) for number in SIGNALS[1:]}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Nothing that asks to end disturbs the block, which takes seconds; it is not made up for."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
