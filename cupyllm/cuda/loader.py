"""From a kernel's name and constants to something that can be launched.

`KernelLoader.kernel("gemv", ELEMENT_BF16=1, ...)` puts common.cuh and gemv.cu together into one text, hands it to a
back end's compiler with the constants as -D options, and keeps the result: one object per kernel and constants,
compiled when it is first asked for. Two back ends exist: CuPy on a GPU, and the emulator on any CPU. What a kernel
computes, and with which grid, is the business of the launch module beside it.

One text, because CuPy's cache of compiled kernels does not see included files: an edited header would leave a stale
kernel. `#line` directives keep the compiler's messages pointing at the real files.
"""

from __future__ import annotations

import importlib
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import resources
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from cupyllm.device import Array, Graph
from cupyllm.errors import DeviceError

if TYPE_CHECKING:
    from cupyllm.cuda.emulator import LaunchReport

Mode = Literal["fast", "check"]
HEADER = "common.cuh"
# A launch may use this much dynamic shared memory without asking for more first.
DEFAULT_SHARED_MEMORY = 48 * 1024
# More than the blocks of a row-wise split in any launch.
MAX_TICKETS = 2**16
_FIRST_ERROR = re.compile(r"^(?P<file>\S+?\.cuh?)[(:](?P<line>\d+).*?error(?: #\S+)?:\s*(?P<message>.*)$", re.MULTILINE)


@dataclass(frozen=True)
class DeviceFacts:
    """What launch modules need to know of a device to choose a grid."""

    name: str
    compute_capability: int  # 80 is 8.0
    num_multiprocessors: int
    max_shared_memory: int  # bytes one block may have


@dataclass(frozen=True)
class Geometry:
    """One launch: how many blocks of how many threads, the dynamic shared memory of a block, and the constants."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared_mem: int = 0
    constants: Mapping[str, int] = field(default_factory=dict)


class Kernel(Protocol):
    """A compiled kernel: call it to launch it. Scalars among `args` must be NumPy scalars of the parameter's type."""

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], *, shared_mem: int = 0
    ) -> Any: ...


class Backend(Protocol):
    """What compiles kernels and holds their arrays."""

    facts: DeviceFacts
    null: Any  # what its launches take for a null pointer

    def compile(self, name: str, source: str, options: tuple[str, ...]) -> Kernel:
        """The kernel `name` of a source text. Raises DeviceError when the compiler refuses it."""

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array with undefined contents."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """An array of zeros."""

    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None], int]:
        """What replays the launches of `run`, and by how many bytes the memory of all captures grew for it.

        What `run` allocates comes from that memory, which lives on with the back end.
        """


class KernelLoader:
    """Compiles kernels when they are first needed and keeps them. Threads may share one.

    `source` gives the whole text of a kernel by its name; by default that is `source_of`, of the kernels here.
    """

    def __init__(self, backend: Backend, source: Callable[[str], str] | None = None) -> None:
        self._backend = backend
        self._source = source or source_of
        self._kernels: dict[tuple[str, tuple[tuple[str, int], ...]], Kernel] = {}
        self._lock = threading.Lock()
        self._tickets: Array | None = None
        self._num_launches = 0
        self.facts = backend.facts
        # Passed for an array that a launch leaves out: a null pointer.
        self.nothing = backend.null

    def kernel(self, name: str, **constants: int) -> Kernel:
        """The kernel of cuda/<name>.cu compiled with these constants.

        Raises DeviceError naming file and line when it does not compile.
        """
        key = (name, tuple(sorted(constants.items())))
        with self._lock:
            if key not in self._kernels:
                self._kernels[key] = self._backend.compile(name, self._source(name), define_options(constants))
            return self._kernels[key]

    def launch(self, name: str, geometry: Geometry, args: Sequence[Any]) -> None:
        """Launch the kernel of cuda/<name>.cu; a grid without blocks is nothing to do."""
        if 0 in geometry.grid:
            return
        kernel = self.kernel(name, **geometry.constants)
        self._num_launches += 1
        kernel(geometry.grid, geometry.block, tuple(args), shared_mem=geometry.shared_mem)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array on the loader's device with undefined contents."""
        return self._backend.empty(shape, np.dtype(dtype))

    def tickets(self, count: int) -> Array:
        """Counters (count,) uint32 by which blocks find out which of them comes last; each launch leaves them at zero.

        They are the same for all launches, which therefore must follow each other, as those of one stream do.
        """
        with self._lock:
            if self._tickets is None:
                self._tickets = self._backend.zeros((MAX_TICKETS,), np.dtype(np.uint32))
        assert count <= MAX_TICKETS
        return self._tickets[:count]

    def capture(self, run: Callable[[], None], warm_up: Callable[[], None]) -> Graph:
        """Capture the launches that `run` makes, without running them; no other thread may launch meanwhile.

        The graph goes on reading and writing the same arrays. What `run` allocates is shared by all graphs of the
        loader and holds nothing between replays; what it takes from elsewhere must outlive the graph. `warm_up` is run
        before, uncaptured: it makes the same launches, so that all kernels are compiled.
        """
        warm_up()
        self.tickets(0)  # made outside of the graph, for others use them too
        before = self._num_launches
        replay, num_bytes = self._backend.capture(run)
        return Graph(replay, self._num_launches - before, num_bytes)


def emulated_loader(
    mode: Mode = "fast",
    *,
    arch: int = 80,
    global_races: bool = False,
    on_launch: Callable[[LaunchReport], None] | None = None,
    source: Callable[[str], str] | None = None,
) -> KernelLoader:
    """A loader that runs kernels on the CPU: `mode` "check" watches every access, "fast" runs whole models.

    `arch` picks the forms that common.cuh gives a GPU generation: 70, 75 or 80. `global_races` also watches for races
    between blocks (mode "check", small arrays). `on_launch` gets every launch's report of bytes, sectors and conflicts.
    `source` is that of KernelLoader. Raises DeviceError without g++.
    """
    from cupyllm.cuda.emulated_backend import EmulatedBackend  # which imports this module

    return KernelLoader(EmulatedBackend(mode, arch, global_races, on_launch), source)


def cuda_loader(source: Callable[[str], str] | None = None) -> KernelLoader:
    """A loader for the current GPU; `source` as in KernelLoader. Raises DeviceError when CuPy or a GPU is missing."""
    return KernelLoader(CupyBackend(), source)


def source_of(name: str) -> str:
    """The whole text of a kernel here: common.cuh, then its own file, each announced to the compiler by name."""
    return with_header(f"cupyllm/cuda/{name}.cu", (resources.files("cupyllm.cuda") / f"{name}.cu").read_text("utf-8"))


def with_header(file: str, text: str) -> str:
    """A kernel's text with common.cuh in front of it; messages will call it `file`."""
    header = (resources.files("cupyllm.cuda") / HEADER).read_text("utf-8")
    return f'#line 1 "cupyllm/cuda/{HEADER}"\n{header}\n#line 1 "{file}"\n{text}'


def define_options(constants: Mapping[str, int]) -> tuple[str, ...]:
    """The compiler options that give a kernel its constants."""
    return tuple(f"-D{name}={value}" for name, value in sorted(constants.items()))


def compile_error(name: str, log: str) -> DeviceError:
    """The error for a compiler's log: the first message with its file and line."""
    found = _FIRST_ERROR.search(log)
    where = f"{found['file']}:{found['line']}: {found['message']}" if found else log.strip()[:300]
    return DeviceError(f"kernel {name} does not compile: {where}")


class CupyBackend:
    """Kernels on the current GPU, through CuPy."""

    null = np.uintp(0)

    def __init__(self) -> None:
        try:
            cupy: Any = importlib.import_module("cupy")
        except ImportError as error:
            raise DeviceError(f"CuPy cannot be imported ({error}); install cupyllm[cuda12]") from error
        if not cupy.cuda.is_available():
            raise DeviceError('CuPy finds no usable GPU; use device "cpu" or install the NVIDIA driver')
        self._cupy = cupy
        self.facts = _facts_of_gpu(cupy)

    def compile(self, name: str, source: str, options: tuple[str, ...]) -> Kernel:
        try:
            function = self._cupy.RawModule(code=source, options=options).get_function(name)
            # Compilation happens here; room above 48 KB has to be asked for once per kernel.
            static = int(function.shared_size_bytes)
        except self._cupy.cuda.compiler.CompileException as error:
            raise compile_error(name, str(error)) from error
        if self.facts.max_shared_memory - static > DEFAULT_SHARED_MEMORY:
            function.max_dynamic_shared_size_bytes = self.facts.max_shared_memory - static
        kernel: Kernel = function
        return kernel

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._cupy.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        return self._cupy.zeros(shape, dtype)

    @cached_property
    def _capture_stream(self) -> Any:
        """CuPy captures on any stream but the default one; the graph is then launched on whichever is current."""
        return self._cupy.cuda.Stream(non_blocking=True)

    @cached_property
    def _arena(self) -> Any:
        """Memory of captures: what one lets go may be used again by the same graph or another, and by nobody else."""
        return self._cupy.cuda.MemoryPool()

    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None], int]:
        before = self._arena.total_bytes()
        with self._capture_stream, self._cupy.cuda.using_allocator(self._arena.malloc):
            self._capture_stream.begin_capture()
            try:
                run()
            finally:
                graph = self._capture_stream.end_capture()
        return graph.launch, self._arena.total_bytes() - before


def _facts_of_gpu(cupy: Any) -> DeviceFacts:
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    return DeviceFacts(
        name=properties["name"].decode(),
        compute_capability=int(device.compute_capability),
        num_multiprocessors=properties["multiProcessorCount"],
        max_shared_memory=device.attributes["MaxSharedMemoryPerBlockOptin"],
    )
