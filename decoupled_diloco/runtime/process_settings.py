"""Settings that several processes share: logs, and TLS of the calling side."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from decoupled_diloco.runtime.config import Finding, Section
from decoupled_diloco.runtime.config_fields import Expect
from decoupled_diloco.runtime.ports import parse_address
from decoupled_diloco.runtime.tls import TlsFiles, plaintext_problem

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "human"]

FilePath = Annotated[Path, Field(strict=False)]
"""A path; text is taken as one."""
AddressText = Annotated[str, Expect("host:port, for example 127.0.0.1:50051")]
"""An address as people write it; checked by `check_address`."""


def check_address(text: str) -> str:
    """Validator: returns an address text unchanged.

    Raises:
        ValueError: If it is not host:port.
    """
    parse_address(text)
    return text


class LogSettings(Section):
    """How a process logs. Logs go to standard error."""

    log_level: LogLevel = Field(default="info", description="Least severe level that is logged.")
    log_format: LogFormat = Field(
        default="auto",
        description="json: one object a line; human: for people; auto: human on a terminal, else json.",
    )
    log_levels: dict[str, LogLevel] = Field(
        default_factory=dict,
        description="Levels of single loggers by name, for example my_service.store; the longest name wins.",
    )


class CallerTlsSettings(Section):
    """TLS of a process that dials."""

    tls_ca: FilePath | None = Field(
        default=None,
        description="PEM file with the authorities that may sign the server's certificate; turns TLS on.",
    )
    tls_system_roots: bool = Field(default=False, description="Turns TLS on with the authorities of the system.")
    tls_certificate: FilePath | None = Field(
        default=None,
        description="PEM file with the own certificate, where the server wants one (mutual TLS).",
    )
    tls_key: FilePath | None = Field(default=None, description="PEM file with the private key of tls_certificate.")
    tls_server_name: str = Field(
        default="",
        description="Name to expect in the server's certificate, where it differs from the dialled host.",
    )
    insecure: bool = Field(default=False, description="Allow plaintext to addresses that are not loopback.")

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.tls_ca is not None or self.tls_system_roots

    def tls_files(self, section: str) -> TlsFiles | None:
        """The files for `tls.channel_credentials`, or None for plaintext."""
        if not self.uses_tls:
            return None
        return TlsFiles(self.tls_certificate, self.tls_key, self.tls_ca, section, "tls_ca")

    def dial_findings(self, field: str, addresses: Iterable[str]) -> Iterable[Finding]:
        """What is wrong with dialling these addresses with these TLS settings."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            yield Finding(("tls_certificate", "tls_key"), "are needed together")
        if self.tls_certificate is not None and not self.uses_tls:
            yield Finding(("tls_certificate",), "has no use without TLS; give --tls-ca FILE or --tls-system-roots too")
        if self.uses_tls or self.insecure:
            return
        ways_out = (
            "give --tls-ca FILE (or --tls-system-roots)",
            "add --insecure on a network that you trust",
        )
        for text in addresses:
            if problem := plaintext_problem(parse_address(text), ways_out):
                yield Finding((field,), problem)
