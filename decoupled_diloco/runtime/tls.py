"""TLS for gRPC: credentials from files, and the rule that plaintext stays on loopback.

A server re-reads its certificate, key and client CA when one of the files changes, so that a renewed
certificate needs no restart. Anything wrong with the files is a `ConfigError` that names the setting.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from decoupled_diloco.runtime.config import ConfigError
from decoupled_diloco.runtime.ports import Address


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The PEM files of one end of a connection; None where the end has none.

    Attributes:
        certificate: Own certificate chain.
        key: Private key of the certificate, not encrypted.
        authority: Certificates of the authorities that may sign the other end's certificate. On a server: if
            given, callers must present a certificate (mutual TLS). On a caller: None means the system's
            authorities.
        section: Where the settings live, for messages, for example "syncer".
        authority_setting: Name of the authority's setting, for messages.
    """

    certificate: Path | None = None
    key: Path | None = None
    authority: Path | None = None
    section: str = "tls"
    authority_setting: str = "tls_ca"

    def check(self) -> None:
        """Reads all files once.

        Raises:
            ConfigError: One line for each file that is missing, unreadable or not what it should be.
        """
        problems = []
        if (self.certificate is None) != (self.key is None):
            given, absent = ("tls_certificate", "tls_key") if self.key is None else ("tls_key", "tls_certificate")
            problems.append(
                f"{self.section}.{given} is given without {self.section}.{absent}; both are needed together"
            )
        for setting, path, word in (
            ("tls_certificate", self.certificate, "CERTIFICATE"),
            ("tls_key", self.key, "PRIVATE KEY"),
            (self.authority_setting, self.authority, "CERTIFICATE"),
        ):
            if path is not None and (problem := _file_problem(path, word)):
                problems.append(f'{self.section}.{setting} = "{path}": {problem}')
        if not problems and self.certificate is not None and self.key is not None:
            problems.extend(self._pair_problems(self.certificate, self.key))
        if problems:
            raise ConfigError(problems)

    def _pair_problems(self, certificate: Path, key: Path) -> Sequence[str]:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # The empty password keeps OpenSSL from asking on the terminal for an encrypted key.
            context.load_cert_chain(certificate, key, password="")
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                what = "is not the key of that certificate; give the pair that belongs together"
            else:
                what = f"cannot be loaded ({error.reason or error}); both must be PEM, without a passphrase"
            return [f'{self.section}.tls_key = "{key}", {self.section}.tls_certificate = "{certificate}": {what}']
        return []


def _file_problem(path: Path, word: str) -> str | None:
    """What is wrong with a PEM file, or None. `word` is what its block must be called."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return "there is no such file"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if b"-----BEGIN " not in text:
        return "is not a PEM file (it has no -----BEGIN line)"
    if word.encode() not in text:
        return f"holds no {word.lower()}"
    return None


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Credentials of a server, renewed when the files change.

    Raises:
        ConfigError: If the files cannot be used now. A later change that cannot be used is ignored.
    """
    if files.certificate is None or files.key is None:
        raise ConfigError(f"{files.section}: TLS needs tls_certificate and tls_key")
    files.check()
    reload = _Reload(files)
    return grpc.dynamic_ssl_server_credentials(
        reload.configuration(),
        reload.changed_configuration,  # type: ignore[arg-type]  # the stubs lack "None: nothing changed"
        require_client_authentication=files.authority is not None,
    )


class _Reload:
    """Reads a server's files again when their modification times change; called from gRPC's threads."""

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._stamp = self._read_stamp()

    def _read_stamp(self) -> tuple[int, ...]:
        paths = (self._files.certificate, self._files.key, self._files.authority)
        return tuple(path.stat().st_mtime_ns for path in paths if path is not None)

    def configuration(self) -> grpc.ServerCertificateConfiguration:
        files = self._files
        assert files.certificate is not None
        assert files.key is not None
        pair = (files.key.read_bytes(), files.certificate.read_bytes())
        authority = files.authority.read_bytes() if files.authority is not None else None
        return grpc.ssl_server_certificate_configuration([pair], authority)

    def changed_configuration(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration, or None if nothing changed or what is there now cannot be used."""
        with self._lock:
            try:
                stamp = self._read_stamp()
                if stamp == self._stamp:
                    return None
                self._files.check()
                configuration = self.configuration()
            except (
                OSError,
                ConfigError,
            ):  # in the middle of a renewal: keep what works, look again next time
                return None
            self._stamp = stamp
            return configuration


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of a caller.

    Raises:
        ConfigError: If the files cannot be used.
    """
    files.check()

    def read(path: Path | None) -> bytes | None:
        return path.read_bytes() if path is not None else None

    return grpc.ssl_channel_credentials(
        root_certificates=read(files.authority),
        private_key=read(files.key),
        certificate_chain=read(files.certificate),
    )


def speaks_tls(address: Address, timeout_seconds: float) -> bool | None:
    """Whether what listens at an address speaks TLS, found out by greeting it; None if nothing answers.

    For explanations of calls that failed only: no certificate is looked at.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((address.host, address.port), timeout_seconds) as connection,
            context.wrap_socket(connection, server_hostname=address.host),
        ):
            return True
    except ssl.SSLEOFError:
        return False
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")  # a refusal in TLS is TLS; anything else was no answer to the greeting
    except OSError:
        return None


def plaintext_problem(address: Address, ways_out: Sequence[str]) -> str | None:
    """Why plaintext is refused for this address, or None on loopback.

    Args:
        address: Where the process listens, or what it dials.
        ways_out: What the operator can do instead, each an imperative.
    """
    if address.is_loopback:
        return None
    return (
        f"{address} is not a loopback address, and without TLS anybody on the way can read and change what "
        f"passes; either {', or '.join(ways_out)}"
    )
