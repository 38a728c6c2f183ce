"""The memory that an OS thread needs to run blocks: stacks, shared memory, race cells.

All modules share it, like kernels share a GPU, so one launch runs at a time in a process. The OS threads themselves are
started by the runtime for each launch (emu_run in runtime/launch.h).
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading

from .guarded import anonymous, protect
from .layout import SHARED_CELL_SIZE, Worker

MAX_THREADS = 1024
MAX_DYNAMIC_SHARED = 227 * 1024  # bytes a block may use on sm_90, the largest of the supported GPUs
MAX_STATIC_SHARED = 48 * 1024
_STACK = 64 * 1024
_SIGNAL_STACK = 64 * 1024
_GAP = 4 << 20  # around shared memory, so that a wild address beside an array does not land in it


def _address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class WorkerMemory:
    """Memory of one OS thread. Pages are taken from the system only when they are touched."""

    def __init__(self) -> None:
        page = mmap.PAGESIZE
        capacity = -(-MAX_DYNAMIC_SHARED // page) * page
        cells = capacity + 2 * MAX_STATIC_SHARED
        self._stacks = anonymous(MAX_THREADS * (_STACK + page))
        self._shared = anonymous(_GAP + capacity + _GAP)
        self._signal_stack = anonymous(_SIGNAL_STACK)
        self._cells = anonymous(cells * SHARED_CELL_SIZE)
        for i in range(MAX_THREADS):  # below each stack, so that an overflow faults
            protect(self._stacks, i * (_STACK + page), page)
        protect(self._shared, 0, _GAP)
        protect(self._shared, _GAP + capacity, _GAP)
        self.layout = Worker(
            *(_address(self._stacks), _STACK + page, _address(self._shared) + _GAP, capacity),
            *(_address(self._signal_stack), _SIGNAL_STACK, _address(self._cells), cells, 0),
        )


class Workers:
    """The memory of `count` OS threads, and the lock that a launch holds."""

    def __init__(self, count: int) -> None:
        self.lock = threading.Lock()
        self.memory = [WorkerMemory() for _ in range(count)]


@functools.cache
def workers() -> Workers:
    """The process's workers, one per usable CPU (at most 256)."""
    return Workers(min(256, len(os.sched_getaffinity(0))))
