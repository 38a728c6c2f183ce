"""Arrays that end at unmapped memory, so that a kernel which reads past the end faults even in fast mode.

The start stays aligned to 16 bytes, the widest vector load. If the size is no multiple of 16, up to 15 bytes lie
between the end and the page; check mode reports accesses to those too.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

_ALIGNMENT = 16
_GUARD = 1 << 20  # inaccessible bytes on either side; address space only


def anonymous(length: int) -> mmap.mmap:
    """Memory of this process alone, all zero, taken from the system page by page as it is touched."""
    return mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def protect(memory: mmap.mmap, offset: int, length: int) -> None:
    """Makes whole pages of an anonymous mapping inaccessible."""
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory, offset))
    prot_none = 0
    if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(start), ctypes.c_size_t(length), prot_none):
        raise OSError(ctypes.get_errno(), "mprotect failed")


def guarded_empty(shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """An uninitialised array with unmapped memory before its first page and after its end."""
    dtype = np.dtype(dtype)
    dimensions = (shape,) if isinstance(shape, int) else shape
    size = math.prod(dimensions) * dtype.itemsize
    room = -(-size // _ALIGNMENT) * _ALIGNMENT
    page = mmap.PAGESIZE
    end = _GUARD + max(1, -(-room // page)) * page
    memory = anonymous(end + _GUARD)
    protect(memory, 0, _GUARD)
    protect(memory, end, _GUARD)
    array: NDArray[Any] = np.ndarray(dimensions, dtype, buffer=memory, offset=end - room)
    return array


def guarded_copy(array: NDArray[Any]) -> NDArray[Any]:
    """A C-contiguous copy of `array` in guarded memory."""
    copy = guarded_empty(array.shape, array.dtype)
    copy[...] = array
    return copy
