"""What a learner's machine keeps of each fragment and of each ask."""

from __future__ import annotations

from dataclasses import dataclass

from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.learner_effects import Copy
from decoupled_diloco.core.learner_events import Asked


@dataclass(slots=True)
class FragmentRecord:
    """What the learner knows of one fragment."""

    applied: Version | None = None
    applied_global_step: int = 0
    step_count: int = 0
    token_count: int = 0
    held: Version | None = None
    held_global_step: int = 0
    wanted: Version | None = None
    wanted_global_step: int = 0
    downloading: Version | None = None
    copy: Copy | None = None
    sent: Copy | None = None
    """The copy that was last handed to the uploader since the fragment was received."""

    @property
    def could_be_merged(self) -> bool:
        """Whether there is a copy whose base is still the newest version."""
        return self.copy is not None and (self.wanted is None or self.wanted == self.copy.base)


@dataclass(slots=True)
class AskRecord:
    """An ask that is open and not answered."""

    ask: Asked
    due_local_step: int
