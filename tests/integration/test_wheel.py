"""The wheel in empty environments, outside the repository: a syncer without JAX, a learner, two steps, a model."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RUN_FILE = """
[run]
id = "wheel"
total_steps = 2
learners_expected = 1

[fragments]
count = 2
interval_steps = 2
overlap_steps = 1

[workload.options]
text = "words.txt"
tokenizer = "bytes"
d_model = 16
ff = 32
batch_size = 2
eval_windows = 2
"""


def environment() -> dict[str, str]:
    """What a user's shell has: nothing of this repository or this interpreter's environment."""
    dropped = re.compile(r"^(PYTHON|VIRTUAL_ENV|DECOUPLED_DILOCO_|PYTEST)")
    return {**{k: v for k, v in os.environ.items() if not dropped.match(k)}, "JAX_PLATFORMS": "cpu"}


def run(*command: str | Path, cwd: Path) -> str:
    """Runs a command; its output is the message of a failure."""
    done = subprocess.run(
        command, cwd=cwd, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@contextmanager
def process(log: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process in the log's folder that does not outlive the test."""
    with log.open("wb") as output:
        started = subprocess.Popen(command, cwd=log.parent, env=environment(), stdout=output, stderr=output)
        try:
            yield started
        finally:
            started.kill()
            started.wait()


def logged(log: Path, event: str, process: subprocess.Popen[bytes]) -> dict[str, str]:
    """Waits for an event in a process's log."""
    while True:
        for line in log.read_text().splitlines():
            if f'"{event}"' in line:
                fields: dict[str, str] = json.loads(line)
                return fields
        assert process.poll() is None, log.read_text()[-4000:]
        time.sleep(0.05)  # between looks at the condition above


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The commands' folder of one empty environment per service, each with its own extra only."""
    folders = {}
    for extra in ("syncer", "learner"):
        folder = tmp_path_factory.mktemp(extra)
        run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
        folders[extra] = folder / "venv" / "bin"
        pip = (folders[extra] / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
        run(*pip, "--constraint", ROOT / "requirements.lock", f"{wheel}[{extra}]", cwd=folder)
    return folders


def test_the_syncers_environment_has_no_model_code(installed: dict[str, Path]) -> None:
    listed = run(installed["syncer"] / "python", "-m", "pip", "list", "--format=freeze", cwd=installed["syncer"])
    names = {line.split("==")[0].lower() for line in listed.splitlines()}
    assert {"decoupled-diloco", "grpcio", "aiohttp"} <= names
    assert names & {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tensorstore"} == set()


def test_two_steps_of_training_outside_the_repository(installed: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN_FILE)
    (tmp_path / "words.txt").write_text("It was a bright cold day in April, and the clocks were striking.\n\n" * 400)
    logs = {name: tmp_path / f"{name}.log" for name in ("syncer", "evaluator", "learner")}

    def started(name: str, *flags: str) -> AbstractContextManager[subprocess.Popen[bytes]]:
        extra = "syncer" if name == "syncer" else "learner"
        program = installed[extra] / f"decoupled-diloco-{name}"
        return process(logs[name], program, "--run-file", "run.toml", *flags)

    listen = [f"--{name}=127.0.0.1:0" for name in ("listen", "admin-listen", "http-listen")]
    with started("syncer", *listen, "--output-dir", "output", "--exit-when-finished") as syncer:
        ready = logged(logs["syncer"], "syncer_ready", syncer)
        common = ("--syncer", ready["learners"], "--cache-dir", "cache")
        with started("evaluator", *common, "--output-file", "figures.jsonl") as evaluator:
            logged(logs["syncer"], "learner_joined", syncer)
            with started("learner", *common, "--learner-id", "alone") as learner:
                shown = run(installed["syncer"] / "syncerctl", "status", "--address", ready["admin"], cwd=tmp_path)
                assert "wheel" in shown
                for name, running in {"learner": learner, "evaluator": evaluator, "syncer": syncer}.items():
                    assert running.wait() == 0, logs[name].read_text()[-4000:]

    summary = json.loads((tmp_path / "output" / "run_summary.json").read_text())
    assert summary["run"]["global_step"] == 2
    assert summary["run"]["rounds_committed_count"] >= 2
    (model,) = (tmp_path / "output").glob("*.safetensors")
    with safe_open(model, framework="numpy") as tensors:
        assert tensors.keys()
    figures = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert figures[-1]["bits_per_byte"] > 0
