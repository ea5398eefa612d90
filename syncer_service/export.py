"""What a finished run leaves behind: the model as safetensors and its figures as JSON, each written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.numpy import save_file

from decoupled_diloco.arrays.encoding import FloatVector
from decoupled_diloco.arrays.fragments import Fragmentation, assemble
from decoupled_diloco.runtime.config import ConfigError

MODEL_FILE = "model.safetensors"
SUMMARY_FILE = "run_summary.json"


def check_output_dir(folder: Path) -> None:
    """Makes the folder and writes a small file in it, so that a run does not first learn at its end that it cannot.

    Raises:
        ConfigError: What is wrong with it, and what to change.
    """
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            probe.write_bytes(b"The exported model will be written here.\n")
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f'syncer.output_dir = "{folder}": the model could not be written there at the end of the run '
            f"({error.strerror or error}); give a directory that this user can make and write to"
        ) from error


def export_model(
    folder: Path,
    fragmentation: Fragmentation,
    thetas: Mapping[int, FloatVector],
    metadata: Mapping[str, str],
    name: str = MODEL_FILE,
) -> Path:
    """Writes all tensors in float32 by name.

    Args:
        folder: Where to; made if absent.
        fragmentation: The run's.
        thetas: The value of every fragment.
        metadata: Text by name, stored in the file's header.
        name: The file's name.

    Returns:
        The file.
    """
    tensors = assemble(fragmentation, thetas)
    return write_atomically(folder / name, lambda aside: save_file(tensors, aside, dict(metadata)))


def export_summary(folder: Path, summary: Mapping[str, object]) -> Path:
    """Writes figures as JSON."""
    text = json.dumps(summary, indent=2, sort_keys=True, default=str) + "\n"
    return write_atomically(folder / SUMMARY_FILE, lambda aside: aside.write_text(text, encoding="utf-8"))


def write_atomically(path: Path, write: Callable[[Path], object]) -> Path:
    """Has a file written so that nobody ever sees a part of it: aside, synced, renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        aside.touch()
        mode = aside.stat().st_mode  # as the umask wants it; safetensors writes files that only their owner can read
        write(aside)
        aside.chmod(mode)
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path
