"""The operations of kernels beyond plain arithmetic: here as Python, in `ops.pxd` as C.

A file of kernels is plain Python. A `.pxd` of the same name gives C types to its names, and Cython
compiles both into an extension module. Integers of 64 bits wrap in C; in Python they wrap by the
functions below. `plain` serves the modules that were not compiled.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeAlias

LOW_32: Final = 0xFFFF_FFFF
INT64_MAX: Final = 2**63 - 1
INT64_MIN: Final = -(2**63)
SIP_0: Final = 0x736F6D6570736575
SIP_1: Final = 0x646F72616E646F6D
SIP_2: Final = 0x6C7967656E657261
SIP_3: Final = 0x7465646279746573
_WORD: Final = 2**64 - 1

_SLOWER: Final = 60
"""Approximate slowdown of record decoding in Python: `bench.codec` on the build `python`."""


class Vector(Protocol):
    """A one-dimensional array of integers, as a kernel sees it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of items."""

    def __getitem__(self, index: int, /) -> int: ...
    def __setitem__(self, index: int, value: int, /) -> None: ...


class Matrix(Protocol):
    """A two-dimensional array, as a kernel sees it."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the numbers of rows and columns."""

    def __getitem__(self, index: tuple[int, int], /) -> int: ...
    def __setitem__(self, index: tuple[int, int], value: int, /) -> None: ...


Bytes: TypeAlias = Vector
"""uint8"""
Int32s: TypeAlias = Vector
"""int32"""
Int64s: TypeAlias = Vector
"""int64"""
Words: TypeAlias = Vector
"""uint64"""
Flags: TypeAlias = Vector
"""bool"""
Table: TypeAlias = Matrix
"""int64, a row for each field"""
Rows: TypeAlias = Matrix
"""uint64, a row for each key"""
Word: TypeAlias = int
"""An unsigned integer of 64 bits."""


def copy_bytes(target: Any, to: int, source: Any, start: int, size: int) -> None:
    """Copy `size` bytes; the caller has checked both ranges."""
    target[to : to + size] = source[start : start + size]


def wrap(value: int) -> int:
    """Wrap a sum to 64 bits, like Java and C."""
    return ((value - INT64_MIN) & _WORD) + INT64_MIN


def signed(value: int) -> int:
    """Return the word as a signed integer."""
    return wrap(value)


def word(value: int) -> int:
    """Return the signed integer as a word."""
    return value & _WORD


def add(a: int, b: int) -> int:
    """Return the sum of two words."""
    return (a + b) & _WORD


def turn(word: int, bits: int) -> int:
    """Return the word with its bits rotated to the left."""
    return ((word << bits) | (word >> (64 - bits))) & _WORD


def zigzag(value: int) -> int:
    """Return the integer as a word whose lowest bit is its sign."""
    return (value << 1) ^ (value >> 63)


def little_32(data: Any, position: int) -> int:
    """Return four bytes as a little-endian integer; the caller has checked the range."""
    return int.from_bytes(data[position : position + 4], "little")


def little_64(data: Any, position: int) -> int:
    """Return eight bytes as a little-endian word; the caller has checked the range."""
    return int.from_bytes(data[position : position + 8], "little")


def big_16(data: Any, position: int) -> int:
    """Return two bytes as a signed big-endian integer; the caller has proven the range."""
    return int.from_bytes(data[position : position + 2], "big", signed=True)


def big_32(data: Any, position: int) -> int:
    """Return four bytes as a signed big-endian integer; the caller has proven the range."""
    return int.from_bytes(data[position : position + 4], "big", signed=True)


def big_64(data: Any, position: int) -> int:
    """Return eight bytes as a signed big-endian integer; the caller has proven the range."""
    return int.from_bytes(data[position : position + 8], "big", signed=True)


def prefetch(slots: Rows, slot: int) -> None:
    """Do nothing: Python has no cache to fill."""


def plain(names: dict[str, Any]) -> None:
    """Let the functions of a file of kernels take arrays, unless it is compiled.

    Each array becomes a view whose items are Python integers. The first uncompiled module warns.
    """
    own = {
        name: found
        for name, found in names.items()
        if isinstance(found, types.FunctionType) and found.__module__ == names["__name__"]
    }
    if not own:
        return
    _warn()
    inner = dict(names)  # inside, the functions call each other unwrapped
    for name, found in own.items():
        inner[name] = types.FunctionType(found.__code__, inner, name, found.__defaults__)
        names[name] = _taking_arrays(found, inner[name])


@functools.cache
def _warn() -> None:
    warnings.warn(
        f"kafkalog: the kernels are not compiled and run as Python, {_SLOWER} times slower. "
        "Install a C compiler and Python's headers (Debian: apt-get install gcc libc6-dev "
        "python3-dev), then install kafkalog again, with pip's --force-reinstall --no-cache-dir.",
        RuntimeWarning,
        stacklevel=4,
    )


def _taking_arrays(named: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    import numpy as np

    def view(value: Any) -> Any:
        if isinstance(value, np.integer):
            return int(value)
        return value if isinstance(value, int) else memoryview(value)

    @functools.wraps(named)
    def call(*given: Any) -> Any:
        return function(*map(view, given))

    return call
