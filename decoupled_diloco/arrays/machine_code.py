"""What the loops of `kernels` are made with: how they are compiled, addresses, and stores past the caches.

Compiled loops are kept between starts. Numba itself would compile a kernel anew only when the file that it stands in
has changed, so an edit of another file of the loops, or a release with one, would leave old machine code in use. The
folder is therefore named after the text of all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Final, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_carray: Final[Any] = numba.carray  # type: ignore[attr-defined]  # not in its list of exports

_settings: Final[Any] = numba.config
_LINE: Final = 64
"""Bytes that a processor moves between caches and memory at a time."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def text_digest() -> str:
    """Sixteen hexadecimal digits that are others when any file of the loops is another."""
    digest = hashlib.sha256()
    for name in ("encoding", "encoding_kernels", "kernels", "machine_code"):
        spec = find_spec(f"{__package__}.{name}")
        loader: Any = spec.loader if spec is not None else None
        digest.update((loader.get_source(f"{__package__}.{name}") or "").encode())
    return digest.hexdigest()[:16]


_CACHE_FOLDER: Final = f"{_settings.CACHE_DIR or __file__.rpartition('/')[0] + '/__pycache__'}/loops-{text_digest()}"
"""Below NUMBA_CACHE_DIR, else beside this file. Where that cannot be written, numba takes a folder of the user's."""


def kernel(signature: str) -> Callable[[_Function], _Function]:
    """Compiles a function for exactly these types, or takes it from the cache, where there can be one."""

    def compiled(function: _Function) -> _Function:
        before, _settings.CACHE_DIR = _settings.CACHE_DIR, _CACHE_FOLDER
        try:
            return cast(_Function, numba.njit(signature, nogil=True, cache=True)(function))
        except RuntimeError:  # no folder for a cache can be written: "no locator available"
            return cast(_Function, numba.njit(signature, nogil=True)(function))
        finally:
            _settings.CACHE_DIR = before

    return compiled


def part(function: _Function) -> _Function:
    """A piece of a kernel; compiled with those that call it."""
    return cast(_Function, numba.njit(nogil=True)(function))


def _machine_code(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a kernel whose instructions are given one by one; it is called without the first argument."""
    return cast(Callable[..., Any], intrinsic(function))


@_machine_code
def pointer(context: Any, address: Any, element: Any) -> Any:
    """An address as a pointer to elements of a type."""

    def code(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.inttoptr(values[0], target.get_value_type(signature.return_type))

    make: Any = types.CPointer
    return make(element.dtype)(address, element), code


@part
def floats(address: int, count: int) -> npt.NDArray[np.float32]:
    """The float32 values at an address."""
    return _carray(pointer(address, np.float32), count)  # type: ignore[no-any-return]


@part
def halves(address: int, count: int) -> npt.NDArray[np.uint16]:
    """The uint16 values at an address."""
    return _carray(pointer(address, np.uint16), count)  # type: ignore[no-any-return]


@part
def words(address: int, count: int) -> npt.NDArray[np.uint32]:
    """The uint32 values at an address."""
    return _carray(pointer(address, np.uint32), count)  # type: ignore[no-any-return]


@part
def integers(address: int, count: int) -> npt.NDArray[np.int32]:
    """The int32 values at an address."""
    return _carray(pointer(address, np.int32), count)  # type: ignore[no-any-return]


@part
def signed_bytes(address: int, count: int) -> npt.NDArray[np.int8]:
    """The int8 values at an address."""
    return _carray(pointer(address, np.int8), count)  # type: ignore[no-any-return]


@part
def octets(address: int, count: int) -> npt.NDArray[np.uint8]:
    """The uint8 values at an address."""
    return _carray(pointer(address, np.uint8), count)  # type: ignore[no-any-return]


@_machine_code
def _put_line(context: Any, destination: Any, source: Any) -> Any:
    """Copies 64 bytes to a destination aligned to as many, past the caches."""

    def code(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        line = ir.VectorType(ir.FloatType(), _LINE // 4)
        to, origin = (builder.inttoptr(value, line.as_pointer()) for value in values)
        store = builder.store(builder.load(origin, align=4), to, align=_LINE)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), code


@_machine_code
def _fetch_line(context: Any, address: Any) -> Any:
    """Asks for the line at an address, which need not exist, to be brought to the caches."""

    def code(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        line, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        fetch = builder.module.declare_intrinsic(
            "llvm.prefetch", (line,), ir.FunctionType(ir.VoidType(), [line, number, number, number])
        )
        arguments = [ir.Constant(number, value) for value in (0, 2, 1)]  # to be read, into the second level, data
        builder.call(fetch, [builder.inttoptr(values[0], line), *arguments])
        return target.get_dummy_value()

    return types.void(types.int64), code


@part
def fetch(address: int, byte_count: int) -> None:
    """Brings memory that will soon be read to the caches."""
    for offset in range(0, byte_count, _LINE):
        _fetch_line(address + offset)


@_machine_code
def fence(context: Any) -> Any:
    """Orders what was written past the caches before whatever tells another thread of it."""

    def code(target: Any, builder: Any, signature: Any, values: Any) -> Any:
        builder.fence("seq_cst")
        return target.get_dummy_value()

    return types.void(), code


@part
def put(destination: int, source: int, byte_count: int) -> None:
    """Copies from a scratch vector; the part that fills no whole aligned lines in the ordinary way."""
    begin = min(-destination % _LINE, byte_count)
    to, origin = octets(destination, byte_count), octets(source, byte_count)
    for i in range(begin):
        to[i] = origin[i]
    end = begin + (byte_count - begin) // _LINE * _LINE
    for offset in range(begin, end, _LINE):
        _put_line(destination + offset, source + offset)
    for i in range(end, byte_count):
        to[i] = origin[i]
