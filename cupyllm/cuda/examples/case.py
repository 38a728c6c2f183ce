"""What every example is made of: random arrays, a place to put them, and the comparison with the twin's answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from cupyllm.cuda.emulator import guarded_copy
from cupyllm.cuda.loader import KernelLoader
from cupyllm.device import Array
from cupyllm.number_formats import bfloat16_to_float32, float32_to_bfloat16

# The distance from 1 to the next number of the type.
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


@dataclass(frozen=True)
class Output:
    """An array that a kernel wrote and what its twin computes, both as float32 or as whole numbers.

    `tolerance` is relative to the largest magnitude of a row (the last axis): a sum of many products cancels, so its
    error is measured against the size of the row's values. 0 means equal.
    """

    name: str
    actual: np.ndarray
    expected: np.ndarray
    tolerance: float

    @property
    def error(self) -> float:
        """The largest difference, relative to its row; NaN when one side alone is NaN somewhere."""
        row_size = np.nan_to_num(np.abs(self.expected), posinf=0.0).max(axis=-1, keepdims=True)
        with np.errstate(invalid="ignore", over="ignore"):
            difference = np.abs(self.actual - self.expected) / np.where(row_size > 0, row_size, 1)
        same = (self.actual == self.expected) | (np.isnan(self.actual) & np.isnan(self.expected))
        return float(np.where(same, 0.0, difference).max())

    @property
    def agrees(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class ExampleRun:
    """One example, run: its twin in ReferenceOps, its sizes, the fewest bytes each array can cost, and its outputs."""

    twin: str
    sizes: Mapping[str, int]
    least_bytes: Mapping[str, int]
    outputs: tuple[Output, ...]

    @property
    def agrees(self) -> bool:
        return all(output.agrees for output in self.outputs)


class Place(Protocol):
    """Where an example's arrays live: what it asks of a device (cupyllm/device.py)."""

    def upload(self, host: np.ndarray) -> Array:
        """The same values there."""

    def download(self, array: Array) -> np.ndarray:
        """The same values as a NumPy array."""


# An example makes its arrays at a place, launches through a loader for it, and asks the reference op.
Example = Callable[[KernelLoader, Place], ExampleRun]


class GuardedHost:
    """Host arrays between unmapped pages, for the emulator: no small step past an array's end lands in another one."""

    def upload(self, host: np.ndarray) -> Array:
        return guarded_copy(host)

    def download(self, array: Array) -> np.ndarray:
        return np.asarray(array)


def random_floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal float32 numbers."""
    return (rng.standard_normal(shape) * scale).astype(np.float32)


def to_elements(values: np.ndarray, dtype: str) -> np.ndarray:
    """Floats as "float16", or as "bfloat16" bits in uint16."""
    if dtype == "bfloat16":
        return float32_to_bfloat16(values.astype(np.float32))
    return values.astype(np.float16)


def to_floats(elements: np.ndarray) -> np.ndarray:
    """Elements as the float32 that they stand for: what the reference op gets."""
    return bfloat16_to_float32(elements) if elements.dtype == np.uint16 else elements.astype(np.float32)
