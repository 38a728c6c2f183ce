"""Where arrays live: in the process's own memory (NumPy), or on a GPU.

A device uploads host arrays, downloads results and makes zeroed arrays; everything else works on what it returns.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cupyllm.errors import DeviceError

# A NumPy array, or a device's own array type: the ops of a device take what its `upload` returns.
Array = Any

# bfloat16 has no NumPy type: its bits are held as uint16 and read by shifting them into the upper half of a float32.
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
}


_LINE = 64  # bytes: a cache line, and the widest vector that a processor loads


def host_array(shape: tuple[int, ...], dtype: np.dtype[Any], *, zeroed: bool = False) -> np.ndarray:
    """A NumPy array that begins at a cache line, which np.empty does not see to: a vector that lies in two lines takes
    longer to read.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = (np.zeros if zeroed else np.empty)(num_bytes + _LINE, np.uint8)
    start = -memory.ctypes.data % _LINE
    return memory[start : start + num_bytes].view(dtype).reshape(shape)


# Waits for a copy to the host that was begun, and gives it.
Fetch = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Graph:
    """Launches that were captured once: one call of `replay` queues them all again, over the same arrays."""

    replay: Callable[[], None]
    num_launches: int
    num_bytes: int  # that were allocated for it


# Captures the launches of its first argument; the second makes the same ones beforehand (KernelLoader.capture).
Capture = Callable[[Callable[[], None], Callable[[], None]], Graph]


class Device(Protocol):
    """What the engine asks of a device."""

    @property
    def name(self) -> str:
        """What to call it in messages."""

    @property
    def is_async(self) -> bool:
        """Whether it computes while the host goes on."""

    def upload(self, host: np.ndarray) -> Array:
        """The same values as an array of this device."""

    def download(self, array: Array) -> np.ndarray:
        """The same values as a NumPy array."""

    def fetch(self, array: Array) -> Fetch:
        """Begin to copy the array's present values to the host; what is queued afterwards does not delay them."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A zeroed array of "float32", "float16" or "bfloat16"."""

    def free_bytes(self) -> int:
        """Memory that is free for weights and cache now."""


@dataclass(frozen=True)
class HostDevice:
    """The process's own memory: uploads and downloads are free."""

    name: str = "host"
    is_async: bool = False

    def upload(self, host: np.ndarray) -> np.ndarray:
        return host

    def download(self, array: np.ndarray) -> np.ndarray:
        return array

    def fetch(self, array: np.ndarray) -> Fetch:
        """A copy, because the array may be written to before it is read."""
        copy = array.copy()
        return lambda: copy

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return host_array(shape, NUMPY_TYPES[dtype], zeroed=True)

    def free_bytes(self) -> int:
        """What the system says can be had without swapping."""
        try:
            lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
        except (OSError, StopIteration):  # not Linux: all of the memory is the best there is to know
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class CupyDevice:
    """The current GPU, through CuPy. Raises DeviceError where CuPy cannot be imported."""

    name = "cuda"
    is_async = True

    def __init__(self) -> None:
        try:
            self._cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise DeviceError(f"CuPy cannot be imported ({error}); install cupyllm[cuda12]") from error

    @cached_property
    def _cupyx(self) -> Any:
        return importlib.import_module("cupyx")  # a part of CuPy

    def upload(self, host: np.ndarray) -> Array:
        """A copy on the GPU."""
        return self._cupy.asarray(host)

    def download(self, array: Array) -> np.ndarray:
        """A copy on the host; waits for what is being computed."""
        host: np.ndarray = self._cupy.asnumpy(array)
        return host

    def fetch(self, array: Array) -> Fetch:
        """A copy to pinned memory behind what is queued now, and an event behind the copy."""
        if array.size == 0:
            return lambda: np.empty(array.shape, array.dtype)
        host: np.ndarray = self._cupyx.empty_pinned(array.shape, array.dtype)
        array.get(out=host, blocking=False)
        copied = self._cupy.cuda.Event(disable_timing=True)
        copied.record()

        def wait() -> np.ndarray:
            copied.synchronize()
            return host

        return wait

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        return self._cupy.zeros(shape, NUMPY_TYPES[dtype])

    def free_bytes(self) -> int:
        """What the driver says is free, and what CuPy's pool holds unused."""
        free, _ = self._cupy.cuda.Device().mem_info
        return int(free) + int(self._cupy.get_default_memory_pool().free_bytes())
