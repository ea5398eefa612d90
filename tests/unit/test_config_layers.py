"""The generic settings engine: layers, origins, complaints, and the printed form."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field

from decoupled_diloco.runtime.config import ConfigError, Finding, Presets, Resolved, Section, resolve
from decoupled_diloco.runtime.config_fields import Expect
from decoupled_diloco.runtime.config_layers import (
    Layer,
    assignment_layer,
    environment_layer,
    file_layer,
    key_lines,
    table_layer,
)
from decoupled_diloco.runtime.config_print import print_config, settings_table, toml_value


class Oven(Section):
    preset: Literal["slow", "fast"] = Field(default="slow", description="Which preset.")
    degrees: float = Field(default=180.0, gt=0, le=300, description="Temperature | of the air.")
    minutes: int = Field(default=45, ge=1, description="How long.")
    fan: bool = Field(default=False, description="Whether the fan runs.")
    racks: Annotated[tuple[str, ...], Field(strict=False)] = Field(default=("middle",), description="Which racks.")
    recipe: Annotated[Path | None, Field(strict=False)] = Field(default=None, description="File of the recipe.")

    def findings(self) -> Iterable[Finding]:
        if self.degrees > 250 and self.minutes > 60:
            yield Finding(("degrees", "minutes"), "this burns; make minutes 60 or less")
        if self.minutes > 120:
            yield Finding(("minutes",), "this is long", "warning")


class Dough(Section):
    flour: Annotated[str, Expect("the name of a grain")] = Field(default="rye", pattern="^[a-z]+$")
    extras: dict[str, object] = Field(default_factory=dict, description="Anything else.")


class Bread(Section):
    oven: Oven = Oven()
    dough: Dough = Dough()

    def findings(self) -> Iterable[Finding]:
        if self.dough.flour == "rye" and self.oven.minutes < 5:
            yield Finding(("dough.flour", "oven.minutes"), "rye needs 5 minutes or more")


PRESETS = Presets(
    ("oven", "preset"),
    {"slow": {"oven": {"degrees": 150.0}}, "fast": {"oven": {"degrees": 230.0, "minutes": 20}}},
)


def bread(
    tmp_path: Path, file: str = "", environ: dict[str, str] | None = None, flags: Iterable[str] = ()
) -> Resolved[Bread]:
    path = tmp_path / "bread.toml"
    path.write_text(file)
    return resolve(
        Bread,
        [
            file_layer(Bread, path, {"kitchen"}),
            environment_layer(Bread, environ or {}, "BREAD_", {"BREAD_FILE"}, {"kitchen"}),
            assignment_layer(Bread, list(flags)),
        ],
        PRESETS,
    )


def problems_of(
    tmp_path: Path, file: str = "", environ: dict[str, str] | None = None, flags: Iterable[str] = ()
) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        bread(tmp_path, file, environ, flags)
    return tuple(problem.replace(str(tmp_path) + "/", "") for problem in caught.value.problems)


def test_each_layer_wins_over_the_one_below_and_keeps_its_origin(tmp_path: Path) -> None:
    file = '[oven]\npreset = "fast"\nfan = true\n\n[dough]\nflour = "oat"\n'
    resolved = bread(tmp_path, file, {"BREAD_DOUGH__FLOUR": "corn", "BREAD_OVEN__FAN": "off"}, ["dough.flour=wheat"])
    value = resolved.value
    assert (value.oven.degrees, value.oven.minutes, value.oven.fan, value.dough.flour) == (
        230.0,
        20,
        False,
        "wheat",
    )
    assert resolved.origin("dough.flour") == "flag --set dough.flour"
    assert resolved.origin("oven.fan") == "environment BREAD_OVEN__FAN"
    assert resolved.origin("oven.preset").endswith("bread.toml line 2")
    assert resolved.origin("oven.degrees") == "preset fast"
    assert resolved.origin("oven.racks") == "default"


def test_the_default_preset_applies_and_a_flag_chooses_another(tmp_path: Path) -> None:
    assert bread(tmp_path).value.oven.degrees == 150.0
    assert bread(tmp_path, flags=["oven.preset=fast"]).value.oven.degrees == 230.0


def test_the_last_of_repeated_flags_wins(tmp_path: Path) -> None:
    assert bread(tmp_path, flags=["oven.minutes=7", "oven.minutes=8"]).value.oven.minutes == 8


def test_text_is_read_by_the_type_of_its_field(tmp_path: Path) -> None:
    flags = [
        "oven.degrees=2e2",
        "oven.minutes=+9",
        "oven.fan=yes",
        "oven.racks=top, bottom",
        "oven.recipe=a b.txt",
    ]
    oven = bread(tmp_path, flags=flags).value.oven
    assert (oven.degrees, oven.minutes, oven.fan) == (200.0, 9, True)
    assert oven.racks == ("top", "bottom")
    assert oven.recipe == Path("a b.txt")
    assert bread(tmp_path, flags=['oven.racks=["top"]', "oven.recipe="]).value.oven.racks == ("top",)


def test_keys_of_a_free_table_come_from_any_layer(tmp_path: Path) -> None:
    file = "[dough.extras]\nsalt = 1.5\nseeds = [1, 2]\n[dough.extras.oil]\nkind = 'olive'\n"
    resolved = bread(tmp_path, file, {"BREAD_DOUGH__EXTRAS__SALT": "2"}, ["dough.extras.note=hello there"])
    assert resolved.value.dough.extras == {
        "salt": 2,
        "seeds": [1, 2],
        "oil": {"kind": "olive"},
        "note": "hello there",
    }
    assert resolved.origin("dough.extras.salt") == "environment BREAD_DOUGH__EXTRAS__SALT"


def test_all_problems_come_together_each_with_field_value_origin_and_what_is_right(tmp_path: Path) -> None:
    file = "[oven]\ndegrees = 900\nfan = 1\nminutes = 2.5\n"
    problems = problems_of(tmp_path, file, {"BREAD_DOUGH__FLOUR": "RYE"}, ["oven.preset=medium", "oven.racks=3x"])
    assert problems == (
        'oven.preset = "medium" (flag --set oven.preset): must be one of slow, fast',
        "oven.degrees = 900 (file bread.toml line 2): must be a number > 0 and <= 300",
        "oven.minutes = 2.5 (file bread.toml line 4): must be a whole number >= 1",
        "oven.fan = 1 (file bread.toml line 3): must be true or false",
        'dough.flour = "RYE" (environment BREAD_DOUGH__FLOUR): must be the name of a grain',
    )


@pytest.mark.parametrize("text", ["", "ten", "1.5", "0x10"])
def test_text_that_is_no_number_is_reported_as_written(tmp_path: Path, text: str) -> None:
    assert problems_of(tmp_path, flags=[f"oven.minutes={text}"]) == (
        f'oven.minutes = "{text}" (flag --set oven.minutes): must be a whole number >= 1',
    )


def test_unknown_keys_are_errors_that_suggest_the_likely_one(tmp_path: Path) -> None:
    file = "[oven]\ndegree = 1\nflour = 'rye'\n[ovn]\nfan = true\n[dough]\nx = 1\n"
    environ = {"BREAD_OVEN__MINUTE": "1", "BREAD_OVEN": "1"}
    problems = problems_of(tmp_path, file, environ, ["oven.fan.speed=1", "zzz=1", "minutes"])
    assert problems[0] == 'oven.degree (file bread.toml line 2): there is no such setting; did you mean "oven.degrees"?'
    assert problems[1] == 'oven.flour (file bread.toml line 3): there is no such setting; did you mean "dough.flour"?'
    assert problems[2].startswith("ovn (file bread.toml line 4): there is no such setting; did you mean")
    assert problems[3] == "dough.x (file bread.toml line 7): there is no such setting; [dough] has: flour, extras"
    assert problems[4].startswith("oven (environment BREAD_OVEN): there is no such setting")
    assert problems[5].startswith("oven.minute (environment BREAD_OVEN__MINUTE)")
    assert problems[6].startswith("oven.fan.speed (flag --set oven.fan.speed)")
    assert problems[7] == "zzz (flag --set zzz): there is no such setting; sections are: dough, oven"
    assert problems[8] == "flag --set minutes: write --set section.key=value"


def test_unknown_keys_and_wrong_values_are_told_together(tmp_path: Path) -> None:
    assert len(problems_of(tmp_path, "[oven]\nminutes = 0\nmnutes = 1\n")) == 2


def test_a_value_where_a_section_belongs_says_how_to_write_it(tmp_path: Path) -> None:
    assert problems_of(tmp_path, "oven = 3\n") == (
        "oven = 3 (file bread.toml line 1): this is a section; write [oven]",
    )


def test_sections_of_other_processes_are_passed_over(tmp_path: Path) -> None:
    bread(tmp_path, "[kitchen]\nanything = 1\n", {"BREAD_KITCHEN__X": "1", "BREAD_FILE": "x"})


def test_variables_that_kubernetes_makes_for_a_service_are_not_ours(tmp_path: Path) -> None:
    names = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT", "PORT_80_TCP", "PORT_80_TCP_ADDR"]
    bread(tmp_path, environ={f"BREAD_SHOP_{name}": "10.0.0.1" for name in names})


def test_contradictions_show_every_field_with_its_origin(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, "[oven]\ndegrees = 260\n", flags=["oven.minutes=90"])
    given = "oven.degrees = 260 (file bread.toml line 2), oven.minutes = 90 (flag --set oven.minutes)"
    assert problem == f"{given}: this burns; make minutes 60 or less"
    assert problems_of(tmp_path, flags=["oven.minutes=4"]) == (
        'dough.flour = "rye" (default), oven.minutes = 4 (flag --set oven.minutes): rye needs 5 minutes or more',
    )


def test_warnings_do_not_stop_and_name_the_field(tmp_path: Path) -> None:
    resolved = bread(tmp_path, flags=["oven.minutes=130"])
    assert resolved.warnings == ("oven.minutes = 130 (flag --set oven.minutes): this is long",)


def test_a_model_built_directly_refuses_contradictions_too() -> None:
    with pytest.raises(ValueError, match="this burns"):
        Oven(degrees=260.0, minutes=90)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[oven\n", "is not valid TOML"),
        (b"\xff\xfe", "is not UTF-8 text (byte 0)"),
        (b"[oven]\nfan = true\nfan = true\n", "is not valid TOML"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_problem(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "b.toml"
    path.write_bytes(content)
    (problem,) = file_layer(Bread, path).problems
    assert problem.startswith(f"file {path}: ")
    assert words in problem


def test_a_file_that_is_missing_or_a_directory_is_named(tmp_path: Path) -> None:
    assert file_layer(Bread, tmp_path / "no.toml").problems == (f"file {tmp_path}/no.toml: there is no such file",)
    assert "cannot be read" in file_layer(Bread, tmp_path).problems[0]


def test_line_numbers_are_not_fooled_by_strings_and_comments() -> None:
    text = 'a = """\nb = 1\n"""\n# c = 2\n[x.y]  # note\nd.e = 3\n[[list]]\n'
    assert key_lines(text) == {("a",): 1, ("x", "y"): 5, ("x", "y", "d", "e"): 6}


def test_the_printed_form_read_back_gives_the_same_values_and_names_origins(tmp_path: Path) -> None:
    flags = [
        "oven.recipe=/tmp/r",
        'dough.extras."odd key"={a=[1,2.5,true], b="q\\"\\u0001"}',
        "oven.degrees=1e-5",
    ]
    first = bread(tmp_path, "[dough.extras]\nday = 2024-05-01\nempty = []\n", flags=flags)
    text = print_config(Resolved(first.value, first.origins))
    assert "# Temperature | of the air." in text
    assert any(
        line.startswith("degrees = 1e-05 ") and line.endswith("# flag --set oven.degrees") for line in text.splitlines()
    )
    assert bread(tmp_path, text).value == first.value
    assert tomllib.loads(text)["oven"]["recipe"] == "/tmp/r"


def test_an_absent_value_is_printed_as_a_comment(tmp_path: Path) -> None:
    resolved = bread(tmp_path)
    assert "# recipe = " in print_config(Resolved(resolved.value, resolved.origins))


def test_toml_strings_keep_every_character() -> None:
    text = "".join(chr(number) for number in range(1, 256)) + "\u2603\U0001f35e"
    assert tomllib.loads(f"value = {toml_value(text)}")["value"] == text


def test_the_table_for_the_documentation_lists_every_setting() -> None:
    table = settings_table(Bread)
    assert "| `oven.degrees` | a number > 0 and <= 300 | `180.0` | Temperature \\| of the air. |" in table
    assert table.count("\n") == 2 + 8


def test_values_from_a_program_keep_their_origin() -> None:
    resolved = resolve(Bread, [table_layer(Bread, {"oven": {"minutes": 9}}, "the program"), Layer()])
    assert resolved.origin("oven.minutes") == "the program"
