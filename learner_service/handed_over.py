"""What the device thread and the network thread hand over to each other; `handover` is where they meet."""

from __future__ import annotations

from dataclasses import dataclass, field

from decoupled_diloco.arrays.device import DeviceCopy
from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.staging import StagedFragment
from decoupled_diloco.core.events import Progress
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.learner_effects import (
    Apply,
    CancelUpload,
    DeclineRound,
    Download,
    Hold,
    Leave,
    UploadInitialParameters,
)
from learner_service.copies import CopySlot


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version that lies complete in host memory and on the devices. Its vectors are never written to.

    Attributes:
        staged: what is written into the parameters.
        base: what deltas are taken against: the values as the parameters hold them.
        download_seconds: how long it took to come; None if it was here already.
    """

    staged: StagedFragment
    base: FloatVector
    download_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class UploadJob:
    """A contribution to send: the copy, and the base that its delta is anchored at."""

    round: int
    slot: CopySlot
    base: FloatVector
    generation: int


Action = DeclineRound | Download | CancelUpload | UploadInitialParameters | Leave | UploadJob
"""What the machine wants of the network thread, with the copy and the base of an upload beside it."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A version was applied; what the report says of it."""

    apply: Apply
    local_step: int
    token_count: int
    download_seconds: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """What the device thread does at this boundary, in this order; then it holds or steps.

    Attributes:
        applies: versions to write into the parameters, each with the copy that `carry` measures from.
        slots: copies to take and fill.
        hold: why no step may be made now.
        schedule_step: step of the inner learning-rate schedule.
        restart_optimizer: the optimizer's state belongs to values that are gone.
    """

    applies: tuple[tuple[Apply, Arrived, DeviceCopy | None], ...]
    slots: tuple[CopySlot, ...]
    hold: Hold | None
    schedule_step: int
    restart_optimizer: bool
    uploads: tuple[UploadJob, ...]
    generation: int
    news_count: int


@dataclass(slots=True)
class Outbox:
    """What the device thread left for the network thread since it last looked."""

    uploads: list[UploadJob] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The learner at one instant, for display and metrics."""

    progress: Progress
    hold: Hold | None
    applied: dict[int, Version]
