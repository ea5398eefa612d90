"""The deployment files agree with the programs they start."""

import re
from typing import Any

import pytest
import yaml

from decoupled_diloco.config import RunConfig
from decoupled_diloco.run_file import resolve_run
from learner_service.config import EvaluatorDocument, LearnerDocument
from syncer_service.config import SyncerDocument
from tests.tidy.source_tree import PACKAGES, ROOT

COMPOSE = ROOT / "deploy/compose"
DOCUMENTS = {"syncer": SyncerDocument, "learner": LearnerDocument, "evaluator": EvaluatorDocument}


def services() -> dict[str, dict[str, Any]]:
    """The services of the compose file by name, anchors resolved."""
    compose: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load((COMPOSE / "compose.yaml").read_text())
    return compose["services"]


OURS = [name for name in services() if name.split("-")[0] in DOCUMENTS]


def dockerfile(service: dict[str, Any]) -> str:
    """The text of a service's Dockerfile."""
    return (COMPOSE / service["build"]["context"] / service["build"]["dockerfile"]).read_text()


def environment(service: dict[str, Any]) -> dict[str, str]:
    """What the process finds: the image's variables under those of the compose file."""
    image = dict(re.findall(r"(DECOUPLED_DILOCO_\w+)=(\S+)", dockerfile(service)))
    return {**image, **service["environment"], "DECOUPLED_DILOCO_RUN_FILE": str(COMPOSE / "run.toml")}


@pytest.mark.parametrize("name", OURS)
def test_every_process_accepts_its_settings_and_they_agree_on_the_run(name: str) -> None:
    document = DOCUMENTS[name.split("-")[0]]
    resolved = resolve_run(document, environ=environment(services()[name]))
    assert resolved.warnings == ()
    assert resolved.value.digest() == resolve_run(RunConfig, run_file=COMPOSE / "run.toml").value.digest()


def test_the_run_expects_the_learners_that_are_started() -> None:
    run = resolve_run(RunConfig, run_file=COMPOSE / "run.toml").value
    learners = [name for name in OURS if name.startswith("learner")]
    assert len(learners) == run.run.learners_expected
    assert len({services()[name]["environment"]["DECOUPLED_DILOCO_LEARNER__LEARNER_ID"] for name in learners}) == 3


@pytest.mark.parametrize("name", OURS)
def test_images_run_without_root_and_say_whether_they_are_healthy(name: str) -> None:
    text = dockerfile(services()[name])
    final = text[text.rindex("\nFROM ") :]
    assert "\nUSER 10001:10001\n" in final
    assert "\nHEALTHCHECK " in final
    assert "INSECURE" not in re.sub(r"#.*", "", text), "an image never turns plaintext on by itself"


def test_only_loopback_ports_leave_the_compose_network() -> None:
    ports = [port for service in services().values() for port in service.get("ports", [])]
    assert ports
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []


def test_prometheus_scrapes_every_process_of_ours() -> None:
    text = (ROOT / "deploy/monitoring/prometheus/prometheus.yml").read_text()
    jobs = yaml.safe_load(text)["scrape_configs"]
    targets = {target for job in jobs for config in job["static_configs"] for target in config["targets"]}
    assert targets == {f"{name}:9464" for name in OURS}


def test_the_build_context_holds_what_the_dockerfiles_copy() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {
        word.rstrip("/")
        for path in sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))
        for line in re.findall(r"^COPY (?!--from)(.+)$", path.read_text(), re.MULTILINE)
        for word in line.split()[:-1]
    } - {"."}
    assert {*copied, *PACKAGES, "LICENSE", "README.md"} == allowed
