"""The safetensors format: tensors by name, read one at a time, on a local disk or at any fsspec URL.

A file is eight bytes with the length of a header, the header in JSON (type, shape and byte range of each
tensor, text under `__metadata__`), and the tensors' bytes, little-endian. Local files are mapped into memory, so only
what is looked at is read; of remote files the byte ranges that are asked for are fetched, and nothing is kept.

Source of the format: the safetensors project's README.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from decoupled_diloco.arrays.tensor_plan import TensorInfo

INDEX_FILE: Final = "model.safetensors.index.json"
HEADER_BYTES_MAX: Final = 100_000_000
"""What the format's own library accepts."""

_TYPES: Final[dict[str, np.dtype[Any]]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U64": np.dtype("<u8"),
    "U32": np.dtype("<u4"),
    "U16": np.dtype("<u2"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("bool"),
}
_CODES: Final = {dtype: code for code, dtype in _TYPES.items()}

ReadBytes = Callable[[int, int], "bytes | memoryview"]
"""Bytes of a file from a start to a stop, both counted from its beginning."""


class SafetensorsError(Exception):
    """A file is absent, cannot be read, or is no safetensors file; the message names it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor lies.

    Attributes:
        dtype: NumPy's type, or None for one that NumPy does not have.
        dtype_code: as in the header, such as "BF16".
        shape: extents.
        start: first byte, from the beginning of the file.
        stop: one past the last byte.
    """

    dtype: np.dtype[Any] | None
    dtype_code: str
    shape: tuple[int, ...]
    start: int
    stop: int


class SafetensorsFile:
    """One file.

    Args:
        location: path or URL.

    Attributes:
        location: as given.
        tensors: what is in it, by name.
        metadata: the text stored in the header.

    Raises:
        SafetensorsError: it cannot be read.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._read, size = _opened(location)
        self.metadata: dict[str, str] = {}
        self.tensors: dict[str, StoredTensor] = {}
        try:
            self._read_header(size)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SafetensorsError(f"{location} is not a safetensors file, or only a part of one: {error}") from error

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> npt.NDArray[Any]:
        """A tensor, or the part of it that the index selects, as NumPy does; not to be written to.

        Of a remote file only the rows that the first entry of the index selects are fetched.

        Raises:
            SafetensorsError: the file cannot be read any more, or NumPy has no such type.
        """
        stored = self.tensors[name]
        if stored.dtype is None:
            raise SafetensorsError(f"{self.location}: tensor {name!r} is of type {stored.dtype_code}")
        start, stop, shape = stored.start, stored.stop, stored.shape
        if index and index[0] != slice(None):
            row_bytes = (stop - start) // shape[0] if shape[0] else 0
            first, last = (index[0], index[0] + 1) if isinstance(index[0], int) else index[0].indices(shape[0])[:2]
            start, stop = start + first * row_bytes, start + last * row_bytes
            shape = (last - first, *shape[1:])
            index = (0 if isinstance(index[0], int) else slice(None), *index[1:])
        data = self._read(start, stop)
        if len(data) != stop - start:
            raise SafetensorsError(f"{self.location} ends before tensor {name!r} does")
        array: npt.NDArray[Any] = np.frombuffer(data, stored.dtype).reshape(shape)[index]
        return array

    def _read_header(self, size: int) -> None:
        length = int.from_bytes(self._read(0, 8), "little")
        if size < 8 or length > min(HEADER_BYTES_MAX, size - 8):
            raise ValueError(f"it has {size} bytes, and its header would take {length}")
        header = json.loads(bytes(self._read(8, 8 + length)))
        self.metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
        for name, entry in header.items():
            shape, code = tuple(map(int, entry["shape"])), str(entry["dtype"])
            start, stop = (8 + length + int(offset) for offset in entry["data_offsets"])
            dtype = _TYPES.get(code)
            if not 8 + length <= start <= stop <= size or any(extent < 0 for extent in shape):
                raise ValueError(f"tensor {name!r} would end at byte {stop}, and the file has {size}")
            if dtype is not None and stop - start != math.prod(shape) * dtype.itemsize:
                raise ValueError(f"tensor {name!r} of type {code} and shape {shape} cannot take {stop - start} bytes")
            self.tensors[name] = StoredTensor(dtype, code, shape, start, stop)


class SafetensorsFolder:
    """All tensors of a model: one file, or a folder with several and an index that says which tensor is where.

    Args:
        location: path or URL of a file, or of a folder with `model.safetensors.index.json` or one safetensors file.

    Attributes:
        location: as given.
        tensors: what is in it, by name.
        metadata: the text stored in the header, if it is one file.

    Raises:
        SafetensorsError: it cannot be read, or the index and the files do not agree.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._files: dict[str, SafetensorsFile] = {}
        self.metadata: dict[str, str] = {}
        if location.endswith(".safetensors"):
            self._take(SafetensorsFile(location))
        else:
            self._open_folder(location.rstrip("/"))
        self.tensors: dict[str, TensorInfo] = {
            name: TensorInfo(stored.shape, stored.dtype_code if stored.dtype is None else stored.dtype.name)
            for name, file in self._files.items()
            for stored in [file.tensors[name]]
        }

    def read(self, name: str, index: tuple[int | slice, ...] = ()) -> npt.NDArray[Any]:
        """As `SafetensorsFile.read`."""
        return self._files[name].read(name, index)

    def _take(self, file: SafetensorsFile) -> None:
        self._files, self.metadata = dict.fromkeys(file.tensors, file), file.metadata

    def _open_folder(self, folder: str) -> None:
        try:
            read, size = _opened(f"{folder}/{INDEX_FILE}")
        except SafetensorsError as error:
            try:
                self._take(SafetensorsFile(f"{folder}/model.safetensors"))
            except SafetensorsError:
                raise SafetensorsError(
                    f"{folder} is no safetensors file, and has neither {INDEX_FILE} nor model.safetensors ({error})"
                ) from error
            return
        try:
            weight_map = json.loads(bytes(read(0, size)))["weight_map"]
            shards = {str(shard) for shard in weight_map.values()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise SafetensorsError(f"{folder}/{INDEX_FILE} is no index of a model: {error!r}") from error
        files = {shard: SafetensorsFile(f"{folder}/{shard}") for shard in sorted(shards)}
        if absent := sorted(name for name, shard in weight_map.items() if name not in files[shard].tensors):
            raise SafetensorsError(
                f"{folder}: {absent[0]!r} (and {len(absent) - 1} more tensors) is not in the file that "
                f"{INDEX_FILE} says"
            )
        self._files = {name: files[shard] for name, shard in weight_map.items()}


def write_safetensors(
    path: Path,
    tensors: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
    contents: Iterable[tuple[str, npt.NDArray[Any]]],
    metadata: Mapping[str, str],
) -> None:
    """Writes a file, one tensor at a time and in any order; it gets its name when it is complete and on disk.

    Args:
        path: where to; its folder is made.
        tensors: type and shape of each tensor by name.
        contents: each of them once.
        metadata: text for the header.

    Raises:
        OSError: the file cannot be written.
        ValueError: a tensor is missing, comes twice, or has another shape than was said.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    places: dict[str, int] = {}
    offset = 0
    # As the format's own library does it: the widest types first, so that every tensor is aligned.
    for name in sorted(tensors, key=lambda name: (-tensors[name][0].itemsize, name)):
        dtype, shape = tensors[name]
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        places[name], offset = offset, end
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    with _in_place_of(path) as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name, array in contents:
            dtype, shape = tensors[name]
            if array.shape != shape or name not in places:
                raise ValueError(f"tensor {name!r} of shape {array.shape} comes twice, or should have shape {shape}")
            file.seek(8 + len(header) + places.pop(name))
            file.write(np.ascontiguousarray(array, dtype).reshape(-1).view(np.uint8).data)
        if places:
            raise ValueError(f"tensor {next(iter(places))!r} is missing")


@contextmanager
def _in_place_of(path: Path) -> Iterator[BinaryIO]:
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _opened(location: str) -> tuple[ReadBytes, int]:
    """How to read a file's bytes, and how many it has."""
    if "://" in location:
        return _opened_url(location)
    try:
        with Path(location).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                return (lambda start, stop: b""), 0
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise SafetensorsError(f"{location} cannot be read: {error.strerror or error}") from error
    return (lambda start, stop: mapped[start:stop]), size


def _opened_url(location: str) -> tuple[ReadBytes, int]:
    try:
        import fsspec
    except ModuleNotFoundError as error:
        raise SafetensorsError(f"{location} cannot be read: reading URLs needs the package fsspec") from error
    try:
        system, path = fsspec.core.url_to_fs(location)
        size = int(system.size(path))
    except Exception as error:  # every kind of store raises its own
        raise SafetensorsError(f"{location} cannot be read: {_described(error)}") from error

    def read(start: int, stop: int) -> bytes:
        try:
            return bytes(system.cat_file(path, start=start, end=stop)) if stop > start else b""
        except Exception as error:
            raise SafetensorsError(f"{location} cannot be read: {_described(error)}") from error

    return read, size


def _described(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
