"""Timing on a GPU, and the arrays that are timed.

Arrays are random, never zeros: those can be faster than real ones. Two pools of random numbers are made once, and every
array is a piece of a pool: pieces taken one after another lie in different memory, so that launches that rotate over
them find nothing of theirs in the L2 cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupyllm.device import Array
from cupyllm.errors import DeviceError
from cupyllm.gpu_check.gpu import Gpu, Launch

# Launches that rotate touch at least so many times the L2 cache.
CACHES = 4
MOST_COPIES = 128  # as many as the stream's queue holds with room to spare
FEWEST_LAUNCHES = 4
# A prime, so that the rows of a matrix filled with repetitions still differ.
_BLOCK = 1_048_573
_ALIGNMENT = 256  # numbers: pieces start at multiples of 512 bytes or more


@dataclass(frozen=True)
class Timing:
    """Seconds of one launch, in several runs, and those of a peer in runs between them."""

    runs: list[float]
    peer_runs: list[float]
    host_bound: bool  # the host could not launch fast enough: its time is in some runs

    def rates(self, work: float) -> list[float]:
        """Work a second of each run."""
        return [work / seconds for seconds in self.runs]


class Pool:
    """Random numbers on the GPU, of which `take` gives one piece after another, from the start again at the end."""

    def __init__(self, gpu: Gpu, count: int, dtype: type[np.floating], seed: int = 0) -> None:
        block = np.random.default_rng(seed).standard_normal(min(_BLOCK, count), dtype=np.float32).astype(dtype)
        self._array = gpu.device.upload(np.resize(block, count))
        self._next = 0

    def take(self, *shape: int) -> Array:
        """The next piece, in this shape. Raises DeviceError when the pool is too small for it."""
        count = math.prod(shape)
        if self._next + count > self._array.size:
            self._next = 0
        if count > self._array.size:
            raise DeviceError(f"an array of {count} numbers was asked of a pool of {self._array.size}")
        piece = self._array[self._next : self._next + count]
        self._next += -(-count // _ALIGNMENT) * _ALIGNMENT
        return piece.reshape(shape)

    def halves(self) -> tuple[Array, Array]:
        """The first and the second half of the whole pool."""
        half = self._array.size // 2 // _ALIGNMENT * _ALIGNMENT
        return self._array[:half], self._array[half : 2 * half]


@dataclass(frozen=True)
class Arrays:
    """A GPU with its pools: what the timed launches are made of. Elements are float16."""

    gpu: Gpu
    elements: Pool
    floats: Pool
    rng: np.random.Generator

    @classmethod
    def make(cls, gpu: Gpu, num_elements: int, num_floats: int) -> Arrays:
        return cls(
            gpu, Pool(gpu, num_elements, np.float16), Pool(gpu, num_floats, np.float32), np.random.default_rng(0)
        )


def copies_for(num_bytes: int, cache_bytes: int) -> int:
    """How many sets of arrays of so many bytes push each other out of the cache."""
    return max(1, min(MOST_COPIES, math.ceil(CACHES * cache_bytes / max(1, num_bytes))))


def measure(gpu: Gpu, own: Sequence[Launch], peer: Sequence[Launch] = (), *, repeats: int) -> Timing:
    """Time launches in several runs, those of the peer in turn with them, after a run that is not counted.

    What comes before compiles, loads libraries and lets the memory pool grow.
    """
    sides = [_at_least(side) for side in (own, peer) if side]
    for launches in sides:
        launches[0]()
        gpu.time(launches)
    runs: list[list[float]] = [[], []]
    host_bound = False
    for _ in range(repeats):
        for launches, seconds in zip(sides, runs, strict=False):
            elapsed = gpu.time(launches)
            seconds.append(elapsed.seconds / len(launches))
            host_bound |= elapsed.host_bound
    return Timing(runs[0], runs[1], host_bound)


def _at_least(launches: Sequence[Launch]) -> list[Launch]:
    """The launches, again and again until there are enough of them for a run."""
    return list(launches) * -(-FEWEST_LAUNCHES // len(launches))
