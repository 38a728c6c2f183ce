"""Modules and kernels with the calling convention of cupy.RawModule and cupy.RawKernel, run on the CPU.

Fast mode runs whole models and notices only what the hardware notices: touching an unmapped page, dividing by zero,
impossible barriers and shuffles. Check mode looks at every load and store.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from . import layout
from .arguments import ArgumentBlock, read_parameters
from .compiler import Mode, build, copy_for_thread, source_frames
from .errors import KernelBuildError, KernelFault, LaunchError
from .parts import GlobalRaceCells, LaunchParts
from .report import LaunchReport
from .source import find_kernels, host_source
from .workers import MAX_DYNAMIC_SHARED, MAX_STATIC_SHARED, MAX_THREADS, workers

_DEFAULT_SHARED = 48 * 1024  # bytes a block may use unless the kernel asks for more
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)


class EmulatedModule:
    """A compiled kernel source, as cupy.RawModule. Compiles at once, or takes the library from the cache.

    `options` are NVRTC options: -D, -U and -I count, those that only choose GPU code are accepted, others are refused.
    `name` names the source in messages where it has no #line. `global_races` (check mode only) watches for races in
    global memory too; it needs up to 32 bytes per byte of the arguments and runs on one OS thread, so it is for small
    tests.

    Raises `KernelBuildError` if the source does not compile, `DeviceError` if there is no compiler or cache folder.
    """

    def __init__(
        self,
        source: str,
        *,
        options: tuple[str, ...] = (),
        mode: Mode = "fast",
        name: str,
        global_races: bool = False,
    ) -> None:
        if mode not in ("fast", "check"):
            raise KernelBuildError(f"{name}: mode {mode!r} does not exist; modes are 'fast' and 'check'")
        if global_races and mode != "check":
            raise KernelBuildError(f"{name}: global_races needs mode 'check'")
        self.name = name
        self.mode = mode
        self.global_races = global_races
        self._kernels = {kernel.name: kernel for kernel in find_kernels(source)}
        if not self._kernels:
            raise KernelBuildError(f'{name}: the source has no extern "C" __global__ kernel')
        text = host_source(source, tuple(self._kernels.values()), name)
        self.library_path = build(text, options, mode, name)
        self._libraries = [ctypes.CDLL(str(self.library_path))]
        layout.check_layout(self._libraries[0])
        self._libraries[0].emu_static_shared.restype = ctypes.c_uint64
        self.static_shared = int(self._libraries[0].emu_static_shared())
        if self.static_shared > MAX_STATIC_SHARED:
            message = f"its __shared__ variables need {self.static_shared} bytes of {MAX_STATIC_SHARED}"
            raise KernelBuildError(f"{name}: {message}; use dynamic shared memory")

    def library(self, worker: int) -> ctypes.CDLL:
        """The copy of the library that belongs to an OS thread; to be called with the workers' lock held."""
        while len(self._libraries) <= worker:
            path = copy_for_thread(self.library_path, len(self._libraries))
            self._libraries.append(ctypes.CDLL(str(path)))
        return self._libraries[worker]

    def get_function(self, name: str) -> EmulatedKernel:
        """The kernel of this name. Raises `KernelBuildError` if the source has none."""
        if name not in self._kernels:
            raise KernelBuildError(f"{self.name}: no kernel named {name!r}; there are {', '.join(self._kernels)}")
        return EmulatedKernel(self, name, self._kernels[name].parameters)


class EmulatedKernel:
    """One kernel, called like a cupy.RawKernel: kernel(grid, block, args, shared_mem=bytes).

    `max_dynamic_shared_size_bytes` may be raised above 48 KiB, as for CuPy.
    """

    def __init__(self, module: EmulatedModule, name: str, parameter_names: tuple[str, ...]) -> None:
        self.name = name
        self.max_dynamic_shared_size_bytes = _DEFAULT_SHARED - module.static_shared
        self._module = module
        library = module.library(0)
        self._max_threads = int(getattr(library, f"emu_bounds__{name}")())
        self._parameters = read_parameters(library, name, parameter_names)
        self._arguments = ArgumentBlock(name, self._parameters)
        self._parts = LaunchParts(name, module.library, self._arguments)

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> LaunchReport:
        """Runs the kernel to its end.

        `args` are NumPy arrays (C-contiguous), NumPy scalars of the parameter's size, or None for a null pointer.
        Raises `LaunchError` if the launch is refused, `KernelFault` if the kernel does something wrong.
        """
        if not (1 <= len(grid) <= 3 and 1 <= len(block) <= 3):
            raise LaunchError(f"{self.name}: grid {tuple(grid)} and block {tuple(block)} need one to three sizes")
        grid, block = (*grid, 1, 1)[:3], (*block, 1, 1)[:3]
        self._check_geometry(grid, block, shared_mem)
        blocks = grid[0] * grid[1] * grid[2]
        crew = workers()
        with crew.lock:
            self._arguments.fill(args)
            if self._module.global_races:
                cells = GlobalRaceCells(self._arguments, blocks)
                fault = self._parts.run(crew.memory[:1], grid, block, shared_mem, released=cells.released_address)
            else:
                fault = self._parts.run(crew.memory[:blocks], grid, block, shared_mem)
            if fault is not None:
                raise self._describe(fault)
            return self._parts.report(counted=self._module.mode == "check")

    def _check_geometry(self, grid: Sequence[int], block: Sequence[int], shared_mem: int) -> None:
        if not all(1 <= size <= limit for size, limit in zip(grid, _MAX_GRID, strict=True)):
            raise LaunchError(f"{self.name}: grid {tuple(grid)} is outside of 1..{_MAX_GRID}")
        threads = block[0] * block[1] * block[2]
        if threads > MAX_THREADS or not all(1 <= size <= limit for size, limit in zip(block, _MAX_BLOCK, strict=True)):
            raise LaunchError(
                f"{self.name}: block {tuple(block)} is outside of 1..{_MAX_BLOCK} or {MAX_THREADS} threads"
            )
        if threads > self._max_threads:
            raise LaunchError(f"{self.name}: {threads} threads, but __launch_bounds__ promises {self._max_threads}")
        limit = min(self.max_dynamic_shared_size_bytes, MAX_DYNAMIC_SHARED - self._module.static_shared)
        if not 0 <= shared_mem <= limit:
            hint = "set max_dynamic_shared_size_bytes" if shared_mem <= MAX_DYNAMIC_SHARED else "no GPU has that much"
            raise LaunchError(f"{self.name}: {shared_mem} bytes of dynamic shared memory, limit {limit}; {hint}")

    def _describe(self, fault: layout.Fault) -> KernelFault:
        library = self._module.library_path
        frames = source_frames(library, fault.code_offset) or source_frames(library, fault.caller_code_offset)
        argument = None if fault.argument < 0 else int(fault.argument)
        return KernelFault(
            fault.kind.decode(),
            fault.text.decode(errors="replace"),
            kernel=self.name,
            block=(fault.block[0], fault.block[1], fault.block[2]),
            thread=(fault.thread[0], fault.thread[1], fault.thread[2]),
            argument=argument,
            argument_name=None if argument is None else self._parameters[argument].name,
            frames=frames,
            other_frames=source_frames(library, fault.other_code_offset),
        )
