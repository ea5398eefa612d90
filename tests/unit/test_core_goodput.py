"""Where seconds and tokens go, with figures computed by hand."""

from __future__ import annotations

import pytest

from decoupled_diloco.core.goodput import ActivityClock, GoodputLedger
from decoupled_diloco.core.ids import Activity
from decoupled_diloco.core.status import GoodputFigures
from tests.scenarios.scenario_file import parse_command
from tests.scenarios.syncer_driver import SyncerDriver

CALM = {"stall": "3", "lease": "10"}


def played(*commands: str, **options: str) -> SyncerDriver:
    """A machine with P = 2 and H = 4 after some commands (see `SyncerDriver`); a step makes 10 tokens."""
    driver = SyncerDriver({**CALM, **options})
    for command in commands:
        driver.execute(parse_command(command))
    return driver


def figures_of(driver: SyncerDriver) -> GoodputFigures:
    return driver.machine.status(driver.now).goodput


def seconds_of(driver: SyncerDriver) -> dict[str, float]:
    return {name: value for name, value in figures_of(driver).activity_seconds.items() if value}


# ---- the ledger ----------------------------------------------------------------------------------------------------


def test_the_figures_of_a_hundred_seconds() -> None:
    ledger = GoodputLedger((0.75, 0.25))
    for activity, seconds in ((Activity.COMPUTE, 80.0), (Activity.DATA_WAIT, 12.0), (Activity.LOST, 8.0)):
        ledger.spend(activity, seconds)
    ledger.process(8000)
    ledger.merge(0, 6000)
    ledger.merge(1, 2000)
    ledger.discard(0, 1000, "overlap")
    ledger.discard(1, 4000, "absent")
    figures = ledger.figures()
    assert figures.goodput == pytest.approx(0.8)
    assert figures.tokens_merged == 0.75 * 6000 + 0.25 * 2000
    assert figures.tokens_discarded == {
        "overlap": 750.0,
        "absent": 1000.0,
        "rejected": 0.0,
        "died": 0.0,
        "left": 0.0,
        "rolled_back": 0.0,
    }
    # 8000 tokens in 80 s of computing: 100 s of it would have made 10000.
    assert figures.tokens_ideal == pytest.approx(10_000.0)
    assert figures.token_goodput == pytest.approx(0.5)


def test_losses_that_have_not_ended_count_already() -> None:
    ledger = GoodputLedger((1.0,))
    ledger.spend(Activity.COMPUTE, 60.0)
    assert ledger.figures().goodput == 1.0
    assert ledger.figures(lost_seconds_running=40.0).goodput == pytest.approx(0.6)


def test_participation_is_the_mean_over_rounds() -> None:
    ledger = GoodputLedger((1.0,))
    for members, live in ((2, 4), (3, 3), (4, 3)):  # one member of the last round has died since
        ledger.close_round(members, live)
    assert ledger.figures().participation == pytest.approx((0.5 + 1.0 + 1.0) / 3)


def test_shares_of_the_fragments_may_become_known_later() -> None:
    ledger = GoodputLedger((0.5, 0.5))
    ledger.merge(0, 100)
    ledger.fragment_shares = (0.9, 0.1)
    assert ledger.figures().tokens_merged == 90.0


def test_nothing_has_happened_yet() -> None:
    figures = GoodputLedger((1.0,)).figures()
    assert (figures.goodput, figures.token_goodput, figures.participation, figures.uptime) == (0.0, 0.0, 0.0, 0.0)


def test_every_second_of_a_stop_watch_falls_into_one_activity() -> None:
    clock = ActivityClock(Activity.STARTUP, 10.0)
    clock.switch(Activity.COMPUTE, 12.0)
    clock.switch(Activity.DATA_WAIT, 15.0)
    clock.switch(Activity.COMPUTE, 15.5)
    assert dict(clock.take(17.0)) == {Activity.STARTUP: 2.0, Activity.COMPUTE: 4.5, Activity.DATA_WAIT: 0.5}
    assert dict(clock.take(18.0)) == {Activity.COMPUTE: 1.0}


# ---- seconds -------------------------------------------------------------------------------------------------------


def test_reported_seconds_are_added_up() -> None:
    driver = played(
        "begin a b",
        "at 1 progress a step=1 spans=compute:0.7,data_wait:0.2,sync_stall:0.1",
        "at 2 progress a step=2 spans=compute:1",
        "progress b step=1 spans=compute:1.5,compile:0.5",
    )
    assert seconds_of(driver) == pytest.approx({"compute": 3.2, "data_wait": 0.2, "sync_stall": 0.1, "compile": 0.5})
    assert figures_of(driver).goodput == pytest.approx(3.2 / 4.0)


def test_a_learner_that_was_cut_off_has_computed() -> None:
    """Heard at 1 s and again at 21 s, with 20 steps of a second each: its seconds count, though nobody saw them."""
    driver = played(
        "begin a",
        "at 1 progress a step=1 duration=1 spans=compute:1",
        "detach a",
        "at 21 attach a step=21 spans=compute:20",
    )
    assert seconds_of(driver) == pytest.approx({"compute": 21.0})


def test_a_suspended_process_has_not_computed() -> None:
    """It reports 20.5 s as one step of half a second: the 20 s in which nobody heard of it are lost."""
    driver = played(
        "begin a",
        "at 1 progress a step=2 duration=0.5 spans=compute:1",
        "at 21 progress a step=3 spans=compute:20.5",
    )
    assert seconds_of(driver) == pytest.approx({"compute": 1.5, "lost": 20.0})


def test_a_dead_process_is_lost_until_its_successor_has_started() -> None:
    """Last heard of at 2 s, back at 32 s; 6 of the 30 s between it needed to start."""
    driver = played(
        "begin a",
        "at 2 progress a step=2 spans=compute:2",
        "at 20 status",
    )
    assert seconds_of(driver) == pytest.approx({"compute": 2.0, "lost": 18.0}), "not back yet, but known to be lost"
    for command in ("at 32 join a", "attach a spans=startup:6"):
        driver.execute(parse_command(command))
    assert seconds_of(driver) == pytest.approx({"compute": 2.0, "lost": 24.0, "startup": 6.0})


def test_a_short_silence_is_no_loss() -> None:
    driver = played("begin a", "at 1 progress a step=1 spans=compute:1", "at 3.5 progress a step=2 spans=compute:2.5")
    assert seconds_of(driver) == pytest.approx({"compute": 3.5})


def test_an_observer_spends_nothing() -> None:
    driver = played("begin a", "join w observer", "attach w", "at 1 progress w step=9 spans=compute:9")
    assert seconds_of(driver) == {}
    assert figures_of(driver).tokens_processed == 0


def test_uptime_counts_while_at_least_one_learner_advances() -> None:
    """0 to 4 s both compute; 4 to 6 s only b; 6 to 9 s nobody, 9 to 10 s a again."""
    driver = played(
        "begin a b",
        "at 2 progress a step=2",
        "progress b step=2",
        "at 4 progress a step=4 activity=paused",
        "progress b step=4",
        "at 6 progress a step=4 activity=paused",
        "progress b step=6 activity=paused",
        "at 8 progress a step=4 activity=paused",
        "progress b step=6 activity=paused",
        "at 9 progress a step=4 activity=compute",
        "at 10 progress a step=5",
    )
    assert figures_of(driver).uptime == pytest.approx(7.0 / 10.0)


def test_a_learner_that_falls_silent_advances_until_it_counts_as_stalled() -> None:
    driver = played("begin a", "at 1 progress a step=1", "at 8 status")
    driver.execute(parse_command("timer"))  # at 11 s its lease runs out
    assert driver.now == 11.0
    assert figures_of(driver).uptime == pytest.approx(4.0 / 11.0)


# ---- tokens --------------------------------------------------------------------------------------------------------


def test_tokens_of_two_learners_and_two_fragments() -> None:
    """Both make 3 steps of 10 tokens. Round 1 merges a's first step into fragment 0; b is late."""
    driver = played(
        "begin a b",
        "progress b step=0 duration=5",
        "at 1 upload a round=1 step=1 steps=1",
        "timer",
        "timer",
        "finish_round 1",
        "progress a step=3",
        "progress b step=3",
        "applied a fragment=0",
        "applied b fragment=0",
        last_call="off",
    )
    figures = figures_of(driver)
    assert figures.tokens_processed == 60
    assert figures.tokens_merged == 0.5 * 10
    assert figures.tokens_discarded["overlap"] == 0.5 * 20, "what a made between its copy and the arrival"
    assert figures.tokens_discarded["absent"] == 0.5 * 30, "b was not in the round"
    assert driver.machine.ledger.merged_tokens == [10, 0]
    # Fragment 1 is still open: 60 tokens, one half of the parameters.
    assert figures.tokens_processed == figures.tokens_merged + sum(figures.tokens_discarded.values()) + 0.5 * 60


def test_kept_tokens_stay_open() -> None:
    """carry: of 3 steps the two since the copy are kept, and merged by the next round."""
    driver = played("begin a", "at 1 upload a round=1 step=1 steps=1", "finish_round 1", "progress a step=3")
    machine = driver.machine
    [applied] = driver._applied("a", [0])
    machine.handle(type(applied)(**{**_fields(applied), "kept_token_count": 20}), driver.now)
    assert figures_of(driver).tokens_discarded["overlap"] == 0.0
    driver.execute(parse_command("at 5 upload a round=2 step=3 steps=3"))
    driver.execute(parse_command("finish_round 2"))
    driver.execute(parse_command("at 6 upload a round=3 step=5 steps=4"))
    driver.execute(parse_command("at 7 finish_round 3"))
    assert machine.ledger.merged_tokens == [10 + 40, 30]


def _fields(event: object) -> dict[str, object]:
    return {name: getattr(event, name) for name in type(event).__dataclass_fields__}  # type: ignore[attr-defined]


def test_a_commit_is_booked_even_if_the_report_of_the_apply_before_it_comes_late() -> None:
    driver = played(
        "begin a",
        "at 1 upload a round=1 step=1 steps=1",
        "finish_round 1",
        "at 3 upload a round=2 step=3 steps=3",
        "finish_round 2",
        # It applied fragment 0 after step 2, and now contributes steps 3 to 5; the report of the apply is on its way.
        "at 5 upload a round=3 step=5 steps=3",
        "finish_round 3",
    )
    assert driver.machine.ledger.merged_tokens == [10 + 30, 30]
    assert driver.machine.ledger.discarded_tokens["overlap"] == [10, 0]


@pytest.mark.parametrize(("fate", "merged", "died"), [("finish_round 1", 10, 0), ("commit_failed 1", 0, 10)])
def test_tokens_of_a_replaced_learner_wait_for_the_merge_under_way(fate: str, merged: int, died: int) -> None:
    driver = played("begin a", "at 1 upload a round=1 step=1 steps=1", "join a")
    assert driver.machine.ledger.discarded_tokens["died"] == [0, 10]
    driver.execute(parse_command(fate))
    assert driver.machine.ledger.merged_tokens == [merged, 0]
    assert driver.machine.ledger.discarded_tokens["died"] == [died, 10]


def test_when_the_run_ends_nothing_is_open() -> None:
    driver = played(
        "begin a b",
        "at 1 upload a b round=1 step=1 steps=1",
        "finish_round 1",
        "finish enough",
        "upload a b round=2 step=1 steps=1",
        "finish_round 2",
        "decline a round=3 reason=zero_steps",
        "decline b round=3 reason=zero_steps",
    )
    ledger = driver.machine.ledger
    assert driver.machine.phase == "finished"
    for fragment in (0, 1):
        discarded = sum(tokens[fragment] for tokens in ledger.discarded_tokens.values())
        assert ledger.tokens_processed == ledger.merged_tokens[fragment] + discarded
