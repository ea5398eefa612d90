"""Logs: stable events, one JSON object a line, levels per logger, and reasons told once."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from decoupled_diloco.runtime.logs import ChangeLog, configure_logs, default_logs, get_logger


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    root = logging.getLogger()
    before = (root.handlers[:], root.level)
    yield
    root.handlers[:], level = before
    root.setLevel(level)
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_object_with_event_time_level_and_context() -> None:
    stream = io.StringIO()
    configure_logs(context={"service": "syncer"}, stream=stream)
    get_logger("syncer.driver").info("round_committed", round=7, members=["a", "b"], text="line\nbreak")
    (line,) = lines(stream)
    time = line.pop("time")
    assert time.endswith("Z")
    assert line == {
        "event": "round_committed",
        "level": "info",
        "logger": "syncer.driver",
        "members": ["a", "b"],
        "round": 7,
        "service": "syncer",
        "text": "line\nbreak",
    }


def test_exceptions_stay_on_one_line() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    get_logger("x").error("task_died", exc_info=ValueError("boom"))
    (line,) = lines(stream)
    assert line["exception"][0]["exc_value"] == "boom"


def test_a_library_that_logs_by_itself_shows_no_values_of_variables(capsys: pytest.CaptureFixture[str]) -> None:
    structlog.reset_defaults()
    default_logs()
    secret = "token-" + "1234"
    try:
        raise ValueError("boom")
    except ValueError:
        get_logger("x").exception("task_died", number=len(secret))
    text = capsys.readouterr().err
    assert "task_died" in text
    assert "ValueError: boom" in text
    assert "token-1234" not in text


@pytest.mark.parametrize("form", ["human", "json"])
def test_tracebacks_are_short_and_hold_no_values_of_variables(form: str) -> None:
    def dive(depth: int) -> None:
        secret = "token-" + "1234"
        if depth == 0:
            raise ValueError("boom")
        dive(depth - 1)
        del secret

    stream = io.StringIO()
    configure_logs(form=form, stream=stream)
    try:
        dive(200)
    except ValueError:
        get_logger("x").exception("task_died")
        logging.getLogger("somelib").exception("that failed")
    text = stream.getvalue()
    assert text.count("boom") >= 2
    assert "token-1234" not in text
    assert "secret =" not in text.replace('secret = "token-"', "")
    assert len(text.splitlines()) < 120
    assert len(text) < 20_000


def test_levels_hold_per_logger_and_below_it() -> None:
    stream = io.StringIO()
    configure_logs("warning", levels={"app.store": "debug"}, stream=stream)
    get_logger("app.store.disk").debug("wrote")
    get_logger("app.driver").info("not_seen")
    get_logger("app.driver").warning("seen")
    assert [line["event"] for line in lines(stream)] == ["wrote", "seen"]
    configure_logs("warning", stream=stream)
    get_logger("app.store.disk").debug("not_any_more")
    assert len(lines(stream)) == 2


def test_other_libraries_take_the_same_form_and_noisy_ones_are_quiet() -> None:
    stream = io.StringIO()
    configure_logs("info", stream=stream)
    logging.getLogger("somelib").warning("the %s is full", "disk")
    logging.getLogger("asyncio").info("chatter")
    (line,) = lines(stream)
    assert (line["event"], line["message"], line["logger"]) == ("library_log", "the disk is full", "somelib")


def test_people_get_text_on_request_and_json_when_it_is_not_a_terminal() -> None:
    stream = io.StringIO()
    configure_logs(form="human", stream=stream)
    get_logger("x").info("round_committed", round=7)
    assert "round_committed" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
    stream = io.StringIO()
    configure_logs(form="auto", stream=stream)
    get_logger("x").info("round_committed")
    assert stream.getvalue().startswith("{")


@pytest.mark.parametrize(
    ("form", "level", "levels", "is_seen"),
    [
        ("json", "info", {}, True),
        ("human", "info", {}, False),
        ("human", "debug", {}, True),
        ("human", "info", {"app.rounds": "info"}, True),
        ("human", "error", {}, False),
    ],
)
def test_details_are_for_programs_and_for_people_who_ask(
    form: str, level: str, levels: dict[str, str], is_seen: bool
) -> None:
    stream = io.StringIO()
    configure_logs(level, form, levels, stream=stream, details=("app.rounds",))
    get_logger("app.rounds").info("round_committed")
    assert ("round_committed" in stream.getvalue()) is is_seen
    get_logger("app.rounds").warning("strange")
    assert ("strange" in stream.getvalue()) is (level != "error")


def test_a_reason_is_told_when_it_changes() -> None:
    stream = io.StringIO()
    configure_logs(stream=stream)
    changes = ChangeLog(get_logger("x"), subjects_max=2)
    assert changes.note("round_waits", "1 of 2 have started", subject=4, fragment=1)
    assert not changes.note("round_waits", "1 of 2 have started", subject=4)
    assert changes.note("round_waits", "1 of 2 have started", subject=5)
    assert changes.note("round_waits", "grace window", subject=4)
    changes.forget("round_waits", 4)
    assert changes.note("round_waits", "grace window", subject=4)
    changes.note("round_waits", "x", subject=6)
    changes.note("round_waits", "x", subject=7)
    assert changes.note("round_waits", "grace window", subject=4), "the oldest subject is forgotten"
    assert lines(stream)[0]["reason"] == "1 of 2 have started"
