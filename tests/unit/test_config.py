"""The run file: presets, contradictions, digest, differences, and the policy it becomes."""

from __future__ import annotations

import itertools
from dataclasses import fields
from pathlib import Path

import pytest

from decoupled_diloco.config import DeadlinesSection, RunConfig, describe_differences
from decoupled_diloco.core.policy import Deadlines, Policy
from decoupled_diloco.run_file import no_file_hint, presets, resolve_run, run_config
from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.config_print import print_config


def problems_of(*assignments: str, file: Path | None = None) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        resolve_run(RunConfig, run_file=file, assignments=assignments)
    return caught.value.problems


def test_without_any_file_the_small_preset_holds() -> None:
    resolved = resolve_run(RunConfig)
    config = resolved.value
    assert (config.fragments.count, config.fragments.interval_steps, config.fragments.overlap_steps) == (
        8,
        24,
        2,
    )
    assert (config.outer.learning_rate, config.outer.momentum) == (0.6, 0.5)
    assert (config.quorum.minimum, config.quorum.grace_share, config.quorum.grace_cap_steps) == (1, 0.8, 1.0)
    assert (config.quorum.last_call, config.quorum.below_quorum) == ("on", "wait")
    assert resolved.origin("outer.momentum") == "preset small"
    assert resolved.warnings == ()


def test_the_paper_preset_is_the_published_setting() -> None:
    config = resolve_run(RunConfig, assignments=["run.preset=paper"]).value
    assert (config.fragments.count, config.fragments.interval_steps, config.fragments.overlap_steps) == (
        24,
        24,
        2,
    )
    assert (config.outer.learning_rate, config.outer.momentum) == (0.7, 0.9)


def test_every_preset_is_valid() -> None:
    for name in presets().tables:
        resolve_run(RunConfig, assignments=[f"run.preset={name}"])


def test_an_unknown_preset_names_those_that_exist() -> None:
    assert problems_of("run.preset=big") == ('run.preset = "big" (flag --set run.preset): must be one of small, paper',)


def test_without_a_run_file_a_hint_says_what_holds_instead(tmp_path: Path) -> None:
    hint = no_file_hint(resolve_run(RunConfig))
    assert hint is not None
    assert 'preset "small"' in hint
    assert "--run-file" in hint
    path = tmp_path / "run.toml"
    path.write_text("[run]\nid = 'mine'\n")
    assert no_file_hint(resolve_run(RunConfig, run_file=path)) is None


def test_the_environment_names_the_run_file_and_overrides_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[quorum]\nminimum = 2\n[run]\nid = 'night'\n")
    environ = {"DECOUPLED_DILOCO_RUN_FILE": str(path), "DECOUPLED_DILOCO_QUORUM__MINIMUM": "3"}
    resolved = resolve_run(RunConfig, environ=environ)
    assert (resolved.value.run.id, resolved.value.quorum.minimum) == ("night", 3)
    assert resolved.origin("quorum.minimum") == "environment DECOUPLED_DILOCO_QUORUM__MINIMUM"


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["fragments.count=30"], "make count 24 or less, or interval_steps 30 or more"),
        (["fragments.overlap_steps=24"], "make overlap_steps 23 or less"),
        (["quorum.minimum=65"], "a quorum that can never be met; make minimum 64 or less"),
        (["run.learners_expected=65"], "make learners_max 65 or more"),
        (["deadlines.lease_seconds=2"], "at least 3 heartbeats"),
        (["deadlines.stall_seconds=1"], "at least 2 heartbeats"),
        (["deadlines.last_call_seconds_min=2"], "the minimum is above the maximum"),
        (["quorum.grace_share=1"], "must be a number >= 0 and < 1"),
        (["quorum.grace_cap_steps=-1"], "must be a number >= 0"),
        (["deadlines.upload_idle_seconds=-5"], "must be a number > 0"),
        (["inner.blend_alpha=1"], "must be a number > 0 and < 1"),
        (["outer.learning_rate=nan"], "must be a number > 0"),
        (["outer.learning_rate=inf"], "must be a number > 0"),
        (["encoding.upload=fp8"], "must be one of float32, bf16"),
        (["run.id=Big Run"], "must be 1 to 63 of a-z, 0-9 and -"),
        (["run.total_steps=-1"], "must be a whole number >= 0"),
        (["workload.factory=my_model.py"], "must be package.module:function"),
        (["quorum.minimum=0"], "must be a whole number >= 1"),
        (["run.name_map=gema", "run.start_from=m"], "give one of gemma, gemma1, llama, or a .toml file"),
    ],
)
def test_contradictory_or_impossible_settings_are_refused_with_what_to_change(
    assignments: list[str], words: str
) -> None:
    (problem,) = problems_of(*assignments)
    assert words in problem
    name, _, value = assignments[0].partition("=")
    assert name in problem
    assert value in problem
    assert f"flag --set {name}" in problem


def test_every_contradiction_of_several_sections_is_told_at_once() -> None:
    assert len(problems_of("fragments.count=30", "quorum.minimum=65", "fragments.overlap_steps=30")) == 3


@pytest.mark.parametrize(
    ("assignment", "words"),
    [
        ("quorum.minimum=4", "no round can be merged until more learners than expected have joined"),
        ("run.total_steps=20", "the run ends before every fragment was synchronised once"),
        ("run.name_map=gemma", "a name map does nothing where start_from is empty"),
        ("data.slot_count=2", "fewer streams of data than learners"),
        ("deadlines.stall_seconds=11", "lost before it counts as stalled"),
    ],
)
def test_doubtful_settings_are_warned_about(assignment: str, words: str) -> None:
    (warning,) = resolve_run(RunConfig, assignments=[assignment]).warnings
    assert words in warning
    assert assignment.partition("=")[0] in warning


def test_the_digest_depends_on_agreed_values_and_on_nothing_else() -> None:
    base = run_config().digest()
    assert len(base) == 64
    assert run_config({"run": {"preset": "small"}, "quorum": {"minimum": 1}}).digest() == base
    assert run_config({"outer": {"learning_rate": 0.60}}).digest() == base
    assert run_config({"run": {"start_from": "model.safetensors", "name_map": "gemma1"}}).digest() == base
    assert run_config({"outer": {"learning_rate": 0.61}}).digest() != base
    assert run_config({"workload": {"options": {"depth": 2}}}).digest() != base
    assert run_config({"encoding": {"error_feedback": False}}).digest() == base
    assert run_config({"encoding": {"error_feedback": True}}).digest() != base
    spelled_out = {"fragments": {"count": 24}, "outer": {"learning_rate": 0.7, "momentum": 0.9}}
    assert run_config(spelled_out).digest() == run_config({"run": {"preset": "paper"}}).digest()


def test_whole_and_fractional_spelling_of_a_number_agree() -> None:
    assert run_config({"quorum": {"grace_cap_steps": 1}}).digest() == run_config().digest()


def test_the_order_of_free_options_does_not_matter() -> None:
    one = run_config({"workload": {"options": {"a": 1, "b": {"x": 1, "y": 2}}}})
    two = run_config({"workload": {"options": {"b": {"y": 2, "x": 1}, "a": 1}}})
    assert one.digest() == two.digest()


def test_a_difference_shows_both_sides_of_each_setting() -> None:
    ours = run_config({"quorum": {"minimum": 2}}).agreed_values()
    theirs = run_config({"run": {"id": "other"}, "workload": {"options": {"depth": 3}}}).agreed_values()
    assert describe_differences(ours, theirs, "syncer", "learner eu-1") == (
        "quorum.minimum: syncer 2, learner eu-1 1",
        'run.id: syncer "local", learner eu-1 "other"',
        "workload.options.depth: syncer has none, learner eu-1 3",
    )
    assert describe_differences(ours, ours, "a", "b") == ()


def test_the_default_run_file_is_the_default_policy() -> None:
    assert run_config().to_policy() == Policy(total_steps=1000)


def test_the_data_is_divided_among_the_expected_learners_unless_said_otherwise() -> None:
    assert run_config({"run": {"learners_expected": 5}}).slot_count == 5
    assert run_config({"run": {"learners_expected": 5}, "data": {"slot_count": 8}}).slot_count == 8


def test_every_deadline_is_a_setting_with_the_default_of_the_core() -> None:
    for field in fields(Deadlines):
        assert getattr(DeadlinesSection(), field.name) == getattr(Deadlines(), field.name)


def test_settings_reach_the_policy() -> None:
    policy = run_config(
        {
            "fragments": {"count": 4, "interval_steps": 12, "overlap_steps": 3},
            "quorum": {
                "minimum": 2,
                "last_call": "off",
                "below_quorum": "degrade",
                "norm_outlier_factor": 5.0,
            },
            "inner": {"apply": "blend", "blend_alpha": 0.25, "barrier": True},
            "encoding": {"upload": "float32"},
            "deadlines": {"heartbeat_seconds": 0.5, "stall_step_factor": 4.0},
        }
    ).to_policy()
    assert (policy.fragment_count, policy.interval_steps, policy.overlap_steps) == (4, 12, 3)
    assert (policy.quorum_minimum, policy.last_call, policy.below_quorum) == (2, False, "degrade")
    assert (policy.norm_outlier_factor, policy.apply_rule, policy.blend_alpha) == (5.0, "blend", 0.25)
    assert (policy.barrier, policy.upload_encoding, policy.download_encoding) == (True, "float32", "bf16")
    assert (policy.deadlines.heartbeat_seconds, policy.stall_step_factor) == (0.5, 4.0)


def test_the_printed_run_file_gives_the_same_digest(tmp_path: Path) -> None:
    resolved = resolve_run(RunConfig, assignments=["run.preset=paper", "workload.options.corpus=speeches"])
    path = tmp_path / "run.toml"
    path.write_text(print_config(resolved))
    again = resolve_run(RunConfig, run_file=path)
    assert again.value == resolved.value
    assert again.value.digest() == resolved.value.digest()


def test_every_setting_has_its_sentence() -> None:
    lines = print_config(resolve_run(RunConfig)).splitlines()
    assert all(before.startswith("#") for before, line in itertools.pairwise(lines) if " = " in line[:40])
