"""ARCHITECTURE.md says what the code does."""

import re
from pathlib import Path

from decoupled_diloco.core.ids import RoundState
from decoupled_diloco.core.round import TRANSITIONS

ARCHITECTURE = Path(__file__).parents[2] / "ARCHITECTURE.md"


def round_diagram() -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {next(iter(RoundState)).value}"]
    for state in RoundState:
        targets = sorted(TRANSITIONS[state], key=list(RoundState).index)
        lines += [f"    {state.value} --> {target.value}" for target in targets]
        if not targets:
            lines.append(f"    {state.value} --> [*]")
    return "\n".join(lines)


def test_the_diagram_of_a_round_is_the_table_of_its_transitions():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    block = re.search(r"<!-- begin round states -->\n```mermaid\n(.*?)\n```\n<!-- end", text, re.DOTALL)
    assert block is not None
    drawn, generated = block.group(1).splitlines(), round_diagram().splitlines()
    assert sorted(drawn) == sorted(generated)


def test_every_named_file_exists():
    text = ARCHITECTURE.read_text(encoding="utf-8")
    root = ARCHITECTURE.parent
    for name in re.findall(r"`((?:core|arrays|wire|runtime)/\w+\.py)`", text):
        assert (root / "decoupled_diloco" / name).exists(), name
    for name in re.findall(r"`((?:syncer_service|learner_service|tests)/[\w/]+\.py)`", text):
        assert (root / name).exists(), name
