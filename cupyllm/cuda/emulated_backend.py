"""Kernels on the CPU: what the loader asks of the emulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cupyllm.cuda.emulated_graph import GraphRecorder
from cupyllm.cuda.loader import DeviceFacts, Kernel, Mode
from cupyllm.device import Array

if TYPE_CHECKING:
    from cupyllm.cuda.emulator import LaunchReport


class EmulatedBackend:
    """Kernels on the CPU, through cupyllm.cuda.emulator. Arrays are NumPy arrays."""

    null = None

    def __init__(
        self, mode: Mode, arch: int, global_races: bool, on_launch: Callable[[LaunchReport], None] | None
    ) -> None:
        # The multiprocessors and shared memory of an A100, so that grids look like those of a GPU.
        self.facts = DeviceFacts(f"emulated sm_{arch}", arch, num_multiprocessors=108, max_shared_memory=163 * 1024)
        self._mode = mode
        self._global_races = global_races
        self._on_launch = on_launch
        self._graphs = GraphRecorder()

    def compile(self, name: str, source: str, options: tuple[str, ...]) -> Kernel:
        from cupyllm.cuda.emulator import EmulatedModule

        options += (f"-DEMULATED_ARCH={self.facts.compute_capability * 10}",)
        module = EmulatedModule(source, options=options, mode=self._mode, name=name, global_races=self._global_races)
        function = module.get_function(name)
        function.max_dynamic_shared_size_bytes = self.facts.max_shared_memory - module.static_shared
        return _EmulatedKernel(
            name, _Reporting(function, self._on_launch) if self._on_launch else function, self._graphs
        )

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        array = self._empty(shape, dtype)
        return self._graphs.keep(array) if self._graphs.is_capturing else array

    def _empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """In check mode the array ends at an unmapped page and holds NaN, so that what is never written shows."""
        if self._mode == "fast":
            return np.empty(shape, dtype)
        from cupyllm.cuda.emulator import guarded_empty

        array = guarded_empty(shape, dtype)
        array.reshape(-1).view(np.uint8)[:] = 0xFF
        return array

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return np.zeros(shape, dtype)

    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None], int]:
        before = self._graphs.num_bytes
        return self._graphs.capture(run), self._graphs.num_bytes - before


@dataclass(frozen=True)
class _EmulatedKernel:
    """An emulated kernel whose launches can be captured."""

    name: str
    function: Kernel
    graphs: GraphRecorder

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> Any:
        return self.graphs.launch(self.name, self.function, grid, block, args, shared_mem)


@dataclass(frozen=True)
class _Reporting:
    """An emulated kernel whose launches are reported."""

    function: Kernel
    on_launch: Callable[[LaunchReport], None]

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> None:
        self.on_launch(self.function(grid, block, args, shared_mem=shared_mem))
