"""Who may import whom, read from the syntax trees."""

import ast
import sys
from collections.abc import Callable

import pytest

from tests.tidy.source_tree import PACKAGES, imports, parse, python_files, within

CORE = "decoupled_diloco.core"
NOT_PURE = (
    "asyncio",
    "concurrent",
    "io",
    "logging",
    "multiprocessing",
    "os",
    "pathlib",
    "random",
    "secrets",
    "select",
    "signal",
    "socket",
    "subprocess",
    "sys",
    "tempfile",
    "threading",
    "time",
    "uuid",
)
FILES_AND_NETWORK = (
    "grpc",
    "os",
    "pathlib",
    "io",
    "tempfile",
    "shutil",
    "socket",
    "subprocess",
    "asyncio",
    "fsspec",
)
DILOCO_WORDS = ("fragment", "quorum", "contribution", "grace", "outer_step", "theta", "learner", "syncer")


def offences(folder: str, refused: Callable[[str], bool]) -> list[str]:
    """`path:line imports name` for each import below the folder that `refused` says no to."""
    return [
        f"{path}:{line} imports {name}"
        for path in python_files(folder)
        for line, name in imports(path)
        if refused(name)
    ]


def test_core_is_standard_library_without_clock_randomness_threads_or_io() -> None:
    def refused(name: str) -> bool:
        if within(name, CORE):
            return False
        return name.split(".")[0] not in sys.stdlib_module_names or within(name, *NOT_PURE)

    assert offences("decoupled_diloco/core", refused) == []


def test_core_does_not_open_files_or_print() -> None:
    calls = [
        f"{path}:{node.lineno} calls {node.func.id}"
        for path in python_files("decoupled_diloco/core")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in {"open", "print", "input"}
    ]
    assert calls == []


def test_arrays_know_no_network_and_no_files() -> None:
    first_party = ("decoupled_diloco.core", "decoupled_diloco.arrays")

    def refused(name: str) -> bool:
        if name.split(".")[0] in sys.stdlib_module_names:
            return within(name, *FILES_AND_NETWORK)
        third_party = ("numpy", "jax", "jaxlib", "optax", "ml_dtypes", "xxhash", "numba", "llvmlite")
        return not within(name, *first_party, *third_party)

    assert offences("decoupled_diloco/arrays", refused) == []


def test_runtime_knows_no_diloco_concept() -> None:
    def refused(name: str) -> bool:
        return within(name, "decoupled_diloco") and not within(name, "decoupled_diloco.runtime")

    assert offences("decoupled_diloco/runtime", refused) == []
    named = [
        f"{path}:{node.lineno} is named {node.name}"
        for path in python_files("decoupled_diloco/runtime")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if any(word in node.name.lower() for word in DILOCO_WORDS)
    ]
    assert named == []


def test_wire_depends_on_core_and_the_generated_messages_only() -> None:
    allowed = (
        "decoupled_diloco.core",
        "decoupled_diloco.arrays",
        "decoupled_diloco.v1",
        "decoupled_diloco.wire",
    )

    def refused(name: str) -> bool:
        first_party = within(name, *PACKAGES)
        return (first_party and not within(name, *allowed)) or within(name, "jax", "flax", "optax")

    assert offences("decoupled_diloco/wire", refused) == []


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("syncer_service", ("learner_service", "syncerctl")),
        ("learner_service", ("syncer_service", "syncerctl")),
        ("syncerctl", ("syncer_service", "learner_service")),
        ("decoupled_diloco", ("syncer_service", "syncerctl")),
    ],
)
def test_services_meet_only_on_the_wire(importer: str, imported: tuple[str, ...]) -> None:
    assert offences(importer, lambda name: within(name, *imported)) == []


def test_the_simulator_knows_nothing_but_the_core() -> None:
    def refused(name: str) -> bool:
        return name.split(".")[0] not in sys.stdlib_module_names and not within(name, CORE, "simulator")

    assert offences("simulator", refused) == []


def test_shipped_code_never_imports_what_does_not_ship() -> None:
    unshipped = ("tests", "chaos", "demo", "examples", "simulator", "benchmarks", "tools")
    shipped = ("decoupled_diloco", "syncer_service", "learner_service", "syncerctl")
    assert [line for package in shipped for line in offences(package, lambda name: within(name, *unshipped))] == []


def test_only_the_public_entry_of_the_library_hands_over_to_the_learner() -> None:
    found = offences("decoupled_diloco", lambda name: within(name, "learner_service"))
    assert [line for line in found if not line.startswith("decoupled_diloco/__init__.py:")] == []


def test_generated_messages_are_touched_only_at_the_edges() -> None:
    """The codec, the servicers and the clients; everybody else sees the core's types."""
    edges = ("servicer", "admin", "client", "peer")

    def is_edge(path: str) -> bool:
        stem = path.rsplit("/", 1)[-1].removesuffix(".py")
        return path.startswith("decoupled_diloco/wire/") or any(edge in stem for edge in edges)

    touched = [
        f"{path}:{line} imports {name}"
        for path in python_files(*PACKAGES)
        if not is_edge(path)
        for line, name in imports(path)
        if within(name, "decoupled_diloco.v1")
    ]
    assert touched == []


def test_only_main_modules_read_arguments_and_environment() -> None:
    reads = {"sys.argv", "os.environ", "os.getenv", "os.environb"}
    found = [
        f"{path}:{node.lineno} reads {ast.unparse(node)}"
        for path in python_files(*PACKAGES)
        if not path.endswith("/__main__.py")
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in reads
    ]
    assert found == []


def test_the_tree_is_complete() -> None:
    """The rules above would hold trivially for an empty folder."""
    for folder in ("core", "arrays", "wire", "runtime"):
        assert python_files(f"decoupled_diloco/{folder}"), f"decoupled_diloco/{folder} is gone"
