"""A launch as the runtime sees it: one Launch structure per OS thread, which share the block counter and the arrays."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence

import numpy as np

from . import layout
from .arguments import ArgumentBlock
from .report import ArgumentReport, LaunchReport, Traffic
from .workers import WorkerMemory

_GEOMETRY = struct.Struct("=6IQQq")  # grid, block, dynamic_size, next_block, block_count: neighbours in Launch


class LaunchParts:
    """A kernel's Launch structures, made when an OS thread first takes part and filled anew for every launch."""

    def __init__(self, kernel: str, library: Callable[[int], ctypes.CDLL], arguments: ArgumentBlock) -> None:
        self._kernel = kernel
        self._library = library
        self._arguments = arguments
        self._next_block = ctypes.c_int64()
        self._launches: list[layout.Launch] = []
        self._tables: list[ctypes.Array[layout.Argument]] = []
        self._parts = (layout.Part * 0)()
        self._used = 0

    def run(
        self,
        memory: Sequence[WorkerMemory],
        grid: Sequence[int],
        block: Sequence[int],
        shared_mem: int,
        *,
        released: int = 0,
    ) -> layout.Fault | None:
        """Runs the launch on one OS thread per item of `memory`; returns the fault of the earliest faulty block."""
        self._used = len(memory)
        if len(self._launches) < self._used:
            self._add_parts(memory)
        self._next_block.value = 0
        blocks = grid[0] * grid[1] * grid[2]
        geometry = _GEOMETRY.pack(*grid, *block, shared_mem, ctypes.addressof(self._next_block), blocks)
        for launch, table in zip(self._launches[: self._used], self._tables[: self._used], strict=True):
            ctypes.memmove(ctypes.byref(launch, layout.Launch.grid.offset), geometry, _GEOMETRY.size)
            ctypes.memset(ctypes.byref(launch, layout.Launch.released.offset), 0, layout.RESULTS_SIZE)
            ctypes.memmove(table, self._arguments.table_address, self._arguments.table_size)
            if released:
                launch.released = released
        self._library(0).emu_run(self._parts, ctypes.c_int64(self._used))
        faults = [launch.fault for launch in self._launches[: self._used] if launch.fault.kind]
        return min(faults, key=lambda fault: int(fault.block_number)) if faults else None

    def _add_parts(self, memory: Sequence[WorkerMemory]) -> None:
        rows = len(self._arguments.array_parameters)
        for number in range(len(self._launches), len(memory)):
            table = (layout.Argument * max(1, rows))()
            launch = layout.Launch()
            launch.kernel = ctypes.cast(getattr(self._library(number), f"emu_call__{self._kernel}"), ctypes.c_void_p)
            launch.values = ctypes.addressof(self._arguments.pointers)
            launch.worker = ctypes.addressof(memory[number].layout)
            launch.arguments = ctypes.addressof(table)
            launch.argument_count = rows
            self._tables.append(table)
            self._launches.append(launch)
        self._parts = (layout.Part * len(self._launches))()
        for number, (part, launch) in enumerate(zip(self._parts, self._launches, strict=True)):
            part.run = ctypes.cast(self._library(number).emu_launch, ctypes.c_void_p)
            part.launch = ctypes.addressof(launch)

    def report(self, *, counted: bool) -> LaunchReport:
        """The counts of the last launch; `counted`: the library counts memory accesses."""
        launches, tables = self._launches[: self._used], self._tables[: self._used]
        barriers = sum(launch.barriers for launch in launches)
        if not counted:
            return LaunchReport(self._kernel, barriers)
        arguments = []
        for row, parameter in enumerate(self._arguments.array_parameters):
            read = sum((_traffic(table[row].read) for table in tables), start=Traffic(0, 0, 0, 0))
            written = sum((_traffic(table[row].written) for table in tables), start=Traffic(0, 0, 0, 0))
            size = tables[0][row].end - tables[0][row].begin
            arguments.append(ArgumentReport(parameter.name, read, written, size))
        return LaunchReport(
            self._kernel,
            barriers,
            shared_accesses=sum(launch.shared_accesses for launch in launches),
            bank_conflicts=sum(launch.bank_conflicts for launch in launches),
            arguments=tuple(arguments),
        )


def _traffic(counts: layout.Traffic) -> Traffic:
    return Traffic(counts.bytes, counts.warp_accesses, counts.sectors, counts.bytes_used)


class GlobalRaceCells:
    """Memory in which the runtime notes who touched which part of which array, for one launch. Lives as long as it."""

    def __init__(self, arguments: ArgumentBlock, blocks: int) -> None:
        self._released = np.zeros(blocks, np.uint8)
        self.released_address = int(self._released.ctypes.data)
        self._cells = []
        for row in arguments.rows():
            count = (row.end - row.begin) // row.granule + 1
            cells = np.zeros(count * layout.GLOBAL_CELL_SIZE, np.uint8)
            row.cells = cells.ctypes.data
            self._cells.append(cells)
