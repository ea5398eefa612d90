"""Process settings of the learner and the evaluator; the run file is `decoupled_diloco.config`."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator

from decoupled_diloco.command_line import Program
from decoupled_diloco.config import Name, RunConfig
from decoupled_diloco.runtime.config import Finding
from decoupled_diloco.runtime.config_fields import Expect
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.runtime.process_settings import CallerTlsSettings, FilePath, LogSettings, check_address
from decoupled_diloco.runtime.rate_limit import BYTES_PER_SECOND_MAX
from decoupled_diloco.runtime.tls import plaintext_problem

SECONDS_MAX: Final = 10_000_000
"""The longest duration that these settings take, 115 days: waiting for longer than 2^63 ns is an error in Python."""

AddressList = Annotated[tuple[str, ...], Field(strict=False), Expect("host:port, or several with commas")]


def learner_id_from_hostname(hostname: str) -> str:
    """A learner id made of a host name: lower case, other characters become "-", at most 63 characters."""
    text = re.sub(r"[^a-z0-9-]+", "-", hostname.split(".")[0].lower()).strip("-")[:63].strip("-")
    return text or "learner"


class ParticipantSettings(CallerTlsSettings, LogSettings):
    """What the learner and the evaluator share."""

    syncer: AddressList = Field(
        default=("127.0.0.1:50051",),
        min_length=1,
        description="Where the syncer listens; several addresses are tried in turn.",
    )
    bulk_connections: int = Field(
        default=1,
        ge=1,
        le=16,
        description="Connections to the syncer that fragments are spread over; several are faster over long distances.",
    )
    download_bytes_per_second_max: int = Field(
        default=0,
        ge=0,
        le=BYTES_PER_SECOND_MAX,
        description="All downloads of this process together move at most this much; 0: no limit.",
    )
    cache_dir: FilePath = Field(
        default=Path("~/.cache/decoupled-diloco"),
        description="Directory for compiled programs and prepared data; may be shared and deleted.",
    )
    http_listen: str = Field(
        default="", description="Where /metrics is served in plain HTTP, host:port; empty: nowhere."
    )
    platform: Literal["auto", "cpu", "gpu", "tpu"] = Field(
        default="auto", description="The kind of device; auto: what JAX finds."
    )
    workload_options: dict[str, object] = Field(
        default_factory=dict,
        description="Options of the workload on this machine alone, above [workload.options]: paths, caches.",
    )

    @field_validator("syncer")
    @classmethod
    def _check_syncer(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for text in value:
            check_address(text)
        return value

    @field_validator("http_listen")
    @classmethod
    def _check_http_listen(cls, value: str) -> str:
        return check_address(value) if value else value

    @property
    def cache_path(self) -> Path:
        """The cache directory with "~" resolved."""
        return self.cache_dir.expanduser()

    def findings(self) -> Iterable[Finding]:
        """Plaintext off loopback, and half of a TLS pair."""
        return self.dial_findings("syncer", self.syncer)


class LearnerSettings(ParticipantSettings):
    """Settings of one learner process."""

    learner_id: Name = Field(
        default_factory=lambda: learner_id_from_hostname(socket.gethostname()),
        description="Stable id of this learner; a second process with the same id replaces the first.",
    )
    upload_bytes_per_second_max: int = Field(
        default=0,
        ge=0,
        le=BYTES_PER_SECOND_MAX,
        description="All uploads of this process together move at most this much; 0: no limit.",
    )
    step_seconds_min: float = Field(
        default=0.0,
        ge=0,
        le=SECONDS_MAX,
        description="Pads every step to this duration, for experiments; 0: no padding.",
    )
    drain_seconds: float = Field(
        default=30.0,
        gt=0,
        le=SECONDS_MAX,
        description="After the first SIGTERM: time to answer open asks and leave the run in order.",
    )
    verify_applied: bool = Field(
        default=False,
        description="Reads every applied version back from the devices and compares its digest; for tests.",
    )
    peer_listen: str = Field(
        default="",
        description="Where other learners reach this one to recover their optimizer's state from it, host:port; empty: "
        "nowhere.",
    )
    peer_advertise: str = Field(
        default="",
        description="The address that other learners are told, host:port; empty: peer_listen, with this host's name in "
        "place of 0.0.0.0.",
    )
    peer_recovery_seconds: float = Field(
        default=120.0,
        ge=0,
        le=SECONDS_MAX,
        description="How long to look for a peer's optimizer state before training goes on without; 0: not at all.",
    )
    snapshot_dir: FilePath | None = Field(
        default=None,
        description="Directory that keeps this learner's optimizer state for a restart without a peer; nothing: none.",
    )
    snapshot_seconds: float = Field(default=300.0, gt=0, le=SECONDS_MAX, description="Time between two such snapshots.")
    journal: FilePath | None = Field(
        default=None,
        description="File that gets one JSON object a line for every step, contribution and applied version; nothing: "
        "none.",
    )

    @field_validator("peer_listen", "peer_advertise")
    @classmethod
    def _check_peer_address(cls, value: str) -> str:
        return check_address(value) if value else value

    def findings(self) -> Iterable[Finding]:
        """Those of every participant, and a peer service that others could read and change."""
        yield from super().findings()
        if self.peer_advertise and not self.peer_listen:
            yield Finding(("peer_advertise",), "has no use without peer_listen")
        if self.peer_listen and not self.insecure and self.tls_certificate is None:
            ways_out = ("give --tls-certificate FILE and --tls-key FILE", "add --insecure on a network that you trust")
            if problem := plaintext_problem(parse_address(self.peer_listen), ways_out):
                yield Finding(("peer_listen",), problem)


class EvaluatorSettings(ParticipantSettings):
    """Settings of one evaluator process."""

    evaluator_id: Name = Field(default="evaluator", description="Stable id of this evaluator.")
    interval_steps: int = Field(
        default=24, ge=1, description="Global steps between two evaluations; later ones are skipped if slow."
    )
    output_file: FilePath | None = Field(
        default=None, description="File that gets one JSON object a line per evaluation; nothing: none."
    )
    assets_dir: FilePath | None = Field(
        default=None,
        description="Directory that gets what goes with an exported model, for example tokenizer.json; nothing: none.",
    )


class LearnerDocument(RunConfig):
    """The run file with the learner's own section."""

    learner: LearnerSettings = Field(default_factory=lambda: LearnerSettings())

    def findings(self) -> Iterable[Finding]:
        """Those of the run file, and rate limits that its deadlines leave no time for."""
        yield from super().findings()
        if self.learner.upload_bytes_per_second_max or self.learner.download_bytes_per_second_max:
            from learner_service.transfer_rates import learner_findings  # only now: it brings JAX

            yield from learner_findings(self, self.learner)


class EvaluatorDocument(RunConfig):
    """The run file with the evaluator's own section."""

    evaluator: EvaluatorSettings = EvaluatorSettings()

    def findings(self) -> Iterable[Finding]:
        """Those of the run file, and a rate limit that its deadlines leave no time for."""
        yield from super().findings()
        if self.evaluator.download_bytes_per_second_max:
            from learner_service.transfer_rates import evaluator_findings  # only now: it brings JAX

            yield from evaluator_findings(self, self.evaluator)


LEARNER_PROGRAM = Program(
    name="decoupled-diloco-learner",
    summary="Trains on its own data and exchanges fragments with the syncer while it goes on training. With `warm` as "
    "its first argument it only prepares data and the compilation cache, and prints what a step takes.",
    document=LearnerDocument,
    section="learner",
)
EVALUATOR_PROGRAM = Program(
    name="decoupled-diloco-evaluator",
    summary="Follows the published versions of a run and evaluates them.",
    document=EvaluatorDocument,
    section="evaluator",
)
