"""The tracked source tree as the tidy tests see it."""

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("decoupled_diloco", "syncer_service", "learner_service", "syncerctl")
GENERATED = "decoupled_diloco/v1/"


@cache
def project_files() -> tuple[str, ...]:
    """Paths of all files that are, or are about to be, in the repository, relative to its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return tuple(sorted(path for path in listed.split("\0") if path and (ROOT / path).is_file()))


def python_files(*folders: str) -> list[str]:
    """Hand-written Python files below the folders (all of the repository's when none is named)."""
    prefixes = tuple(folder.rstrip("/") + "/" for folder in folders) or ("",)
    return [
        path
        for path in project_files()
        if path.endswith(".py") and path.startswith(prefixes) and not path.startswith(GENERATED)
    ]


@cache
def parse(path: str) -> ast.Module:
    """The syntax tree of one file."""
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=path)


def module_name(path: str) -> str:
    """`a/b/c.py` -> `a.b.c`, `a/b/__init__.py` -> `a.b`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports(path: str, *, at_run_time: bool = False) -> Iterator[tuple[int, str]]:
    """Line and full module name of each import, anywhere in the file.

    `from a import b` counts as `a.b`, because b may be a module. With `at_run_time`, what stands under
    `if TYPE_CHECKING:` is left out.
    """
    for node in _walk(parse(path), at_run_time):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module_name(path).split(".")
                depth = node.level - path.endswith("__init__.py")
                base = ".".join([*package[: len(package) - depth], *filter(None, [node.module])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def _walk(node: ast.AST, at_run_time: bool) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if at_run_time and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield from _walk(child, at_run_time)


def within(name: str, *packages: str) -> bool:
    """Whether a dotted name is one of the packages or lies inside one."""
    return any(name == package or name.startswith(package + ".") for package in packages)
