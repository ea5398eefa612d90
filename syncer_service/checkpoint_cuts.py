"""Consistent cuts of a running run: what checkpoints and the mirror are made of."""

from __future__ import annotations

from decoupled_diloco.core.errors import PeerError, Reason
from syncer_service.checkpoint_files import Cut
from syncer_service.serving import Serving
from syncer_service.shell import Shell
from syncer_service.store.interface import RunModel


class Cuts:
    """Takes them. For the event loop's thread.

    A cut is the machine's state at an instant at which every version that it names is the newest one that is durable:
    exactly what a restart would come to. Values are immutable, so that taking one copies nothing; who holds a cut keeps
    its versions in memory, which is at most one more copy of the model.

    Args:
        serving: The run.
        shell: Holds the newest versions.
    """

    def __init__(self, serving: Serving, shell: Shell) -> None:
        self._serving = serving
        self._machine = serving.machine
        self._shell = shell

    @property
    def has_parameters(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self._machine.versions)

    async def take(self) -> Cut:
        """The first cut that is possible; the wait is for one commit's news at most.

        Raises:
            PeerError: NOT_READY before the run has parameters, SHUTTING_DOWN at the end of the process.
        """
        if not self.has_parameters:
            raise PeerError(Reason.NOT_READY, "the run has no parameters yet, so there is nothing to keep")
        await self._serving.driver.wait_until(self._is_consistent)
        if not self._is_consistent():
            raise PeerError(Reason.SHUTTING_DOWN, "the syncer is shutting down")
        agreement = self._serving.agreement
        return Cut(
            agreement.run_id,
            self._machine.run_state(),
            self._shell.newest(),
            RunModel(agreement.known().schema.to_dict(), dict(agreement.fingerprint), agreement.first_learner),
            agreement.config_values,
        )

    def _is_consistent(self) -> bool:
        """Not while a commit is durable that the machine has not booked, nor while another state takes its place."""
        newest = self._shell.newest()
        return not self._machine.steering.is_rolling_back and [
            commit.version for _, commit in sorted(newest.items())
        ] == list(self._machine.versions)
