"""Checks a launch's arguments against the kernel's parameters and lays them out in memory.

CuPy passes whatever it is given: a Python int goes as 8 bytes where the kernel reads 4, a float32 array where it reads
halves, three arguments where it has four. Here each of these is a `LaunchError` that names the argument.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from . import layout
from .errors import LaunchError

_ADDRESS = struct.Struct("=Q")
_RANGE = struct.Struct("=QQ")
_ARGUMENT_SIZE = ctypes.sizeof(layout.Argument)
_SCALAR_KINDS = {"i": "biu", "f": "f"}  # NumPy kinds that a parameter kind accepts
_KIND_NAMES = {"i": "an integer", "f": "a float", "s": "a struct"}


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter: 'p' pointer, 'i' integer, 'f' float, 's' struct; `offset` is its place in the values."""

    index: int
    name: str
    kind: str
    size: int
    element_size: int
    exact: bool  # points to a number: an array of smaller elements does not fit
    read_only: bool
    offset: int

    def __str__(self) -> str:
        return f"argument {self.index} ({self.name})"


def read_parameters(library: ctypes.CDLL, kernel: str, names: Sequence[str]) -> tuple[Parameter, ...]:
    """The kernel's parameters: names from the source, everything else from its compiled type."""
    raw = (layout.Parameter * 256)()
    count = getattr(library, f"emu_signature__{kernel}")(raw)
    assert count == len(names), f"{kernel}: {count} parameters, but the source was read as {names}"
    parameters, offset = [], 0
    for index, (name, p) in enumerate(zip(names, raw[:count], strict=True)):
        parameters.append(
            Parameter(index, name, p.kind.decode(), p.size, p.element_size, bool(p.exact), bool(p.read_only), offset)
        )
        offset += -(-p.size // 16) * 16
    return tuple(parameters)


class ArgumentBlock:
    """A kernel's argument values and its table of arrays, refilled for every launch."""

    def __init__(self, kernel: str, parameters: tuple[Parameter, ...]) -> None:
        self._kernel = kernel
        self._parameters = parameters
        self._values = bytearray(sum(-(-p.size // 16) * 16 for p in parameters) or 16)
        base = ctypes.addressof(ctypes.c_char.from_buffer(self._values))
        self.pointers = (ctypes.c_void_p * max(1, len(parameters)))(*(base + p.offset for p in parameters))
        self.array_parameters = [p for p in parameters if p.kind == "p"]  # in the order of the table's rows
        self._table = bytearray(max(1, len(self.array_parameters)) * _ARGUMENT_SIZE)
        self.table_size = len(self._table)
        self.table_address = ctypes.addressof(ctypes.c_char.from_buffer(self._table))
        self._row_offsets = {p.index: row * _ARGUMENT_SIZE for row, p in enumerate(self.array_parameters)}
        for p, row in zip(self.array_parameters, self.rows(), strict=True):
            row.index, row.read_only, row.granule = p.index, p.read_only, min(4, max(1, p.element_size))

    def rows(self) -> ctypes.Array[layout.Argument]:
        """The table of arrays, one row per pointer parameter."""
        return (layout.Argument * len(self.array_parameters)).from_buffer(self._table)

    def fill(self, arguments: Sequence[Any]) -> None:
        """Checks and stores the arguments of a launch. Raises `LaunchError`."""
        if len(arguments) != len(self._parameters):
            names = ", ".join(p.name for p in self._parameters)
            raise LaunchError(
                f"{self._kernel}: {len(arguments)} arguments for {len(self._parameters)} parameters ({names})"
            )
        for p, value in zip(self._parameters, arguments, strict=True):
            if p.kind == "p":
                self._store_array(p, value)
            else:
                self._store_scalar(p, value)

    def _refuse(self, p: Parameter, reason: str) -> LaunchError:
        return LaunchError(f"{self._kernel}: {p}: {reason}")

    def _store_array(self, p: Parameter, value: Any) -> None:
        begin, size = 0, 0
        if isinstance(value, np.ndarray):
            self._check_array(p, value)
            begin, size = value.ctypes.data, value.nbytes
        elif value is not None:  # None is a null pointer, as in CuPy
            raise self._refuse(p, f"is an array in the kernel, but {type(value).__name__} was given")
        _ADDRESS.pack_into(self._values, p.offset, begin)
        _RANGE.pack_into(self._table, self._row_offsets[p.index], begin, begin + size)

    def _check_array(self, p: Parameter, value: NDArray[Any]) -> None:
        if value.itemsize != p.element_size and value.itemsize > 1 and (p.exact or p.element_size % value.itemsize):
            hint = "view raw memory as uint8"
            raise self._refuse(p, f"points to {p.element_size}-byte elements, but the array is {value.dtype}; {hint}")
        if not value.flags.c_contiguous:
            raise self._refuse(p, f"the array of shape {value.shape} and strides {value.strides} is not C-contiguous")
        if not (p.read_only or value.flags.writeable):
            raise self._refuse(p, "is not const in the kernel, but the array is read-only")

    def _store_scalar(self, p: Parameter, value: Any) -> None:
        if not isinstance(value, np.generic):
            hint = "CuPy would pass 8 bytes" if isinstance(value, (int, float)) else f"not {type(value).__name__}"
            raise self._refuse(p, f"pass a NumPy scalar of {p.size} bytes; {hint}")
        if value.itemsize != p.size or value.dtype.kind not in _SCALAR_KINDS.get(p.kind, value.dtype.kind):
            raise self._refuse(p, f"is {_KIND_NAMES[p.kind]} of {p.size} bytes, but {value.dtype} was given")
        self._values[p.offset : p.offset + p.size] = value.tobytes()
