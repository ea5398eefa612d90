"""Process settings and command lines of the syncer, the learner and the evaluator."""

from __future__ import annotations

import io
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from decoupled_diloco.command_line import Program, run_program
from decoupled_diloco.config import RunConfig
from decoupled_diloco.core.errors import PeerError, Reason, UnreachableError
from decoupled_diloco.runtime.config import ConfigError, Resolved
from decoupled_diloco.runtime.lifecycle import ExitCode
from learner_service.config import (
    EVALUATOR_PROGRAM,
    LEARNER_PROGRAM,
    EvaluatorDocument,
    LearnerDocument,
    learner_id_from_hostname,
)
from syncer_service.config import PROGRAM as SYNCER_PROGRAM
from syncer_service.config import SyncerDocument
from syncerctl.program import app as syncerctl

PROGRAMS: list[Program[Any]] = [SYNCER_PROGRAM, LEARNER_PROGRAM, EVALUATOR_PROGRAM]


def run(program: Program[Any], *arguments: str, environ: dict[str, str] | None = None) -> tuple[int, str, str, Any]:
    """Exit code, output, complaints, and the document that would have been served."""
    out, err = io.StringIO(), io.StringIO()
    served: list[RunConfig] = []

    def serve(resolved: Resolved[Any]) -> int:
        served.append(resolved.value)
        return ExitCode.OK

    code = run_program(program, arguments, environ or {}, serve, out=out, err=err)
    return code, out.getvalue(), err.getvalue(), served[0] if served else None


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.section)
def test_without_any_setting_every_program_starts_on_loopback(program: Program[Any]) -> None:
    code, _, err, document = run(program)
    assert (code, err) == (0, "")
    assert document.run.id == "local"


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.section)
def test_the_printed_settings_can_be_fed_back(program: Program[Any], tmp_path: Path) -> None:
    code, text, _, _ = run(program, "--print-config", "--set", "quorum.minimum=2", "--log-level", "debug")
    assert code == 0
    assert "# flag --log-level" in text
    assert "# flag --set quorum.minimum" in text
    assert tomllib.loads(text)[program.section]["log_level"] == "debug"
    path = tmp_path / "run.toml"
    path.write_text(text)
    _, _, err, document = run(program, "--run-file", str(path))
    assert err == ""
    assert document.quorum.minimum == 2


def test_all_processes_agree_on_the_digest_whatever_their_own_settings() -> None:
    own = {
        SYNCER_PROGRAM: ["--listen", "127.0.0.1:1"],
        LEARNER_PROGRAM: ["--learner-id", "a"],
        EVALUATOR_PROGRAM: [],
    }
    assert len({run(program, *flags)[3].digest() for program, flags in own.items()}) == 1


def test_one_file_and_one_environment_serve_all_processes(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[syncer]\nlisten = '127.0.0.1:7'\n[learner]\nlearner_id = 'b'\n[evaluator]\ninterval_steps = 2\n")
    environ = {"DECOUPLED_DILOCO_RUN_FILE": str(path), "DECOUPLED_DILOCO_LEARNER__LEARNER_ID": "c"}
    syncer: SyncerDocument = run(SYNCER_PROGRAM, environ=environ)[3]
    learner: LearnerDocument = run(LEARNER_PROGRAM, environ=environ)[3]
    evaluator: EvaluatorDocument = run(EVALUATOR_PROGRAM, environ=environ)[3]
    assert (syncer.syncer.listen, learner.learner.learner_id, evaluator.evaluator.interval_steps) == (
        "127.0.0.1:7",
        "c",
        2,
    )


def variables_of_syncerctl() -> set[str]:
    commands = typer.main.get_command(syncerctl).commands.values()  # type: ignore[attr-defined]
    named = [parameter.envvar for command in commands for parameter in command.params if parameter.envvar]
    return {name for names in named for name in ([names] if isinstance(names, str) else names)}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.section)
def test_the_variables_of_syncerctl_are_in_no_programs_way(program: Program[Any]) -> None:
    variables = variables_of_syncerctl()
    assert "DECOUPLED_DILOCO_ADMIN_ADDRESS" in variables
    code, out, err, _ = run(program, "validate", environ=dict.fromkeys(variables, "10.0.0.1:7"))
    assert (code, err) == (0, "")
    assert "valid" in out


def test_a_wrong_own_section_is_found_by_the_process_it_belongs_to(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[learner]\nlearnerid = 'b'\n")
    assert run(SYNCER_PROGRAM, "--run-file", str(path))[0] == 0
    code, _, err, _ = run(LEARNER_PROGRAM, "--run-file", str(path))
    assert code == ExitCode.CONFIG
    assert "learner.learnerid (file " in err
    assert 'did you mean "learner.learner_id"?' in err


def test_validate_says_the_digest_and_does_not_serve() -> None:
    code, out, err, document = run(SYNCER_PROGRAM, "validate", "--set", "quorum.minimum=9")
    assert (code, document) == (0, None)
    assert "valid" in out
    assert "warning: quorum.minimum = 9 (flag --set quorum.minimum)" in err


def test_several_problems_are_one_list_without_a_traceback() -> None:
    code, out, err, document = run(SYNCER_PROGRAM, "--set", "fragments.count=99", "--set", "quorum.minimum=99")
    assert (code, out, document) == (ExitCode.CONFIG, "", None)
    assert err.startswith("decoupled-diloco-syncer: 2 settings cannot be used:\n  - fragments.count = 99 ")
    assert "Traceback" not in err


def test_the_preset_flag_is_an_origin() -> None:
    _, text, _, _ = run(SYNCER_PROGRAM, "--preset", "paper", "--print-config")
    assert "# flag --preset" in text
    assert "# preset paper" in text


@pytest.mark.parametrize(
    ("program", "arguments", "ways_out"),
    [
        (
            SYNCER_PROGRAM,
            ["--listen", "0.0.0.0:50051"],
            ["--tls-certificate FILE and --tls-key FILE", "--insecure"],
        ),
        (
            SYNCER_PROGRAM,
            ["--admin-listen", "[::]:9"],
            ["--tls-certificate FILE and --tls-key FILE", "--insecure"],
        ),
        (LEARNER_PROGRAM, ["--syncer", "10.1.2.3:50051"], ["--tls-ca FILE", "--insecure"]),
        (EVALUATOR_PROGRAM, ["--syncer", "127.0.0.1:1,syncer:2"], ["--tls-ca FILE", "--insecure"]),
    ],
)
def test_plaintext_off_loopback_is_refused_with_both_ways_out(
    program: Program[Any], arguments: list[str], ways_out: list[str]
) -> None:
    code, _, err, _ = run(program, *arguments)
    assert code == ExitCode.CONFIG
    assert arguments[1].split(",")[-1] in err
    assert "is not a loopback address" in err
    assert all(words in err for words in ways_out)
    assert run(program, *arguments, "--insecure")[0] == 0


def test_tls_lets_a_process_off_loopback() -> None:
    arguments = ["--listen", "0.0.0.0:1", "--tls-certificate", "a.pem", "--tls-key", "a.key"]
    document: SyncerDocument = run(SYNCER_PROGRAM, *arguments)[3]
    assert document.syncer.tls_files is not None
    learner: LearnerDocument = run(LEARNER_PROGRAM, "--syncer", "far:1", "--tls-ca", "ca.pem")[3]
    assert learner.learner.tls_files("learner") is not None
    assert run(LEARNER_PROGRAM, "--syncer", "far:1", "--tls-system-roots")[0] == 0
    assert run(LEARNER_PROGRAM)[3].learner.tls_files("learner") is None


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        (SYNCER_PROGRAM, ["--tls-key", "a.key"], "are needed together"),
        (SYNCER_PROGRAM, ["--tls-client-ca", "a.pem"], "has no use without tls_certificate"),
        (LEARNER_PROGRAM, ["--tls-certificate", "a.pem", "--tls-key", "k"], "has no use without TLS"),
        (SYNCER_PROGRAM, ["--listen", "127.0.0.1:9464"], "every service needs a port of its own"),
        (SYNCER_PROGRAM, ["--state-dir", "s", "--mirror-url", "s"], "a mirror must lie elsewhere"),
        (SYNCER_PROGRAM, ["--state-dir", "s/", "--mirror-url", "x/../s/fragments"], "a mirror must lie elsewhere"),
        (SYNCER_PROGRAM, ["--state-dir", "/s", "--mirror-url", "file:///s/m"], "a mirror must lie elsewhere"),
        (SYNCER_PROGRAM, ["--state-dir", "s", "--checkpoint-url", "s"], "only the folder checkpoints is for them"),
        (SYNCER_PROGRAM, ["--state-dir", "s", "--mirror-url", "s/checkpoints"], "a mirror needs a folder of its own"),
        (SYNCER_PROGRAM, ["--listen", "50051"], "must be host:port, for example 127.0.0.1:50051"),
        (LEARNER_PROGRAM, ["--syncer", "host"], "must be host:port"),
        (LEARNER_PROGRAM, ["--syncer", ""], "learner.syncer"),
        (LEARNER_PROGRAM, ["--learner-id", "EU_1"], "must be 1 to 63 of a-z, 0-9 and -"),
        (LEARNER_PROGRAM, ["--learner-id", "-x"], "1 to 63"),
        (LEARNER_PROGRAM, ["--http-listen", "x"], "must be host:port"),
    ],
)
def test_wrong_process_settings_are_explained(program: Program[Any], arguments: list[str], words: str) -> None:
    if arguments == ["--learner-id", "-x"]:
        arguments = ["--learner-id=-x"]
    code, _, err, _ = run(program, *arguments)
    assert code == ExitCode.CONFIG
    assert words in err


def test_checkpoints_and_mirror_beside_the_state_directory_are_taken() -> None:
    arguments = ["--state-dir", "s", "--checkpoint-url", "s/checkpoints", "--mirror-url", "memory://s"]
    assert run(SYNCER_PROGRAM, *arguments)[0] == 0
    assert run(SYNCER_PROGRAM, "--state-dir", "s", "--mirror-url", "s-mirror")[0] == 0


def test_two_ports_chosen_by_the_system_do_not_clash() -> None:
    assert run(SYNCER_PROGRAM, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0")[0] == 0


@pytest.mark.parametrize(
    ("hostname", "learner_id"),
    [
        ("Node_7.example.org", "node-7"),
        ("eu-west4-a", "eu-west4-a"),
        ("--", "learner"),
        ("", "learner"),
        ("x" * 80, "x" * 63),
    ],
)
def test_a_host_name_becomes_a_valid_learner_id(hostname: str, learner_id: str) -> None:
    assert learner_id_from_hostname(hostname) == learner_id


def test_what_the_work_itself_finds_wrong_is_one_paragraph_and_a_distinct_code() -> None:
    def refused(_: Resolved[Any]) -> int:
        raise PeerError(Reason.RUN_MISMATCH, 'the syncer holds run "a", this learner wants "b"', {"run": "a"})

    def misconfigured(_: Resolved[Any]) -> int:
        raise ConfigError('syncer.listen = "127.0.0.1:1": another process already listens')

    err = io.StringIO()
    assert run_program(LEARNER_PROGRAM, [], {}, refused, err=err) == ExitCode.REFUSED
    assert 'the syncer holds run "a", this learner wants "b" [RUN_MISMATCH]\n  run: a' in err.getvalue()
    assert run_program(SYNCER_PROGRAM, [], {}, misconfigured, err=err) == ExitCode.CONFIG

    def detached(_: Resolved[Any]) -> int:
        raise UnreachableError("UNAVAILABLE", "127.0.0.1:50051 did not answer for 3600 s")

    def without_model(_: Resolved[Any]) -> int:
        raise LookupError('workload.factory = "a:b": there is no module a')

    assert run_program(LEARNER_PROGRAM, [], {}, detached, err=err) == ExitCode.DETACHED
    code = run_program(LEARNER_PROGRAM, [], {}, without_model, operator_errors=(LookupError,), err=err)
    assert code == ExitCode.CONFIG
    assert "Traceback" not in err.getvalue()


def test_help_names_every_flag_and_where_settings_come_from(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(LEARNER_PROGRAM, "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--learner-id VALUE" in text
    assert "DECOUPLED_DILOCO_SECTION__KEY" in text
    assert "--insecure, --no-insecure" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--peer-advertise", "10.0.0.1:50061"), "learner.peer_advertise"),
        (("--peer-listen", "0.0.0.0:50061"), "learner.peer_listen"),
        (("--peer-listen", "127.0.0.1:50061", "--peer-advertise", "nowhere"), "host:port"),
        (("--peer-recovery-seconds", "-1"), "learner.peer_recovery_seconds"),
    ],
)
def test_settings_for_peers_that_cannot_be_used_are_named(arguments: tuple[str, ...], text: str) -> None:
    code, _, err, _ = run(LEARNER_PROGRAM, *arguments)
    assert code == ExitCode.CONFIG
    assert text in err
