"""What lands in site-packages: our four packages with their data, and no generic name."""

import importlib
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.tidy.source_tree import PACKAGES, ROOT, project_files


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = Path(folder).glob("*.whl")
    return zipfile.ZipFile(built)


def metadata(wheel: zipfile.ZipFile, name: str) -> str:
    """A file of the wheel's dist-info folder."""
    (path,) = (entry for entry in wheel.namelist() if entry.endswith(f".dist-info/{name}"))
    return wheel.read(path).decode()


def test_only_our_packages_land_in_site_packages(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_everything_in_our_packages_ships(wheel: zipfile.ZipFile) -> None:
    sources = {path for path in project_files() if path.split("/")[0] in PACKAGES}
    assert sources - set(wheel.namelist()) == set()
    assert {f"{package}/py.typed" for package in PACKAGES} <= sources


def test_the_console_scripts_are_declared_and_lead_somewhere(wheel: zipfile.ZipFile) -> None:
    declared = metadata(wheel, "entry_points.txt")
    scripts = dict(line.split(" = ") for line in declared.splitlines() if "=" in line)
    assert set(scripts) == {
        "decoupled-diloco-evaluator",
        "decoupled-diloco-learner",
        "decoupled-diloco-syncer",
        "syncerctl",
    }
    for target in scripts.values():
        module, function = target.split(":")
        assert callable(getattr(importlib.import_module(module), function)), target


def test_the_licence_is_apache_2(wheel: zipfile.ZipFile) -> None:
    licence = metadata(wheel, "licenses/LICENSE")
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
