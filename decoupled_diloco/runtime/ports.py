"""Addresses of the form host:port: reading them, and saying why one cannot be used."""

from __future__ import annotations

import errno
import ipaddress
import socket
from dataclasses import dataclass

from decoupled_diloco.runtime.config import ConfigError

PORT_MAX = 65535


@dataclass(frozen=True, slots=True)
class Address:
    """A host (name, IPv4 or IPv6 without brackets) and a port; port 0 asks the system for a free one."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the address; of all names only localhost counts."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def parse_address(text: str) -> Address:
    """Reads "host:port" or "[v6]:port".

    Raises:
        ValueError: With what is wanted, if the text is not an address.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"host:port, with an IPv6 host in brackets, for example [{text}]:50051")
    if not colon or not host or any(character.isspace() or character == "/" for character in host):
        raise ValueError("host:port, for example 127.0.0.1:50051")
    if not (port.isascii() and port.isdigit() and int(port) <= PORT_MAX):
        raise ValueError(f"host:port with a port between 0 and {PORT_MAX}, for example {host}:50051")
    return Address(host, int(port))


def listen_error(address: Address, setting: str, cause: BaseException | str) -> ConfigError:
    """The error for an address that cannot be listened on.

    Args:
        address: Where the process wanted to listen.
        setting: The setting to change, dotted, for example "syncer.listen".
        cause: What the system said.
    """
    if isinstance(cause, socket.gaierror):
        return ConfigError(f'{setting} = "{address}": this host name cannot be resolved; use an IP address')
    number = cause.errno if isinstance(cause, OSError) else None
    text = str(cause)
    if number == errno.EADDRINUSE or "address already in use" in text.lower():
        return ConfigError(
            f'{setting} = "{address}": another process already listens on port {address.port}; stop it, or '
            f"choose another port (port 0 takes any free one)"
        )
    if number == errno.EACCES or "permission denied" in text.lower():
        return ConfigError(f'{setting} = "{address}": this user may not listen on port {address.port}; use one >= 1024')
    if number == errno.EADDRNOTAVAIL or "cannot assign requested address" in text.lower():
        return ConfigError(
            f'{setting} = "{address}": this machine has no such address; use 0.0.0.0:{address.port} for '
            f"all of its addresses, or 127.0.0.1:{address.port} for itself alone"
        )
    return ConfigError(f'{setting} = "{address}": cannot be listened on: {text}')


def check_listenable(address: Address, setting: str) -> None:
    """Binds the address for a moment, because gRPC itself does not say why it cannot.

    Raises:
        ConfigError: With the reason and what to change.
    """
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, target = found[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
            probe.listen(1)
    except OSError as error:
        raise listen_error(address, setting, error) from None
