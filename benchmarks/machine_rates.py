"""What the machine's memory can give at most, measured: the limit that a decode step is held against."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from cupyllm.device import Device

HOST_BYTES = 512 * 2**20
GPU_BYTES = 4 * 2**30


def read_rate(device: Device) -> Callable[[], float]:
    """A measure of the bytes/s that can be read from the memory of `device`, which takes a moment each time."""
    return _gpu_read_rate() if device.name == "cuda" else _host_read_rate()


def _host_read_rate() -> Callable[[], float]:
    """One thread for each core, each taking pieces of memory that no cache holds; the fastest of a few passes."""
    threads = os.cpu_count() or 1
    numbers = np.ones(HOST_BYTES // 4, np.int32)
    pieces = np.array_split(numbers, 16 * threads)

    def measure() -> float:
        with ThreadPoolExecutor(threads) as pool:
            return max(HOST_BYTES / _seconds(lambda: list(pool.map(np.maximum.reduce, pieces))) for _ in range(4))

    return measure


def _gpu_read_rate() -> Callable[[], float]:
    from cupyllm.gpu_check.gpu import CupyGpu

    gpu = CupyGpu()
    array = gpu.device.upload(np.resize(np.random.default_rng(0).standard_normal(2**20, np.float32), GPU_BYTES // 4))
    return lambda: GPU_BYTES / gpu.time([lambda: gpu.read(array)]).seconds


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start
