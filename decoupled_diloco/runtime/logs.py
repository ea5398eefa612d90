"""Logs: structured events with stable names, one JSON object a line, or a form for people on a terminal.

An event's name is a word that programs may search for (`round_committed`); everything that varies is a key
beside it. What other libraries log through the standard library takes the same form. Use
`get_logger(__name__)` anywhere; levels follow the names.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections import OrderedDict
from collections.abc import Collection, Hashable, Mapping
from typing import TextIO, TypeAlias

import structlog
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

QUIET_LIBRARIES = ("absl", "asyncio", "grpc", "jax", "orbax", "urllib3", "aiohttp.access")
"""Loggers that start at WARNING, whatever the process's level."""

TRACEBACK_FRAMES_MAX = 20
"""Frames of each exception that a log line shows."""

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


Logger: TypeAlias = structlog.stdlib.BoundLogger
"""What `get_logger` returns: `log.info("round_committed", round=7, reason="...")`."""


def get_logger(name: str) -> Logger:
    """A logger; its name decides its level."""
    logger: Logger = structlog.stdlib.get_logger(name)
    return logger


def configure_logs(
    level: str = "info",
    form: str = "auto",
    levels: Mapping[str, str] | None = None,
    *,
    context: Mapping[str, str] | None = None,
    stream: TextIO | None = None,
    details: Collection[str] = (),
) -> None:
    """Sets up the logs of this process. May be called again; the last call holds.

    Args:
        level: Least severe level: debug, info, warning or error.
        form: "json", "human", or "auto": human if the stream is a terminal.
        levels: Levels of single loggers by name.
        context: Keys that every line carries, for example service and learner.
        stream: Where to; default standard error.
        details: Loggers with more lines than people read: in the human form they start at WARNING, unless `level`
            is debug or `levels` names them.
    """
    stream = stream or sys.stderr
    is_human = form == "human" or (form == "auto" and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        _Context(context or {}),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.ExtraAdder(), _name_foreign_event],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(is_human, stream),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(_LEVELS[level])
    chosen = dict.fromkeys(details, "warning") if is_human and level == "info" else {}
    _set_levels(level, {**chosen, **(levels or {})})


def default_logs(level: str = "info") -> None:
    """For use as a library: events go to standard error, unless the program has set structlog up by itself.

    Standard logging, which belongs to the program, is not touched.

    Args:
        level: Least severe level: debug, info, warning or error.
    """
    if not structlog.is_configured():
        structlog.configure(
            processors=[
                structlog.contextvars.merge_contextvars,
                structlog.processors.add_log_level,
                structlog.processors.StackInfoRenderer(),
                structlog.dev.set_exc_info,
                structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
                structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=_write_traceback),
            ],
            wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
            logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        )


_levels_set: set[str] = set()


def _set_levels(level: str, levels: Mapping[str, str]) -> None:
    for name in _levels_set:
        logging.getLogger(name).setLevel(logging.NOTSET)
    _levels_set.clear()
    chosen = {name: max(logging.WARNING, _LEVELS[level]) for name in QUIET_LIBRARIES}
    chosen.update({name: _LEVELS[text] for name, text in levels.items()})
    for name, number in chosen.items():
        logging.getLogger(name).setLevel(number)
        _levels_set.add(name)


def _renderers(is_human: bool, stream: TextIO) -> list[Processor]:
    if is_human:
        return [
            structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False, key="time"),
            structlog.dev.ConsoleRenderer(
                colors=stream.isatty(), timestamp_key="time", exception_formatter=_write_traceback
            ),
        ]
    frames = structlog.tracebacks.ExceptionDictTransformer(show_locals=False, max_frames=TRACEBACK_FRAMES_MAX)
    return [structlog.processors.ExceptionRenderer(frames), structlog.processors.JSONRenderer(default=str)]


def _write_traceback(stream: TextIO, exc_info: ExcInfo) -> None:
    """Plain, innermost frames only, and never the values of variables, which may be large or secret."""
    traceback.print_exception(*exc_info, limit=-TRACEBACK_FRAMES_MAX, file=stream)


class _Context:
    """Adds the keys that every line of the process carries, in all threads."""

    def __init__(self, context: Mapping[str, str]) -> None:
        self._context = dict(context)

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        return {**self._context, **event}


def _name_foreign_event(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Other libraries log sentences: they go under "message", and the event gets a stable name."""
    return {**event, "message": event.get("event"), "event": "library_log"}


class ChangeLog:
    """Logs a reason only when it differs from the last one for the same subject, so that a wait is told once.

    Args:
        logger: Where to.
        subjects_max: Most subjects remembered; the one that was quiet for longest is forgotten first.
    """

    def __init__(self, logger: Logger, subjects_max: int = 1024) -> None:
        self._logger = logger
        self._subjects_max = subjects_max
        self._last: OrderedDict[Hashable, str] = OrderedDict()

    def note(self, event: str, reason: str, *, subject: Hashable = None, **values: object) -> bool:
        """Logs at info level if the reason is news.

        Args:
            event: Stable name of the event.
            reason: In words.
            subject: What the reason is about, for example a round; None where the event says it.
            values: Further keys of the line.

        Returns:
            Whether it was news.
        """
        key = (event, subject)
        is_news = self._last.get(key) != reason
        self._last[key] = reason
        self._last.move_to_end(key)
        if len(self._last) > self._subjects_max:
            self._last.popitem(last=False)
        if is_news:
            self._logger.info(event, reason=reason, **values)
        return is_news

    def forget(self, event: str, subject: Hashable = None) -> None:
        """The next reason for this subject is news, whatever it is."""
        self._last.pop((event, subject), None)
