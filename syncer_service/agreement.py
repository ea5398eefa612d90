"""What everybody who joins must agree on: protocol version, run, configuration, model.

A mismatch shows both sides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from decoupled_diloco.arrays.fragments import Fragmentation, fragment_schema
from decoupled_diloco.arrays.schema import Schema, SchemaError, describe_difference
from decoupled_diloco.config import describe_differences
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.ids import LEARNER_ID_PATTERN, Role
from decoupled_diloco.wire.codec import PROTOCOL_VERSION

FINGERPRINT_PREFIX = "fingerprint."
"""Values of this prefix are not of the run file: they name what learners of one run have in common beyond it, such as a
tokenizer. The syncer has none of its own; the first learner's become the run's."""

DIFFERENCES_SHOWN_MAX = 8
"""Settings shown in a message; the rest are counted."""


@dataclass(frozen=True, slots=True)
class JoinOffer:
    """What a caller says of itself at the join.

    Attributes:
        learner: Its id.
        role: What it will do.
        protocol: Lowest and highest protocol version that it speaks.
        run_id: The run it wants; empty: any.
        config_digest: Digest of its run file; empty: it has none (observers of other tools).
        config_values: The resolved values by dotted name.
        schema: Its model; None: it says nothing of it.
    """

    learner: str
    role: Role
    protocol: tuple[int, int]
    run_id: str
    config_digest: str
    config_values: Mapping[str, str]
    schema: Schema | None


class Agreement:
    """The syncer's side of it. The first learner's schema becomes the run's.

    Args:
        run_id: The run.
        config_digest: Digest of the run file.
        config_values: Its values by dotted name.
        fragment_count: P.
    """

    def __init__(self, run_id: str, config_digest: str, config_values: Mapping[str, str], fragment_count: int) -> None:
        self.run_id = run_id
        self.config_digest = config_digest
        self.config_values = dict(config_values)
        self.fragmentation: Fragmentation | None = None
        self.fingerprint: dict[str, str] = {}
        """What its first learner said that learners have in common."""
        self.first_learner = ""
        self._fragment_count = fragment_count

    @property
    def schema_digest(self) -> str:
        """Digest of the run's schema; empty before the first learner has joined."""
        return self.fragmentation.schema.digest if self.fragmentation is not None else ""

    def value_count(self, fragment: int) -> int:
        """Number of float32 values of a fragment; 0 before the first learner has joined."""
        return self.fragmentation.fragments[fragment].size if self.fragmentation is not None else 0

    def known(self) -> Fragmentation:
        """The fragmentation.

        Raises:
            PeerError: NOT_READY, before the first learner has joined.
        """
        if self.fragmentation is None:
            raise PeerError(Reason.NOT_READY, "no learner has joined yet, so the run has no parameters", None, 1.0)
        return self.fragmentation

    def check(self, offer: JoinOffer) -> Fragmentation | None:
        """Compares an offer; returns the fragmentation of its schema, if it has one.

        Raises:
            PeerError: With the first thing that the two sides do not agree on.
        """
        self._check_learner(offer.learner)
        self._check_protocol(offer)
        if offer.run_id and offer.run_id != self.run_id:
            raise PeerError(
                Reason.RUN_MISMATCH,
                f'this syncer holds the run "{self.run_id}", and {offer.learner} wants to join "{offer.run_id}"; '
                "dial the syncer of that run, or change run.id",
                {"run-of-syncer": self.run_id, "run-of-caller": offer.run_id},
            )
        self._check_config(offer)
        if offer.schema is None:
            if offer.role is Role.LEARNER:
                raise PeerError(Reason.INVALID_FIELD, "schema: a learner must say which tensors its model has")
            return None
        fragmentation = self._check_schema(offer, offer.schema)
        self._check_fingerprint(offer)
        return fragmentation

    def adopt(self, offer: JoinOffer, fragmentation: Fragmentation) -> bool:
        """Makes the model of the first learner the run's; returns whether it was the first."""
        if self.fragmentation is not None or offer.role is not Role.LEARNER:
            return False
        self.fragmentation = fragmentation
        self.fingerprint = _fingerprint_of(offer)
        self.first_learner = offer.learner
        return True

    def restore(self, schema: Schema, fingerprint: Mapping[str, str], first_learner: str) -> Fragmentation:
        """What was agreed before the syncer was started again."""
        self.fragmentation = fragment_schema(schema, self._fragment_count)
        self.fingerprint = dict(fingerprint)
        self.first_learner = first_learner
        return self.fragmentation

    @staticmethod
    def _check_learner(learner: str) -> None:
        if not re.fullmatch(LEARNER_ID_PATTERN, learner):
            raise PeerError(
                Reason.INVALID_FIELD,
                f"learner_id = {learner!r}: must be 1 to 63 of a-z, 0-9 and -, and neither start nor end with -",
            )

    @staticmethod
    def _check_protocol(offer: JoinOffer) -> None:
        lowest, highest = offer.protocol
        if not lowest <= PROTOCOL_VERSION <= highest:
            raise PeerError(
                Reason.PROTOCOL_MISMATCH,
                f"this syncer speaks protocol version {PROTOCOL_VERSION}, {offer.learner} speaks "
                f"{lowest} to {highest}; run releases that share one",
                {"protocol-of-syncer": str(PROTOCOL_VERSION), "protocol-of-caller": f"{lowest} to {highest}"},
            )

    def _check_config(self, offer: JoinOffer) -> None:
        if offer.config_digest in ("", self.config_digest):
            return
        theirs = {name: value for name, value in offer.config_values.items() if not name.startswith(FINGERPRINT_PREFIX)}
        differences = describe_differences(self.config_values, theirs, "syncer", offer.learner)
        shown = list(differences[:DIFFERENCES_SHOWN_MAX])
        if len(differences) > DIFFERENCES_SHOWN_MAX:
            shown.append(f"and {len(differences) - DIFFERENCES_SHOWN_MAX} more")
        raise PeerError(
            Reason.CONFIG_MISMATCH,
            f"the run files of the syncer and of {offer.learner} differ: {'; '.join(shown) or 'in their digests'}. "
            "Start both with the same run file",
            {"digest-of-syncer": self.config_digest, "digest-of-caller": offer.config_digest},
        )

    def _check_fingerprint(self, offer: JoinOffer) -> None:
        if self.fragmentation is None or not offer.config_values:
            return
        theirs = _fingerprint_of(offer)
        if theirs != self.fingerprint:
            differences = describe_differences(self.fingerprint, theirs, self.first_learner, offer.learner)
            raise PeerError(
                Reason.CONFIG_MISMATCH,
                f"{offer.learner} does not train on what {self.first_learner}, the first learner of this run, trains "
                f"on: {'; '.join(differences)}. Give both the same tokenizer and data",
            )

    def _check_schema(self, offer: JoinOffer, schema: Schema) -> Fragmentation:
        if self.fragmentation is None:
            try:
                return fragment_schema(schema, self._fragment_count)
            except SchemaError as error:
                raise PeerError(Reason.SCHEMA_MISMATCH, str(error)) from error
        ours = self.fragmentation.schema
        if schema.digest != ours.digest:
            difference = describe_difference(ours, schema, "the run", offer.learner)
            raise PeerError(
                Reason.SCHEMA_MISMATCH,
                f"{offer.learner} has another model than the run (whose model is that of {self.first_learner}, "
                f"the first learner): {difference}. Start it with the workload and options of the run",
                {"schema-of-run": ours.digest, "schema-of-caller": schema.digest},
            )
        return self.fragmentation


def _fingerprint_of(offer: JoinOffer) -> dict[str, str]:
    """What a caller says that learners have in common, by name without the prefix."""
    return {
        name.removeprefix(FINGERPRINT_PREFIX): value
        for name, value in offer.config_values.items()
        if name.startswith(FINGERPRINT_PREFIX)
    }
