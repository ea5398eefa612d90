"""A folder of checkpoints: a folder for each, named by its id."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.core.errors import PeerError, Reason
from decoupled_diloco.core.run_state import RunState
from decoupled_diloco.runtime import failpoints
from syncer_service.checkpoint_files import (
    MANIFEST_FILE,
    PAYLOAD_PATTERN,
    Cut,
    Manifest,
    new_manifest,
    read_manifest,
    read_states,
    write_manifest,
    write_payload,
)
from syncer_service.checkpoint_storage import StorageFolder
from syncer_service.store.records import DamageError, Owner

ID_PATTERN: Final = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
"""Ids of checkpoints: they are names of folders."""

_PARTIAL = re.compile(rf"{PAYLOAD_PATTERN}|\.({PAYLOAD_PATTERN}|{re.escape(MANIFEST_FILE)})\.\d+\.part")
"""What a checkpoint consists of before its manifest is written."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What there is.

    Attributes:
        found: The checkpoints, newest first.
        unreadable: What looks like one and cannot be read, in sentences for people.
    """

    found: tuple[Manifest, ...]
    unreadable: tuple[str, ...] = ()


class CheckpointFolder:
    """Reads and writes checkpoints; every method blocks. For several threads, but one that writes.

    Args:
        folder: Where they lie.
    """

    def __init__(self, folder: StorageFolder) -> None:
        self._folder = folder
        self._known: dict[str, Manifest] = {}
        self._is_closed = False

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return self._folder.place()

    def close(self) -> None:
        """Ends a checkpoint that is being written after the fragment at hand."""
        self._is_closed = True

    def ids(self) -> list[str]:
        """What may be a checkpoint, by its name."""
        return [name for name in self._folder.names() if re.fullmatch(ID_PATTERN, name)]

    def write(self, cut: Cut, checkpoint: str, reason: str, automatic: bool) -> Manifest:
        """Writes a checkpoint.

        Args:
            cut: What of.
            checkpoint: Its id; empty: a free one that says where the run stood.
            reason: In words.
            automatic: Nobody asked for it.

        Raises:
            PeerError: WRONG_STATE: the id is taken; SHUTTING_DOWN.
        """
        taken = self._folder.names()
        checkpoint = checkpoint or _free_id(cut.state, taken)
        if checkpoint in taken:
            if MANIFEST_FILE in self._folder.names(checkpoint):
                raise PeerError(Reason.WRONG_STATE, f"there is a checkpoint {checkpoint!r} already")
            self._folder.remove_folder(checkpoint)  # what was left of an attempt
        prefix, owner, files = f"{checkpoint}/", Owner(checkpoint, cut.run_id), []
        try:
            for _, commit in sorted(cut.fragments.items()):
                if self._is_closed:
                    raise PeerError(Reason.SHUTTING_DOWN, "the syncer is shutting down")
                files.append(write_payload(self._folder, prefix, owner, commit))
            failpoints.hit("checkpoint.before_manifest")
            manifest = new_manifest("checkpoint", checkpoint, cut, files, reason, automatic)
            write_manifest(self._folder, prefix, manifest)
        except BaseException:
            with suppress(Exception):
                self._folder.remove_folder(checkpoint)
            raise
        self._known[checkpoint] = manifest
        return manifest

    def listing(self) -> Listing:
        """Everything that is complete; a manifest is read once."""
        found, unreadable = [], []
        for checkpoint in self.ids():
            try:
                found.append(self._known.get(checkpoint) or self.manifest(checkpoint))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except DamageError as damage:
                unreadable.append(str(damage))
        self._known = {manifest.id: manifest for manifest in found}
        found.sort(key=lambda m: (m.position, m.created_at), reverse=True)
        return Listing(tuple(found), tuple(unreadable))

    def manifest(self, checkpoint: str) -> Manifest:
        """One manifest, read afresh. The folder's name is the id: a copy is a checkpoint of its own, and stays.

        Raises:
            FileNotFoundError: There is no such checkpoint.
            DamageError: It is damaged.
        """
        manifest = read_manifest(self._folder, f"{checkpoint}/")
        return manifest if manifest.id == checkpoint else replace(manifest, id=checkpoint, automatic=False)

    def states(self, manifest: Manifest) -> Mapping[int, FragmentState]:
        """All values of a checkpoint, verified.

        Raises:
            DamageError: Something is damaged; the text names it.
        """
        return read_states(self._folder, f"{manifest.id}/", manifest)

    def remove(self, checkpoint: str) -> None:
        """Removes one: its manifest first, so that what is left of an attempt is no checkpoint any more."""
        self._known.pop(checkpoint, None)
        self._folder.remove(f"{checkpoint}/{MANIFEST_FILE}")
        self._folder.remove_folder(checkpoint)

    def remove_partial(self) -> list[str]:
        """Removes what was written of checkpoints that were never completed; returns their ids.

        Only folders with nothing in them but files of a checkpoint are surely ours.
        """
        removed = []
        for checkpoint in self.ids():
            with suppress(NotADirectoryError):
                inside = self._folder.names(checkpoint)
                if inside and all(_PARTIAL.fullmatch(name) for name in inside):
                    self._folder.remove_folder(checkpoint)
                    removed.append(checkpoint)
        return removed


def _free_id(state: RunState, taken: list[str]) -> str:
    """An id that says where the run stood."""
    name = f"t{state.timeline}-step-{state.global_step}"
    if name not in taken:
        return name
    return next(free for n in range(2, len(taken) + 3) if (free := f"{name}-{n}") not in taken)
