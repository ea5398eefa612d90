"""Writes the state directory of this release for later ones to open: `python -m tests.unit.store_fixture`.

One is kept of every schema version, in tests/fixtures/state-v<version>, with what is in it beside it as JSON. A fixture
is written once, with the release that brings the schema, and never again.
"""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from decoupled_diloco.arrays.digest import state_digest
from decoupled_diloco.core.effects import Absentee, CloseRound
from decoupled_diloco.core.ids import Fate
from decoupled_diloco.core.plain import to_plain
from syncer_service.store.durable import DurableStore
from syncer_service.store.schema import SCHEMA_VERSION
from tests.unit.store_cases import POLICY, TestRun

FIXTURES = Path(__file__).parents[1] / "fixtures"


def write(folder: Path) -> None:
    """Two starts: commits with segments of both kinds, an abandoned round, a round that the state does not know."""
    run = TestRun(folder, base_interval=3).begin().commits(7)
    run.store.record_abandoned(
        CloseRound(8, 1, False, (), 7, "nothing finite is left", (Absentee("beta", "not finite", Fate.NONFINITE),))
    )
    run.close()
    run.booked(run.open().restored())
    run.store.begin("test", {"run.id": "test", "outer.learning_rate": "0.6"}, POLICY.fragment_count)
    run.commits(5)
    run.close()


def describe(store: DurableStore) -> dict:
    """What a store holds, to compare with."""
    restored = store.restored()
    return {
        "state": to_plain(restored.state),
        "newer": to_plain(restored.newer),
        "fragments": {
            str(fragment): [str(commit.version), commit.version.digest, state_digest(commit.state), commit.global_step]
            for fragment, commit in restored.fragments.items()
        },
        "model": to_plain(restored.model),
        "config_values": restored.config_values,
        "losses": list(restored.losses),
    }


def main() -> None:
    folder = FIXTURES / f"state-v{SCHEMA_VERSION}"
    shutil.rmtree(folder, ignore_errors=True)
    with (
        mock.patch("syncer_service.store.ledger.time", SimpleNamespace(time=lambda: 1.0)),
        mock.patch("syncer_service.store.ledger.socket", SimpleNamespace(gethostname=lambda: "host")),
        mock.patch("syncer_service.store.ledger.os", SimpleNamespace(getpid=lambda: 1)),
        mock.patch("syncer_service.store.ledger.uuid.uuid4", return_value=SimpleNamespace(hex="0123456789abcdef" * 2)),
    ):
        write(folder)
    (folder / "lock").unlink()
    copy = folder.with_suffix(".copy")
    shutil.copytree(folder, copy)
    store = DurableStore(copy, POLICY)
    text = json.dumps(describe(store), indent=1, sort_keys=True) + "\n"
    store.close()
    shutil.rmtree(copy)
    folder.with_suffix(".json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
