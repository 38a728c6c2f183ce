"""Where arrays live: in the process's own memory (NumPy), or on a GPU.

A device uploads host arrays, downloads results and makes zeroed arrays; everything else works on what it returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

# A NumPy array, or a device's own array type: the ops of a device take what its `upload` returns.
Array = Any

# bfloat16 has no NumPy type: its bits are held as uint16 and read by shifting them into the upper half of a float32.
NUMPY_TYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(np.uint16)}


class Device(Protocol):
    """What the engine asks of a device."""

    name: str

    def upload(self, host: np.ndarray) -> Array:
        """The same values as an array of this device."""

    def download(self, array: Array) -> np.ndarray:
        """The same values as a NumPy array."""

    def zeros(self, shape: tuple[int, ...], dtype: str) -> Array:
        """A zeroed array of "float32", "float16" or "bfloat16"."""


@dataclass(frozen=True)
class HostDevice:
    """The process's own memory: uploads and downloads are free."""

    name: str = "host"

    def upload(self, host: np.ndarray) -> np.ndarray:
        return host

    def download(self, array: np.ndarray) -> np.ndarray:
        return array

    def zeros(self, shape: tuple[int, ...], dtype: str) -> np.ndarray:
        return np.zeros(shape, NUMPY_TYPES[dtype])
