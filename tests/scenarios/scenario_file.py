"""Scenario files: prose that teaches, commands, and what they print.

A file is a sequence of blocks divided by blank lines. A block is any number of `# ...` lines, and then maybe a command
line, a line `----`, and the lines that the command prints. Running a file prints it anew; `--rewrite` stores that.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass

RULE = "----"
FLAGS = frozenset({"abandoned", "all", "corrupt", "nonfinite", "observer"})


@dataclass(frozen=True, slots=True)
class Block:
    """Prose, a command (empty if there is none), and its output as the file has it."""

    prose: tuple[str, ...]
    command: str
    output: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Command:
    """A command line in parts: `at 1.5 receive a round=1 nonfinite`."""

    name: str
    words: tuple[str, ...]
    options: dict[str, str]
    flags: frozenset[str]
    at: float | None

    def flag(self, word: str) -> bool:
        return word in self.flags

    def number(self, option: str, default: float) -> float:
        return float(self.options.get(option, default))

    def count(self, option: str, default: int) -> int:
        return int(self.options.get(option, default))


def parse_command(line: str) -> Command:
    words = shlex.split(line)
    at = None
    if words[0] == "at":
        at, words = float(words[1]), words[2:]
    options = dict(word.split("=", 1) for word in words[1:] if "=" in word)
    plain = [word for word in words[1:] if "=" not in word]
    names = tuple(word for word in plain if word not in FLAGS)
    return Command(words[0], names, options, frozenset(plain) & FLAGS, at)


def parse_blocks(text: str) -> Iterator[Block]:
    """The blocks of a file.

    Raises:
        ValueError: a block is not of the form above; the text names its first line.
    """
    for chunk in text.strip("\n").split("\n\n"):
        lines = chunk.strip("\n").split("\n")
        prose = tuple(line for line in lines if line.startswith("#"))
        rest = lines[len(prose) :]
        if any(line.startswith("#") for line in rest) or len(rest) == 1 or (rest and rest[1] != RULE):
            raise ValueError(f"neither prose nor a command with its output: {lines[0]!r}")
        yield Block(prose, rest[0] if rest else "", tuple(rest[2:]))


def run(text: str, execute: Callable[[Command], list[str]]) -> str:
    """The file with the output that its commands print now."""
    blocks = []
    for block in parse_blocks(text):
        lines = list(block.prose)
        if block.command:
            lines += [block.command, RULE, *(execute(parse_command(block.command)) or ["nothing"])]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"
