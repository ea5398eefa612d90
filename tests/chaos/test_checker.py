"""The checker: silent about a run that went well, and loud about every kind of wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from chaos.checker import RULES, check
from chaos.evidence import Pause
from decoupled_diloco.core.ids import Version
from tests.chaos.recorded_run import RecordedRun


@pytest.fixture
def run() -> RecordedRun:
    """Four rounds, a learner that is killed and comes again, four more."""
    run = RecordedRun()
    for _ in range(4):
        run.round()
    merged_until = run.rows[-1].contributions[1].cursor
    run.join("beta", 1, merged_until)
    for _ in range(4):
        run.round()
    return run


def test_a_run_that_went_well_breaks_no_rule(run):
    assert check(run.evidence()) == []


def change_member(run: RecordedRun, index: int, **changes: object) -> None:
    row = run.rows[index]
    first, *others = row.contributions
    run.rows[index] = replace(row, contributions=(replace(first, **changes), *others))


def twice_in_two_rounds(run: RecordedRun) -> None:
    row = run.rows[2]
    run.rows.append(replace(row, version=Version(1, 9, "copy")))
    run.versions[row.fragment].append(Version(1, 9, "copy"))


def twice_in_one_round(run: RecordedRun) -> None:
    row = run.rows[2]
    run.rows[2] = replace(row, contributions=(*row.contributions, row.contributions[0]))


def a_replacement_that_repeats_what_was_merged(run: RecordedRun) -> None:
    run.join("beta", 1, 0)
    run.round()


def a_member_with_other_counts(run: RecordedRun) -> None:
    change_member(run, 3, token_count=999)


def a_member_that_its_journal_does_not_know(run: RecordedRun) -> None:
    run.incarnations[0].contributions.pop(1)


def a_member_of_an_unknown_incarnation(run: RecordedRun) -> None:
    change_member(run, 3, incarnation=77)


def a_copy_with_more_tokens_than_its_steps(run: RecordedRun) -> None:
    copy = run.incarnations[0].contributions[2]
    run.incarnations[0].contributions[2] = replace(copy, token_count=copy.token_count + 10)


def batches_that_were_left_out(run: RecordedRun) -> None:
    run.join("beta", 1, 1000)


def a_step_that_was_jumped_over(run: RecordedRun) -> None:
    run.incarnations[0].steps.pop(5)


def tokens_booked_twice(run: RecordedRun) -> None:
    run.ledger.merge(0, 10)


def tokens_lost_from_the_books(run: RecordedRun) -> None:
    run.ledger.discarded_tokens["overlap"][1] -= 10


def tokens_that_nobody_made(run: RecordedRun) -> None:
    run.ledger.process(10_000)
    for fragment in range(2):
        run.ledger.discard(fragment, 10_000, "absent")


def lines_that_the_journal_dropped(run: RecordedRun) -> None:
    run.incarnations[0].dropped_count = 3


def a_version_number_used_twice(run: RecordedRun) -> None:
    run.versions[0].append(Version(1, run.versions[0][-1].number, "other"))


def a_learner_that_went_back(run: RecordedRun) -> None:
    applied = run.incarnations[0].applied
    applied.append(applied[0])


def other_values_at_a_learner(run: RecordedRun) -> None:
    applied = run.incarnations[0].applied
    applied[3] = replace(applied[3], digest="other")


def another_name_for_the_same_number(run: RecordedRun) -> None:
    applied = run.incarnations[0].applied
    version = Version(1, applied[3].version.number, "other")
    applied[3] = replace(applied[3], digest="other", version=version)


def a_version_that_the_syncer_does_not_know(run: RecordedRun) -> None:
    applied = run.incarnations[0].applied
    applied.append(replace(applied[-1], version=Version(1, 99, "lost"), digest="lost"))


def a_round_below_quorum(run: RecordedRun) -> None:
    run.quorum_minimum = 3


def a_boundary_that_waited(run: RecordedRun) -> None:
    run.incarnations[0].boundaries.append(Pause(9.0, 4.0, None))


def a_learner_that_held_while_it_was_cut_off(run: RecordedRun) -> None:
    run.incarnations[0].waits.append(Pause(9.0, 0.1, "detached"))


@pytest.mark.parametrize(
    ("rule", "spoil"),
    [
        ("merged once", twice_in_two_rounds),
        ("merged once", twice_in_one_round),
        ("merged once", a_replacement_that_repeats_what_was_merged),
        ("every step accounted for", a_member_with_other_counts),
        ("every step accounted for", a_member_that_its_journal_does_not_know),
        ("every step accounted for", a_member_of_an_unknown_incarnation),
        ("every step accounted for", a_copy_with_more_tokens_than_its_steps),
        ("every step accounted for", batches_that_were_left_out),
        ("every step accounted for", a_step_that_was_jumped_over),
        ("every step accounted for", tokens_booked_twice),
        ("every step accounted for", tokens_lost_from_the_books),
        ("every step accounted for", tokens_that_nobody_made),
        ("every step accounted for", lines_that_the_journal_dropped),
        ("versions grow", a_version_number_used_twice),
        ("versions grow", a_learner_that_went_back),
        ("digests agree", other_values_at_a_learner),
        ("digests agree", another_name_for_the_same_number),
        ("digests agree", a_version_that_the_syncer_does_not_know),
        ("quorum held", a_round_below_quorum),
        ("devices ran", a_boundary_that_waited),
        ("devices ran", a_learner_that_held_while_it_was_cut_off),
    ],
    ids=lambda value: value.__name__ if callable(value) else value,
)
def test_what_is_wrong_breaks_its_rule(run: RecordedRun, rule: str, spoil: Callable[[RecordedRun], None]):
    spoil(run)
    assert rule in {violation.rule for violation in check(run.evidence())}


def test_every_rule_can_be_broken():
    marks = test_what_is_wrong_breaks_its_rule.pytestmark
    assert {rule for mark in marks for rule, _ in mark.args[1]} == set(RULES)


def test_a_killed_learner_may_lack_its_last_lines(run):
    killed = next(incarnation for incarnation in run.incarnations if not incarnation.ends_in_order)
    killed.contributions.pop()
    del killed.steps[-2:]
    assert check(run.evidence()) == []
    del killed.steps[-4:]
    assert check(run.evidence()) != []


def test_a_suspended_process_is_not_blamed_for_the_time(run):
    run.incarnations[0].boundaries.append(Pause(9.0, 4.0, None))
    assert check(run.evidence(disturbed=(("alpha", 6.0, 8.9),))) == []
    assert check(run.evidence(disturbed=(("beta", 6.0, 8.9),))) != []


def test_a_barrier_waits_by_design(run):
    for incarnation in run.incarnations:
        incarnation.is_synchronous = True
        incarnation.waits.append(Pause(9.0, 0.1, "barrier"))
    assert check(run.evidence()) == []


def test_degraded_rounds_are_what_the_policy_says(run):
    run.quorum_minimum = 3
    evidence = run.evidence()
    policy = replace(evidence.ledger.policy, below_quorum="degrade")
    assert check(replace(evidence, ledger=replace(evidence.ledger, policy=policy))) == []


def test_what_a_new_timeline_leaves_out_does_not_count(run):
    """The newest round is undone: its data is merged again, and that is no second time."""
    undone = run.rows[-1]
    fragment = undone.fragment
    run.timeline = 2
    for p in range(2):
        kept = run.versions[p][-2 if p == fragment else -1]
        run.versions[p].append(Version(2, run.versions[p][-1].number + 1, kept.digest))
    for member in undone.contributions:
        run.ledger.merged_tokens[fragment] -= member.token_count
        run.ledger.discard(fragment, member.token_count, "rolled_back")
    assert [row.round for row in run.evidence().ledger.kept_rounds()] == [row.round for row in run.rows[:-1]]
    assert check(run.evidence()) == []
    for slot, member in enumerate(run.rows[-2].contributions):
        run.join(member.learner, slot, member.cursor)
    run.round()
    run.round()
    assert check(run.evidence()) == []
