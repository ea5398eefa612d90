"""The optimizer's state in a file of this machine: a cache, for a learner that starts again while no peer is there.

The file is written under another name and renamed, so that there is an old one or a new one. One that is torn, rotten
or of another learner, run, model or optimizer is ignored, with the reason in the log.

    payloads of all parts | index: JSON | length of the index, 8 bytes | magic, 8 bytes
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np

from decoupled_diloco.arrays.optimizer_fragments import OptimizerFragments, Payload
from decoupled_diloco.wire.stream import payload_digest

MAGIC: Final = b"DDOPT001"
_LENGTH_BYTES: Final = 8
INDEX_BYTES_MAX: Final = 64 << 20
"""An index longer than this is not ours."""


class SnapshotError(Exception):
    """There is no snapshot that can be used; the message says why."""


class SnapshotWriter:
    """Writes one snapshot, part by part; nothing of it is visible before `commit`.

    Args:
        path: the file to replace.
        learner: whose state it is.
        run_id: of its run.
        schema_digest: of its parameters.
        fragments: how the state is cut.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(self, path: Path, learner: str, run_id: str, schema_digest: str, fragments: OptimizerFragments):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        self._file: BinaryIO = os.fdopen(number, "wb")
        self._temporary, self._path = Path(name), path
        self._index = _index_of(learner, run_id, schema_digest, fragments)
        self._digests: list[str] = []

    def add(self, payload: Payload) -> None:
        """The next part."""
        self._file.write(payload.data)
        self._digests.append(payload_digest(payload.data))

    def commit(self) -> int:
        """Makes the snapshot durable, in place of the older one; returns its bytes."""
        index = json.dumps(self._index | {"digests": self._digests}).encode()
        self._file.write(index + len(index).to_bytes(_LENGTH_BYTES, "little") + MAGIC)
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        self._temporary.replace(self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return size

    def discard(self) -> None:
        """Leaves nothing behind, unless it was committed."""
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._temporary.unlink()


def snapshot_path(folder: Path, learner: str) -> Path:
    """Where the snapshot of a learner is."""
    return folder.expanduser() / f"{learner}.optimizer"


def read_snapshot(
    path: Path, learner: str, run_id: str, schema_digest: str, fragments: OptimizerFragments
) -> tuple[Payload, ...]:
    """The payloads of all parts, verified.

    Raises:
        SnapshotError: there is no file, or it is not of this learner, run, model and optimizer, or not whole.
    """
    wanted = _index_of(learner, run_id, schema_digest, fragments)
    try:
        with path.open("rb") as file:
            found = _read_index(file)
            for field, value in wanted.items():
                if found.get(field) != value:
                    raise SnapshotError(f"{path}: its {field} is not this learner's")
            return _read_payloads(file, path, fragments, found.get("digests") or [])
    except FileNotFoundError:
        raise SnapshotError(f"there is no snapshot {path}") from None
    except (OSError, ValueError) as error:
        raise SnapshotError(f"{path} cannot be read: {error}") from None


def _read_index(file: BinaryIO) -> dict[str, Any]:
    tail = _LENGTH_BYTES + len(MAGIC)
    end = file.seek(0, os.SEEK_END)
    file.seek(max(0, end - tail))
    trailer = file.read()
    length = int.from_bytes(trailer[:_LENGTH_BYTES], "little")
    if trailer[_LENGTH_BYTES:] != MAGIC or not 0 < length <= min(INDEX_BYTES_MAX, end - tail):
        raise ValueError("it does not end like a snapshot")
    file.seek(end - tail - length)
    index = json.loads(file.read(length))
    if not isinstance(index, dict):
        raise ValueError("its index is not one")
    return index


def _read_payloads(
    file: BinaryIO, path: Path, fragments: OptimizerFragments, digests: Sequence[str]
) -> tuple[Payload, ...]:
    if len(digests) != fragments.part_count:
        raise SnapshotError(f"{path}: its index has {len(digests)} digests for {fragments.part_count} parts")
    file.seek(0)
    payloads = []
    for part, digest in enumerate(digests):
        payload = np.fromfile(file, np.uint8, fragments.payload_bytes(part))
        if payload.size != fragments.payload_bytes(part) or payload_digest(payload.data) != digest:
            raise SnapshotError(f"{path}: part {part} is not what was written")
        payloads.append(payload)
    return tuple(payloads)


def _index_of(learner: str, run_id: str, schema_digest: str, fragments: OptimizerFragments) -> dict[str, Any]:
    entries = [[json.loads(json.dumps(asdict(entry))) for entry in part] for part in fragments.entries]
    return {"learner": learner, "run_id": run_id, "schema_digest": schema_digest, "entries": entries}
