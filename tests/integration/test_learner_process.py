"""The commands: exit codes, messages of one paragraph, signals, and the warm-up."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from decoupled_diloco.core.ids import LearnerState, RunPhase
from tests.integration.syncers import config_of, machine_of, syncer, until

ROOT = Path(__file__).resolve().parents[2]
SYNTHETIC = {"factory": "learner_service.workloads.synthetic:factory", "options": {"parameter_count": 500}}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One compilation cache for all processes of this file."""
    return tmp_path_factory.mktemp("cache")


def write_run_file(folder: Path, **sections: dict[str, object]) -> Path:
    """The run file that gives `config_of(**sections)`."""
    config = config_of(**sections)
    lines = []
    for name, text in config.agreed_values().items():
        lines.append(f"{name} = {text}")
    path = folder / "run.toml"
    path.write_text("\n".join(line for line in lines if not line.endswith("= {}")) + "\n")
    return path


Start = Callable[..., Awaitable[asyncio.subprocess.Process]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a program; what still runs after the test is killed."""
    started: list[asyncio.subprocess.Process] = []

    async def start(module: str, *arguments: object, **variables: str) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            *map(str, arguments),
            cwd=ROOT,
            env=os.environ | {"JAX_PLATFORMS": "cpu"} | variables,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def ended(process: asyncio.subprocess.Process, seconds: float = 60.0) -> tuple[int, str, str]:
    async with asyncio.timeout(seconds):
        out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


def paragraph(err: str, program: str = "decoupled-diloco-learner") -> str:
    """What the operator reads: the part of standard error that is no log."""
    assert "Traceback" not in err
    [line] = [line for line in err.splitlines() if line.startswith(program)]
    return line


async def test_no_module_of_that_name_is_said_in_one_paragraph(tmp_path, cache, start):
    run_file = write_run_file(tmp_path, workload={"factory": "no_such_module:factory"})
    code, _, err = await ended(await start("learner_service", "--run-file", run_file, "--cache-dir", cache))
    assert code == 2
    assert "workload.factory = 'no_such_module:factory'" in paragraph(err)


@pytest.mark.slow
async def test_the_warm_up_prints_the_step_time_and_fills_the_cache(tmp_path, cache, start):
    run_file = write_run_file(tmp_path, workload=SYNTHETIC)
    process = await start("learner_service", "warm", "--run-file", run_file, "--cache-dir", tmp_path / "cache")
    code, out, err = await ended(process)
    assert code == 0, err
    figures = json.loads(out.splitlines()[-1])
    assert figures["step_seconds"] > 0
    assert any((tmp_path / "cache" / "xla").iterdir())


@pytest.mark.slow
async def test_two_learners_and_an_evaluator_see_a_run_to_its_end(tmp_path, cache, start):
    sections = {"run": {"total_steps": 160, "seed": 1}, "workload": SYNTHETIC, "quorum": {"minimum": 2}}
    run_file = write_run_file(tmp_path, **sections)
    async with syncer(tmp_path, config_of(**sections)) as running:
        common = ("--run-file", run_file, "--cache-dir", cache, "--syncer", running.addresses.data)
        learners = [
            await start("learner_service", *common, "--learner-id", name, "--step-seconds-min", 0.03) for name in "ab"
        ]
        output = tmp_path / "evaluations.jsonl"
        evaluator = await start("learner_service.evaluator", *common, "--output-file", output, "--interval-steps", 8)
        for process in [*learners, evaluator]:
            code, _, err = await ended(process)
            assert code == 0, err
        machine = machine_of(running)
        assert machine.phase is RunPhase.FINISHED
        assert machine.evaluation_global_step == 160
        assert set(machine.evaluation) == {"loss"}
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    assert lines[-1]["global_step"] == 160
    assert lines[-1]["loss"] < lines[0]["loss"]


@pytest.mark.slow
async def test_a_signal_makes_the_learner_leave_in_good_order(tmp_path, cache, start):
    sections = {"run": {"total_steps": 0}, "workload": SYNTHETIC}
    run_file = write_run_file(tmp_path, **sections)
    async with syncer(tmp_path, config_of(**sections)) as running:
        arguments = ("--run-file", run_file, "--cache-dir", cache, "--syncer", running.addresses.data)
        process = await start("learner_service", *arguments, "--learner-id", "a", "--step-seconds-min", 0.02)
        await until(running, lambda: machine_of(running).rounds.committed_count >= 2)
        process.send_signal(signal.SIGTERM)
        code, _, err = await ended(process)
        assert code == 0, err
        machine = machine_of(running)
        state, _ = machine.membership.learners["a"].state(machine.policy, running.serving.clock.now())
        assert state is LearnerState.LEFT


@pytest.mark.slow
async def test_another_run_file_and_a_newer_process_end_with_their_own_exit_codes(tmp_path, cache, start):
    sections = {"run": {"total_steps": 0}, "workload": SYNTHETIC}
    run_file = write_run_file(tmp_path, **sections)
    async with syncer(tmp_path, config_of(**sections)) as running:
        arguments = ("--run-file", run_file, "--cache-dir", cache, "--syncer", running.addresses.data)
        arguments = (*arguments, "--learner-id", "a", "--step-seconds-min", 0.02)
        other = await start("learner_service", *arguments, "--set", "outer.momentum=0.1")
        code, _, err = await ended(other)
        assert code == 2
        assert "outer.momentum: syncer 0.5, a 0.1" in paragraph(err)

        old = await start("learner_service", *arguments)
        await until(running, lambda: machine_of(running).rounds.committed_count >= 1)
        new = await start("learner_service", *arguments)
        code, _, err = await ended(old)
        assert code == 3
        assert "a newer process has joined the run as learner 'a'" in paragraph(err)
        new.send_signal(signal.SIGINT)
        code, _, _ = await ended(new)
        assert code == 0


BROKEN = """
import itertools, optax
import jax.numpy as jnp

class factory:
    def __init__(self, context): self.options = context.options
    def init(self, seed): return {"w": jnp.ones((64,), jnp.float32)}
    def loss(self, params, batch): return jnp.sum(params["w"])
    def optimizer(self): return optax.sgd(1.0)
    def learning_rate(self, schedule_step): return 0.1
    def data(self, slot, cursor): return iter([])
    def batch_tokens(self, batch): return 1
    def evaluate(self, params): return {"loss": 1.0}
"""


async def test_a_workload_at_fault_and_a_tls_file_that_is_not_there_end_in_one_paragraph(tmp_path, cache, start):
    (tmp_path / "broken_workload.py").write_text(BROKEN)
    run_file = write_run_file(tmp_path, workload={"factory": "broken_workload:factory"}, fragments={"count": 1})
    common = ("--run-file", run_file, "--cache-dir", cache)
    path = {"PYTHONPATH": str(tmp_path)}
    fault = await start("learner_service", *common, **path)
    file = await start("learner_service", *common, "--tls-ca", "absent.pem", **path)
    code, _, err = await ended(fault)
    assert code == 2
    assert "data(slot=0, cursor=0) ended after 0 batches" in paragraph(err)
    code, _, err = await ended(file)
    assert code == 2
    assert 'learner.tls_ca = "absent.pem" (flag --tls-ca): there is no such file' in paragraph(err)
