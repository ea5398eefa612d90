"""Reading journals: what several processes of one learner have written one after the other."""

from __future__ import annotations

import numpy as np

from chaos.evidence import read_journal, read_journals
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.learner_effects import Apply, Copy
from decoupled_diloco.core.policy import Policy
from learner_service.journal import Journal
from learner_service.syncer_client import Joined


def joined(incarnation: int, slot: int = 0, cursor: int = 0) -> Joined:
    return Joined("run", incarnation, Policy(), (), slot, cursor, 0, False, True)


def test_what_a_journal_wrote_is_read_back_by_incarnation(tmp_path):
    path = tmp_path / "alpha.jsonl"
    first = Journal(path, "alpha")
    first.joined(1, joined(4, slot=2, cursor=10))
    for step in (1, 2):
        first.step(1, step, 10 + step, 8)
        first.boundary(1, None)
    version = Version(1, 3, "d3")
    first.contribution(1, 17, Copy(0, version, 2, 16, 2, 16, 12))
    first.fate(1, 17, 0, "accepted")
    values = np.arange(5, dtype=np.float32)
    first.applied(1, Apply(0, version, 9), values, 2, 16)
    first.recovery(1, "because")
    first.joined(2, joined(7, slot=2, cursor=12))  # had to join again, in the same process
    first.step(2, 1, 13, 8)
    first.close()
    second = Journal(path, "alpha")
    second.joined(1, joined(9, slot=2, cursor=13))
    second.step(1, 1, 14, 8)
    second.waited(1, "recovering", 0.5)
    second.is_on = False  # killed: nothing says that it ended
    second.close()
    with path.open("a") as file:
        file.write('{"t":9.0,"kind":"st')

    four, seven, nine = read_journal(path)
    assert [(i.number, i.slot, i.cursor, i.ends_in_order) for i in (four, seven, nine)] == [
        (4, 2, 10, True),
        (7, 2, 12, True),
        (9, 2, 13, False),
    ]
    assert [(s.local_step, s.cursor, s.total_tokens) for s in four.steps] == [(1, 11, 8), (2, 12, 16)]
    [copy] = four.contributions
    assert (copy.round, copy.base, copy.step_count, copy.total_token_count) == (17, version, 2, 16)
    assert four.fates == {17: ["accepted"]}
    assert (four.applied[0].version, four.recovery_count, len(four.boundaries)) == (version, 1, 2)
    assert four.applied[0].digest != version.digest  # of the values, not of the name
    assert [wait.hold for wait in nine.waits] == ["recovering"]


def test_incarnations_of_all_learners_come_in_the_order_of_their_joins(tmp_path):
    for name, number in (("beta", 1), ("alpha", 2)):
        journal = Journal(tmp_path / f"{name}.jsonl", name)
        journal.joined(1, joined(number))
        journal.close()
    paths = sorted(tmp_path.glob("*.jsonl"))
    assert [incarnation.learner for incarnation in read_journals(paths)] == ["beta", "alpha"]
