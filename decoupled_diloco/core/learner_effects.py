"""What a learner's machine asks for: effects for the network thread, the plan of a boundary for the device thread."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from decoupled_diloco.core.events import ContributionHeader
from decoupled_diloco.core.ids import Decline, Version
from decoupled_diloco.core.policy import ApplyRule


class Hold(StrEnum):
    """Why the device thread makes no step now. None of them is waiting for a transfer while the run trains."""

    RECOVERING = "recovering"
    PAUSED = "paused"
    BARRIER = "barrier"
    DRAINING = "draining"
    DETACHED = "detached"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Copy:
    """An immutable copy of a fragment, taken at a step boundary; the shell holds its arrays."""

    fragment: int
    base: Version
    local_step: int
    total_token_count: int
    step_count: int
    token_count: int
    cursor: int

    def header(self, learner: str, incarnation: int, round_number: int, payload_bytes: int = 0) -> ContributionHeader:
        """What a contribution of it says of itself."""
        return ContributionHeader(
            learner=learner,
            incarnation=incarnation,
            round=round_number,
            fragment=self.fragment,
            base=self.base,
            local_step=self.local_step,
            total_token_count=self.total_token_count,
            step_count=self.step_count,
            token_count=self.token_count,
            cursor=self.cursor,
            payload_bytes=payload_bytes,
        )


@dataclass(frozen=True, slots=True)
class Apply:
    """Write a downloaded version into the parameters, by the rule given here: what recovers is always overwritten.

    `since` is the copy that `carry` measures from; None for the other rules.
    """

    fragment: int
    version: Version
    global_step: int
    rule: ApplyRule = "overwrite"
    since: Copy | None = None
    kept_token_count: int = 0


@dataclass(frozen=True, slots=True)
class Upload:
    """Send a copy as the contribution to a round."""

    round: int
    copy: Copy


@dataclass(frozen=True, slots=True)
class DeclineRound:
    """Tell the syncer that there is nothing for a round."""

    round: int
    reason: Decline


@dataclass(frozen=True, slots=True)
class Download:
    """Fetch a version; `held` is what a delta may build on, `global_step` goes back with `Downloaded`."""

    fragment: int
    version: Version
    held: Version | None
    global_step: int


@dataclass(frozen=True, slots=True)
class CancelUpload:
    """The round has closed; an upload for it is pointless."""

    round: int


@dataclass(frozen=True, slots=True)
class UploadInitialParameters:
    """Send this learner's own initial parameters, all fragments."""


@dataclass(frozen=True, slots=True)
class Leave:
    """Say goodbye: nothing is left to answer."""

    reason: str


LearnerEffect = Upload | DeclineRound | Download | CancelUpload | UploadInitialParameters | Leave


@dataclass(frozen=True, slots=True)
class Boundary:
    """What the device thread does between two steps, in this order: applies, copies; then it holds or steps."""

    applies: tuple[Apply, ...]
    copies: tuple[Copy, ...]
    uploads: tuple[Upload, ...]
    hold: Hold | None
    schedule_step: int
    restart_optimizer: bool = False
