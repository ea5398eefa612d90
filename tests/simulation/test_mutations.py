"""The simulation finds every bug that is planted, within a bounded number of seeds. docs/simulation.md has the table.

`python -m tests.simulation.test_mutations` prints it.
"""

from __future__ import annotations

import pytest

from simulator.rule import BrokenRuleError
from simulator.walk import Walk
from tests.simulation.mutations import MUTATIONS, Mutation

SEEDS_MAX = 150
SECONDS = 60.0


def caught_by(mutation: Mutation, seeds_max: int = SEEDS_MAX) -> tuple[str, int] | None:
    """The rule that a planted bug breaks first, and the seeds that it took; None if it breaks none."""
    with mutation.planted():
        for seed in range(seeds_max):
            try:
                Walk(seed).go(SECONDS)
            except BrokenRuleError as error:
                return error.rule, seed + 1
            except Exception as error:  # a planted bug may also make the program fail
                return f"(no exception) {type(error).__name__}", seed + 1
    return None


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.bug)
def test_a_planted_bug_is_found(mutation: Mutation) -> None:
    assert caught_by(mutation) is not None


if __name__ == "__main__":
    for planted in MUTATIONS:
        rule, seeds = caught_by(planted) or ("nothing", SEEDS_MAX)
        print(f"| {planted.bug} | {rule} | {seeds} |", flush=True)
