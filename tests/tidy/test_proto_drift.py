"""The committed stubs are those that `make proto` generates."""

from pathlib import Path

from tests.tidy.source_tree import GENERATED, ROOT, project_files
from tools.generate_protos import generate


def test_committed_stubs_are_what_the_protos_generate(tmp_path: Path) -> None:
    generated = {str(path.relative_to(tmp_path)): path.read_text() for path in generate(tmp_path)}
    committed = {path: (ROOT / path).read_text() for path in project_files() if path.startswith(GENERATED)}
    differing = sorted(path for path in generated if generated[path] != committed.get(path))
    assert differing == [], "run `make proto`"
    assert sorted(committed.keys() - generated.keys()) == [], "no proto generates these any more"
