"""The deployment files pass the tools of those who will read them."""

import subprocess

import pytest

from tests.operate.tools import python_tool, system_tool
from tests.tidy.source_tree import ROOT, project_files

pytestmark = pytest.mark.operate

COMPOSE = "deploy/compose/compose.yaml"


def run(*command: str) -> str:
    """Runs a command in the repository; its output is the message of a failure."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("path", [path for path in project_files() if path.endswith("Dockerfile")])
def test_dockerfiles_pass_hadolint(path: str) -> None:
    run(python_tool("hadolint"), "--no-color", path)


def test_prometheus_accepts_its_configuration() -> None:
    run(system_tool("promtool"), "check", "config", "deploy/monitoring/prometheus/prometheus.yml")


def test_the_compose_file_follows_the_specification() -> None:
    run(python_tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", COMPOSE)


def test_shell_scripts_pass_shellcheck() -> None:
    scripts = [path for path in project_files() if path.endswith(".sh") or path == ".ci/run"]
    run(system_tool("shellcheck"), *scripts)
