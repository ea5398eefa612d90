"""The examples do what they say, as the commands that they show."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

from decoupled_diloco.core.ids import RunPhase
from decoupled_diloco.run_file import run_config
from syncerctl.convert import convert_model
from syncerctl.orbax_tree import OrbaxTree
from tests.integration.syncers import machine_of, syncer

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
ENVIRONMENT = os.environ | {"JAX_PLATFORMS": "cpu"}
MACHINE = re.compile(r"^ {4}(.+)$", re.MULTILINE)


async def run(*arguments: object, cwd: Path = ROOT) -> str:
    """Runs a command to its end; returns what it printed."""
    process = await asyncio.create_subprocess_exec(
        *map(str, arguments),
        cwd=cwd,
        env=ENVIRONMENT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(100):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode == 0, err.decode()[-3000:]
    return out.decode()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "loss_max"), [("bring_your_own_loop", 0.3), ("flax_linen", 0.4), ("equinox", 0.6)])
async def test_loops_of_ones_own_share_a_run(tmp_path, name, loss_max):
    folder = EXAMPLES / name
    config = run_config({}, folder / "run.toml")
    async with syncer(tmp_path, config) as running:
        command = (sys.executable, folder / "train.py", "--syncer", running.addresses.data, "--learner-id")
        printed = await asyncio.gather(run(*command, "alpha"), run(*command, "beta"))
        machine = machine_of(running)
        assert machine.phase is RunPhase.FINISHED
        merged = [sum(record.rounds_merged) for record in machine.membership.everybody()]
        assert max(merged) >= 60
    for text in printed:
        if "last loss" in text:
            assert float(text.split()[-1]) < loss_max
    assert any("all 240 global steps are made" in text for text in printed)


def commands_of(readme: Path) -> list[list[str]]:
    """The commands that a README shows, as argument lists."""
    return [shlex.split(line) for line in MACHINE.findall(readme.read_text())]


@pytest.mark.slow
async def test_the_six_commands_of_two_machines(tmp_path):
    """On loopback, with a short run of a small model; ports and paths aside they are the README's own."""
    readme = commands_of(EXAMPLES / "two_machines" / "README.md")
    assert len(readme) == 6
    await run(*readme[0][:-2], EXAMPLES / "two_machines" / "certificates.sh", "127.0.0.1", cwd=tmp_path)
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    short = ["--set", "run.total_steps=24", "--set", "workload.options.tokenizer=bytes"]
    short += ["--set", f"workload.options.text={tmp_path / 'text.txt'}", "--set", "quorum.minimum=2"]
    port = free_port()

    def adapted(command: list[str]) -> list[str]:
        program = [str(Path(sys.executable).with_name(command[0]))]
        replaced = [
            argument.replace("10.0.0.5:50051", f"localhost:{port}")
            .replace("0.0.0.0:50051", f"127.0.0.1:{port}")
            .replace("examples/", f"{EXAMPLES}/")
            for argument in command[1:]
        ]
        return [*program, *replaced, *short]

    cache = ["--cache-dir", str(tmp_path / "cache")]
    ports = ["--admin-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0", "--output-dir", str(tmp_path / "out")]
    ports += ["--state-dir", str(tmp_path / "state")]
    syncer_command, first, second = readme[1], readme[2], readme[5]
    await asyncio.gather(
        run(*adapted(syncer_command), *ports, cwd=tmp_path),
        run(*adapted(first), *cache, cwd=tmp_path),
        run(*adapted(second), *cache, cwd=tmp_path),
    )
    assert (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.slow
async def test_from_a_maxtext_tree_and_back(tmp_path):
    """The README's commands, with a short run on a text of our own."""
    folder = EXAMPLES / "maxtext_tree"
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    short = ["--set", "run.total_steps=24", "--set", f"workload.options.text={tmp_path / 'text.txt'}"]
    port = free_port()
    build, convert_in, syncer_command, learner_command, convert_out = [
        [argument.replace("examples/", f"{EXAMPLES}/") for argument in command]
        for command in commands_of(folder / "README.md")
    ]

    def program(command: list[str], *more: str) -> list[str]:
        return [str(Path(sys.executable).with_name(command[0])), *command[1:], *more]

    await run(*program(build), cwd=tmp_path)
    await run(*program(convert_in), cwd=tmp_path)
    run_folder = tmp_path / "runs" / "maxtext_tree"
    converted = convert_model(
        str(run_folder / "model.safetensors"), str(run_folder / "untrained"), str(folder / "maxtext_gemma.toml"), True
    )
    assert converted.startswith("11 tensors of ")
    before, after = OrbaxTree(str(run_folder / "checkpoint" / "1000")), OrbaxTree(str(run_folder / "untrained"))
    assert sorted(after.tensors) == sorted(name for name in before.tensors if name.startswith("params/"))
    for name in after.tensors:
        np.testing.assert_array_equal(after.read(name), before.read(name))

    ports = ["--listen", f"127.0.0.1:{port}", "--admin-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0"]
    ports += ["--state-dir", str(tmp_path / "state")]
    learner = ["--syncer", f"127.0.0.1:{port}", "--cache-dir", str(tmp_path / "cache")]
    await asyncio.gather(
        run(*program(syncer_command, *ports, *short), cwd=tmp_path),
        run(*program(learner_command, *learner, *short), cwd=tmp_path),
    )
    await run(*program(convert_out), cwd=tmp_path)
    trained = OrbaxTree(str(run_folder / "exported"))
    assert trained.tensors == after.tensors


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as opened:
        port: int = opened.getsockname()[1]
    return port
