"""The GPU as the check needs it beside launching kernels: a stopwatch on the device, copies, cuBLAS, its memory.

How the stopwatch works: the stream is first kept busy by a kernel that only waits. Meanwhile the host queues the first
event, all launches and the second event, so that the GPU then runs the launches one right after another and the time
between the events holds no time of the host. CUDA graphs would do the same, but CuPy refuses cuBLAS in them.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from cupyllm.cuda.loader import KernelLoader, cuda_loader
from cupyllm.device import Array, CupyDevice, Device
from cupyllm.gpu_check.probes import probe_source, read_all

Launch = Callable[[], object]
_FIRST_WAIT_S = 2e-3
_LONGEST_WAIT_S = 0.5


@dataclass(frozen=True)
class Elapsed:
    """Seconds on the GPU; `host_bound` where the host could not queue the launches fast enough and is in them."""

    seconds: float
    host_bound: bool


class Gpu(Protocol):
    """What the check asks of a GPU."""

    loader: KernelLoader
    device: Device
    cache_bytes: int  # of the L2 cache
    has_cublas: bool

    def time(self, launches: Sequence[Launch]) -> Elapsed:
        """What the launches take one after another, all together."""

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        """a @ b of 2-D float16 arrays into `out`, through cuBLAS."""

    def copy(self, source: Array, target: Array) -> None:
        """Copy one array over another of the same size."""

    def read(self, array: Array) -> None:
        """Read an array once."""

    def release(self) -> None:
        """Give memory that no array uses any more back to the driver."""


class CupyGpu:
    """The current GPU, through CuPy. Raises DeviceError when CuPy or a GPU is missing."""

    def __init__(self) -> None:
        self.loader = cuda_loader()
        self.device: Device = CupyDevice()
        self.cupy: Any = importlib.import_module("cupy")
        properties = self.cupy.cuda.runtime.getDeviceProperties(self.cupy.cuda.Device().id)
        self.cache_bytes = int(properties["l2CacheSize"])
        self._probes = cuda_loader(probe_source)
        self.has_cublas = False

    def compile_probe(self) -> object:
        """Compile a kernel. Raises whatever CuPy, its compiler or its headers raise."""
        return self._probes.kernel("wait_nanoseconds")

    def time(self, launches: Sequence[Launch]) -> Elapsed:
        """Tries again with a longer wait while the host is slower than the one before."""
        wait, events = _FIRST_WAIT_S, self.cupy.cuda
        while True:
            start, end = events.Event(), events.Event()
            before = time.perf_counter()
            self._wait(wait)
            start.record()
            for launch in launches:
                launch()
            end.record()
            queued_in_time = not start.done
            host_seconds = time.perf_counter() - before
            end.synchronize()
            if queued_in_time or wait >= _LONGEST_WAIT_S:
                return Elapsed(float(events.get_elapsed_time(start, end)) / 1e3, not queued_in_time)
            wait = min(2 * max(wait, host_seconds), _LONGEST_WAIT_S)

    def matmul(self, a: Array, b: Array, out: Array) -> None:
        self.cupy.matmul(a, b, out=out)

    def copy(self, source: Array, target: Array) -> None:
        target.data.copy_from_device_async(source.data, source.nbytes)

    def read(self, array: Array) -> None:
        read_all(self._probes, array)

    def release(self) -> None:
        self.cupy.get_default_memory_pool().free_all_blocks()
        self.cupy.get_default_pinned_memory_pool().free_all_blocks()

    def give_each_array_its_own_memory(self) -> None:
        """Without CuPy's pool, so that compute-sanitizer sees where an array ends."""
        self.cupy.cuda.set_allocator(None)

    def _wait(self, seconds: float) -> None:
        kernel = self._probes.kernel("wait_nanoseconds")
        kernel((1,), (1,), (np.uint64(seconds * 1e9),))
