"""What a checkpoint or a mirror consists of: a manifest, and one payload file for every fragment.

    manifest.json        the run's state, the model, the settings, and which payload files belong to it
    fragment-0003.1.17.payload   theta, momentum and residual of version 1.17 of fragment 3, as a base record

The manifest is written last and read first, so a folder without one holds nothing yet. Every byte is covered by a
digest: the manifest carries its own, and those of the files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import xxhash

from decoupled_diloco.arrays.outer import FragmentState
from decoupled_diloco.command_line import software_version
from decoupled_diloco.core.ids import Version
from decoupled_diloco.core.plain import PlainError, from_plain, to_plain
from decoupled_diloco.core.run_state import RunState
from syncer_service.checkpoint_storage import PIECE_BYTES, StorageFolder
from syncer_service.store.interface import FragmentCommit, RunModel
from syncer_service.store.records import (
    DamageError,
    DamageKind,
    Owner,
    base_record,
    base_state,
    check_state,
    read_header,
    read_vectors,
)

FORMAT_VERSION: Final = 1
MANIFEST_FILE: Final = "manifest.json"
PAYLOAD_PATTERN: Final = r"fragment-\d{4,}\.\d+\.\d+\.payload"
"""Names of payload files."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A run at one committed position: all that it takes to go on from there.

    Attributes:
        run_id: The run.
        state: Everything but payloads.
        fragments: The versions that the state names.
        model: What the learners have agreed on.
        config_values: The run file by dotted name.
    """

    run_id: str
    state: RunState
    fragments: Mapping[int, FragmentCommit]
    model: RunModel
    config_values: Mapping[str, str]


def position_of(state: RunState) -> tuple[int, int]:
    """Timeline and committed rounds: positions of one run compare as they came about."""
    return state.timeline, state.committed_count


@dataclass(frozen=True, slots=True)
class PayloadFile:
    """One file of a manifest; the digest is xxh3-128 of all its bytes."""

    fragment: int
    name: str
    byte_count: int
    digest: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `manifest.json` says.

    Attributes:
        format_version: Of the manifest.
        kind: A checkpoint stays as it is; a mirror is replaced by every copy.
        id: Of the checkpoint; of a mirror: its lineage (see `mirror`).
        run_id: The run.
        created_at: By the host's clock, for people.
        reason: In words; may be empty.
        automatic: Whether nobody asked for it; such ones may be removed again.
        software_version: Release that wrote it.
        state: Everything but payloads.
        model: What the learners have agreed on.
        config_values: The run file by dotted name.
        files: The payload files, by fragment.
    """

    format_version: int
    kind: Literal["checkpoint", "mirror"]
    id: str
    run_id: str
    created_at: str
    reason: str
    automatic: bool
    software_version: str
    state: RunState
    model: RunModel
    config_values: dict[str, str]
    files: tuple[PayloadFile, ...]

    @property
    def position(self) -> tuple[int, int]:
        """How far the run was: what goes on from it comes after it, also in a new timeline."""
        return position_of(self.state)

    @property
    def byte_count(self) -> int:
        """Size of all payload files."""
        return sum(file.byte_count for file in self.files)


def new_manifest(
    kind: Literal["checkpoint", "mirror"],
    name: str,
    cut: Cut,
    files: Sequence[PayloadFile],
    reason: str = "",
    automatic: bool = True,
) -> Manifest:
    """A manifest of now; arguments as in `Manifest`."""
    return Manifest(
        format_version=FORMAT_VERSION,
        kind=kind,
        id=name,
        run_id=cut.run_id,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        reason=reason,
        automatic=automatic,
        software_version=software_version(),
        state=cut.state,
        model=cut.model,
        config_values=dict(cut.config_values),
        files=tuple(files),
    )


def payload_name(fragment: int, version: Version) -> str:
    """The name of a version's payload file."""
    return f"fragment-{fragment:04d}.{version}.payload"


def write_payload(folder: StorageFolder, prefix: str, owner: Owner, commit: FragmentCommit) -> PayloadFile:
    """Writes one version.

    Args:
        folder: Where to.
        prefix: Start of the path, empty or ending with a slash.
        owner: Whose it is.
        commit: The version.
    """
    record = base_record(owner, commit, 0)
    name = payload_name(commit.fragment, commit.version)
    digest = xxhash.xxh3_128()
    for piece in record.pieces:
        digest.update(piece)
    folder.write(prefix + name, record.pieces)
    return PayloadFile(commit.fragment, name, record.byte_count, str(digest.hexdigest()))


def write_manifest(folder: StorageFolder, prefix: str, manifest: Manifest) -> None:
    """Writes the manifest; all that it names is there already."""
    plain = to_plain(manifest)
    text = json.dumps({"digest": _digest_of(plain), "manifest": plain}, indent=1) + "\n"
    folder.write(prefix + MANIFEST_FILE, [memoryview(text.encode())])


def read_manifest(folder: StorageFolder, prefix: str) -> Manifest:
    """Reads and verifies a manifest.

    Raises:
        FileNotFoundError: There is none.
        DamageError: It is not what was written, or was written by a newer release.
    """
    text = folder.read(prefix + MANIFEST_FILE)
    where = folder.place(prefix + MANIFEST_FILE)
    try:
        outer = json.loads(text)
        plain, digest = outer["manifest"], outer["digest"]
        format_version = plain["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise DamageError(DamageKind.CORRUPT, f"{where} cannot be read: {error!r}") from error
    if digest != _digest_of(plain):
        raise DamageError(DamageKind.CORRUPT, f"{where} has another digest than it was written with")
    if not isinstance(format_version, int) or format_version > FORMAT_VERSION:
        raise DamageError(
            DamageKind.FOREIGN, f"{where} has format {format_version}; this release reads up to {FORMAT_VERSION}"
        )
    try:
        manifest = from_plain(Manifest, plain)
    except PlainError as error:
        raise DamageError(DamageKind.CORRUPT, f"{where}: {error}") from error
    fragments = [file.fragment for file in manifest.files]
    if not fragments or fragments != list(range(len(manifest.state.versions))):
        raise DamageError(DamageKind.CORRUPT, f"{where} has files of the fragments {fragments}")
    return manifest


def read_states(folder: StorageFolder, prefix: str, manifest: Manifest) -> dict[int, FragmentState]:
    """Reads and verifies all payload files: the values of every fragment are in memory then.

    Raises:
        DamageError: One of them is not what was written; the text names it.
    """
    states = {}
    for file in manifest.files:
        where = folder.place(prefix + file.name)
        try:
            with folder.opened(prefix + file.name) as descriptor:
                states[file.fragment] = _read_state(descriptor, file, manifest)
        except FileNotFoundError as error:
            raise DamageError(DamageKind.MISSING, f"{where} is not there") from error
        except DamageError as error:
            raise DamageError(error.kind, f"{where}: {error}") from error
    return states


def _read_state(descriptor: int, file: PayloadFile, manifest: Manifest) -> FragmentState:
    size, digest, found = os.fstat(descriptor).st_size, xxhash.xxh3_128(), 0
    if size != file.byte_count:
        raise DamageError(DamageKind.TORN, f"it has {size} bytes; {file.byte_count} were written")
    while piece := os.pread(descriptor, PIECE_BYTES, found):
        digest.update(piece)
        found += len(piece)
    if digest.hexdigest() != file.digest:
        raise DamageError(DamageKind.CORRUPT, "it has another digest than it was written with")
    header, body_offset = read_header(descriptor, 0)
    version = manifest.state.versions[file.fragment]
    if (header.owner.run, header.fragment, header.version) != (manifest.run_id, file.fragment, version):
        raise DamageError(
            DamageKind.FOREIGN,
            f"it holds version {header.version} of fragment {header.fragment} of run {header.owner.run}",
        )
    state = base_state(header, read_vectors(descriptor, header, body_offset))
    check_state(header, state)
    return state


def _digest_of(plain: Any) -> str:
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
