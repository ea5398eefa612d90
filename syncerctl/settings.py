"""Where the syncer's admin port is and how to talk to it, from flags and the environment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from pydantic import Field, field_validator

from decoupled_diloco.run_file import ADMIN_ADDRESS_VARIABLE
from decoupled_diloco.runtime.config import Finding
from decoupled_diloco.runtime.process_settings import AddressText, CallerTlsSettings, check_address

DEFAULT_ADDRESS: Final = "127.0.0.1:50052"
ADDRESS_VARIABLE: Final = ADMIN_ADDRESS_VARIABLE


class ConnectionSettings(CallerTlsSettings):
    """The connection of one call of syncerctl."""

    address: AddressText = Field(default=DEFAULT_ADDRESS, description="The syncer's admin port.")
    timeout_seconds: float = Field(default=10.0, gt=0, description="How long to wait for each answer.")

    _address = field_validator("address")(check_address)

    def findings(self) -> Iterable[Finding]:
        """TLS settings that do not fit together, plaintext off loopback."""
        return self.dial_findings("address", (self.address,))
