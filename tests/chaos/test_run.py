"""A short chaos run of a fixed seed: real processes, and no rule is broken."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from chaos.plan import Plan
from chaos.report import lines, summarise
from chaos.run import Run
from chaos.schedule import SYNCER

KINDS = ("kill-learner", "kill-syncer", "kill-syncer-at", "partition", "corrupt", "duplicate")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_short_run_with_faults_breaks_no_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    plan = Plan(tmp_path / "run", seed=1, seconds=34.0, kinds=KINDS, mean_gap_seconds=2.5)
    outcome = Run(plan, print).make()
    summary = summarise(outcome)
    with capsys.disabled():
        print("", *lines(summary), sep="\n")
    assert outcome.violations == []
    kills = Counter(
        "syncer" if done.fault.victim == SYNCER else "learner"
        for done in outcome.injector.done
        if done.fault.kind.startswith("kill") and done.began_at is not None
    )
    assert kills["syncer"] >= 2
    assert kills["learner"] >= 2
    ledger = outcome.evidence.ledger
    assert len(ledger.rounds) >= 20
    merged = {member.learner for row in ledger.rounds for member in row.contributions}
    assert set(plan.learners) <= merged
    assert all(sum(tokens) > 0 for tokens in zip(summary["tokens"]["merged_by_fragment"], strict=True))
