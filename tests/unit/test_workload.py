"""How a run file's `workload.factory` becomes a workload, and what the user reads when it does not."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from learner_service.workload import (
    MergeRule,
    WorkloadContext,
    WorkloadDefaults,
    WorkloadError,
    default_merge_rule,
    load_workload,
)


class Plain:
    """A workload of the seven required members and nothing else."""

    def init(self, seed: int) -> dict[str, int]:
        return {"weight": seed}

    def loss(self, params: object, batch: object) -> float:
        return 0.0

    def optimizer(self) -> None:
        return None

    def learning_rate(self, schedule_step: int) -> float:
        return 1.0

    def data(self, slot: int, cursor: int) -> Iterator[int]:
        return itertools.count(cursor)

    def batch_tokens(self, batch: object) -> int:
        return 1

    def evaluate(self, params: object) -> dict[str, float]:
        return {"loss": 0.0}


def context(folder: Path, **options: object) -> WorkloadContext:
    return WorkloadContext(seed=1, slot_count=2, total_steps=10, cache_dir=folder, options=options)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is an empty one, and what it adds to the import system is taken back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def message(factory: str, folder: Path, **options: object) -> str:
    with pytest.raises(WorkloadError) as raised:
        load_workload(factory, context(folder, **options))
    text = str(raised.value)
    assert "\n" not in text
    assert factory in text
    return text


def test_a_module_beside_the_run_file_is_found_and_its_optional_members_are_filled_in(
    in_folder: Path,
) -> None:
    (in_folder / "my_plain_model.py").write_text(
        "class Model:\n"
        "    def __init__(self, context): self.context = context\n"
        "    def init(self, seed): return {'weight': seed}\n"
        "    def loss(self, params, batch): return 0.0\n"
        "    def optimizer(self): return None\n"
        "    def learning_rate(self, schedule_step): return 1.0\n"
        "    def data(self, slot, cursor): return iter([cursor])\n"
        "    def batch_tokens(self, batch): return 1\n"
        "    def evaluate(self, params): return {'loss': 0.0}\n"
        "    def merge_rule(self, name, shape):\n"
        "        from learner_service.workload import MergeRule\n"
        "        return MergeRule('rda', 0)\n"
    )
    workload = load_workload("my_plain_model:Model", context(in_folder, width=3))
    assert workload.init(7) == {"weight": 7}
    assert workload.merge_rule("embedding", (2, 2)) == MergeRule("rda", 0)
    assert workload.mesh() is None
    assert workload.fingerprint() == {}
    assert workload.export_assets(in_folder) == []
    assert workload.context.options == {"width": 3}  # type: ignore[attr-defined]


def test_a_complete_workload_is_handed_back_as_it_is(in_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Complete(Plain, WorkloadDefaults):
        pass

    complete = Complete()
    module = types.ModuleType("complete_module")
    module.factory = lambda _: complete  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "complete_module", module)
    assert load_workload("complete_module:factory", context(in_folder)) is complete


@pytest.mark.parametrize("name", ["my_model", "my_model:", ":factory", "my-model:factory", "a b:c", ""])
def test_a_name_of_the_wrong_form_is_answered_with_the_right_one(name: str, tmp_path: Path) -> None:
    assert "'package.module:attribute'" in message(name, tmp_path)


def test_a_module_that_is_not_there_names_where_it_was_looked_for(in_folder: Path) -> None:
    text = message("no_such_module_here.model:factory", in_folder)
    assert "no module 'no_such_module_here'" in text
    assert str(in_folder) in text


def test_a_module_that_needs_an_absent_package_is_told_from_an_absent_module(in_folder: Path) -> None:
    (in_folder / "needs_more.py").write_text("import no_such_package_at_all\n")
    text = message("needs_more:factory", in_folder)
    assert "'needs_more' was found" in text
    assert "'no_such_package_at_all'" in text


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero"),
        ("def broken(:\n", "SyntaxError"),
        ("raise ValueError", "no message"),
    ],
)
def test_a_module_that_fails_while_it_is_imported_says_what_and_where(
    in_folder: Path, source: str, expected: str
) -> None:
    (in_folder / "broken_module.py").write_text(source)
    text = message("broken_module:factory", in_folder)
    assert expected in text
    assert "broken_module.py, line 1" in text


def test_an_absent_attribute_is_answered_with_those_that_exist(in_folder: Path) -> None:
    (in_folder / "other_names.py").write_text("def build(context): ...\n")
    text = message("other_names:factory", in_folder)
    assert "no attribute 'factory'" in text
    assert "build" in text


def test_something_that_cannot_be_called_is_named_by_its_type(in_folder: Path) -> None:
    (in_folder / "not_callable.py").write_text("factory = {}\n")
    assert "names a dict" in message("not_callable:factory", in_folder)


def test_a_factory_that_raises_is_shown_with_its_options(in_folder: Path) -> None:
    (in_folder / "raises.py").write_text("def factory(context):\n    raise KeyError('width')\n")
    text = message("raises:factory", in_folder, depth=3)
    assert "KeyError: 'width'" in text
    assert "raises.py, line 2" in text
    assert "'depth': 3" in text


def test_a_workload_error_of_the_factory_reaches_the_user_unchanged(in_folder: Path) -> None:
    (in_folder / "says_it_well.py").write_text(
        "from learner_service.workload import WorkloadError\n"
        "def factory(context):\n    raise WorkloadError('workload.options.width = 0 must be at least 1.')\n"
    )
    with pytest.raises(WorkloadError, match=r"^workload\.options\.width = 0 must be at least 1\.$"):
        load_workload("says_it_well:factory", context(in_folder))


def test_missing_members_are_all_named_at_once(in_folder: Path) -> None:
    (in_folder / "half.py").write_text("class Half:\n    def __init__(self, c): ...\n    def init(self, s): ...\n")
    text = message("half:Half", in_folder)
    assert "without the methods loss, optimizer, learning_rate, data, batch_tokens, evaluate;" in text


def test_embeddings_are_averaged_and_everything_else_keeps_its_radius() -> None:
    assert default_merge_rule("token_embedding", (10, 4)) == MergeRule("avg")
    assert default_merge_rule("Embedder/table", (10, 4)) == MergeRule("avg")
    assert default_merge_rule("layer_00/attention/query", (4, 4)) == MergeRule("rda")


def test_a_module_that_ends_the_process_while_it_is_imported_is_answered_like_a_broken_one(in_folder: Path) -> None:
    (in_folder / "a_script.py").write_text("import sys\n\nsys.exit(0)\n")
    assert "module 'a_script' was found but raised SystemExit: 0" in message("a_script:factory", in_folder)
