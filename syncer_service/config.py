"""Process settings of the syncer: addresses, files, TLS, logs; the run file is `decoupled_diloco.config`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import Field, field_validator

from decoupled_diloco.command_line import Program
from decoupled_diloco.config import RunConfig
from decoupled_diloco.runtime.config import Finding
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.runtime.process_settings import AddressText, FilePath, LogSettings, check_address
from decoupled_diloco.runtime.tls import TlsFiles, plaintext_problem
from syncer_service.checkpoint_storage import check_url


class SyncerSettings(LogSettings):
    """Settings of one syncer process."""

    listen: AddressText = Field(
        default="127.0.0.1:50051", description="Where learners and evaluators reach the syncer."
    )
    admin_listen: AddressText = Field(
        default="127.0.0.1:50052", description="Where operators and syncerctl reach the syncer."
    )
    http_listen: AddressText = Field(
        default="127.0.0.1:9464",
        description="Where the status page, /metrics and the probes are served, read only, in plain HTTP.",
    )
    state_dir: FilePath = Field(default=Path("runs/syncer/state"), description="Directory of the run's durable state.")
    tape_bytes_max: int = Field(
        default=512 * 1024**2,
        ge=0,
        description="Disk space for the event tape in state_dir, which a replay needs; 0: no tape is kept.",
    )
    base_interval_commits: int = Field(
        default=8,
        ge=1,
        le=1024,
        description="Commits of a fragment between two whole payloads on the disk; the ones in between write the "
        "merged delta, a third of the bytes. 1 writes a whole payload at every commit.",
    )
    checkpoint_url: str = Field(
        default="",
        description="Folder of the run's checkpoints: a path, or a URL of any fsspec file system such as "
        "s3://bucket/run; empty: checkpoints in state_dir.",
    )
    checkpoint_interval_steps: int = Field(
        default=1000,
        ge=0,
        description="Global steps between two automatic checkpoints; one more is made at the end of the run. 0: none.",
    )
    checkpoints_kept: int = Field(
        default=3, ge=1, description="Automatic checkpoints that are kept, newest first; others stay until deleted."
    )
    mirror_url: str = Field(
        default="",
        description="Folder, as in checkpoint_url, that every commit is copied to in the background, to go on from "
        "when the disk is lost; empty: no mirror.",
    )
    restore_from: str = Field(
        default="",
        description="Folder of a checkpoint, or a mirror, that the run goes on from; state_dir must hold no run, or "
        "one that came from there.",
    )
    output_dir: FilePath = Field(
        default=Path("runs/syncer/output"), description="Directory of the exported model and the summary."
    )
    tls_certificate: FilePath | None = Field(
        default=None, description="PEM file with the certificate chain; turns TLS on for both gRPC ports."
    )
    tls_key: FilePath | None = Field(default=None, description="PEM file with the private key of tls_certificate.")
    tls_client_ca: FilePath | None = Field(
        default=None,
        description="PEM file with the authorities that must have signed a caller's certificate (mutual TLS).",
    )
    insecure: bool = Field(default=False, description="Allow plaintext gRPC on addresses that are not loopback.")
    drain_seconds: float = Field(
        default=10.0, gt=0, description="After the first SIGTERM: time to end calls in flight and save state."
    )
    exit_when_finished: bool = Field(
        default=True,
        description="End the process, with exit code 0, once a finished run is exported and everybody has left.",
    )
    queue_events_max: int = Field(
        default=4096, ge=16, description="Events that may wait for a decision; more calls are asked to retry."
    )
    upload_buffer_bytes_max: int = Field(
        default=8 * 1024**3,
        ge=1024**2,
        description="Memory for contributions that are being received; more uploads are asked to retry.",
    )
    merge_threads: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Threads that share the arithmetic of a merge, behind all others of the process; 0: one per "
        "processor. The result has the same bits for any number.",
    )

    _addresses = field_validator("listen", "admin_listen", "http_listen")(check_address)

    _urls = field_validator("checkpoint_url", "mirror_url", "restore_from")(check_url)

    @property
    def checkpoint_folder(self) -> str:
        """Where checkpoints lie."""
        return self.checkpoint_url or str(self.state_dir / "checkpoints")

    @property
    def tls_files(self) -> TlsFiles | None:
        """The files for `tls.server_credentials`, or None for plaintext."""
        if self.tls_certificate is None or self.tls_key is None:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_client_ca, "syncer", "tls_client_ca")

    def findings(self) -> Iterable[Finding]:
        """Contradictions: half of a TLS pair, one address for two ports, plaintext off loopback."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            yield Finding(("tls_certificate", "tls_key"), "are needed together")
        if self.tls_client_ca is not None and self.tls_certificate is None:
            yield Finding(("tls_client_ca",), "has no use without tls_certificate and tls_key")
        yield from self._port_findings()
        yield from self._place_findings()
        if self.tls_certificate is not None or self.insecure:
            return
        ways_out = (
            "give --tls-certificate FILE and --tls-key FILE",
            "add --insecure on a network that you trust",
        )
        for field in ("listen", "admin_listen"):
            if problem := plaintext_problem(parse_address(getattr(self, field)), ways_out):
                yield Finding((field,), problem)

    def _place_findings(self) -> Iterable[Finding]:
        if self.mirror_url and self.mirror_url.rstrip("/") == self.checkpoint_folder.rstrip("/"):
            yield Finding(("mirror_url", "checkpoint_url"), "a mirror needs a folder of its own")
        if _is_within(self.mirror_url, self.state_dir):
            yield Finding(("mirror_url", "state_dir"), "a mirror must lie elsewhere: it is for when state_dir is lost")
        if _is_within(self.checkpoint_url, self.state_dir) and not _is_within(
            self.checkpoint_url, self.state_dir / "checkpoints"
        ):
            yield Finding(("checkpoint_url", "state_dir"), "in state_dir only the folder checkpoints is for them")

    def _port_findings(self) -> Iterable[Finding]:
        seen: dict[str, str] = {}
        for field in ("listen", "admin_listen", "http_listen"):
            text = getattr(self, field)
            if text in seen and parse_address(text).port != 0:
                yield Finding((seen[text], field), "every service needs a port of its own")
            seen[text] = field


def _is_within(url: str, folder: Path) -> bool:
    """Whether a path or URL leads into a folder of this machine, or is it."""
    path = url.removeprefix("file://")
    return bool(path) and "://" not in path and Path(path).resolve().is_relative_to(folder.resolve())


class SyncerDocument(RunConfig):
    """The run file with the syncer's own section."""

    syncer: SyncerSettings = SyncerSettings()


PROGRAM = Program(
    name="decoupled-diloco-syncer",
    summary="Holds the run: asks learners for contributions, merges them, publishes new versions.",
    document=SyncerDocument,
    section="syncer",
)
