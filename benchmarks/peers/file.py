"""A safetensors file in shared memory (else on the disk): one writes, the other reads it; then the other way round."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from safetensors.numpy import load_file, save_file

from benchmarks.peers.loopback import Line, Vector, accept, dial, listen
from benchmarks.places import shared_memory


class _End:
    line: Line

    def write(self, values: Vector, path: Path) -> None:
        """Writes a file and tells the other end."""
        save_file({"fragment": values}, path)
        self.line.say(str(path))

    def read(self) -> Vector:
        """Reads the file that the other end has written, and removes it."""
        path = Path(self.line.hear())
        values: Vector = load_file(path)["fragment"]
        path.unlink()
        return values


class Far(_End):
    """Reads, then writes."""

    def __init__(self, count: int) -> None:
        self._listener, self.address = listen()

    def connect(self) -> None:
        """Waits for the line."""
        self.line = Line(accept(self._listener))

    def serve(self) -> None:
        """One file there and back."""
        folder = Path(self.line.hear())
        self.write(self.read(), folder / "back.safetensors")


class Near(_End):
    """Writes, then reads."""

    def __init__(self, address: str, count: int) -> None:
        self.line = Line(dial(address))
        memory = shared_memory()
        is_enough = memory.is_dir() and shutil.disk_usage(memory).free > 3 * 4 * count
        self._folder = tempfile.TemporaryDirectory(prefix="benchmark-", dir=memory if is_enough else None)

    def round_trip(self, payload: Vector) -> Vector:
        """One file there and back."""
        self.line.say(self._folder.name)
        self.write(payload, Path(self._folder.name) / "there.safetensors")
        return self.read()
