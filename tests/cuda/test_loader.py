"""From a kernel's name to a launch: one object per kernel and constants, errors with file and line, checked arrays."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from kernel_case import CheckedLaunches, random_floats

from cupyllm.cuda import embedding, rms_norm, silu_mul
from cupyllm.cuda.loader import Backend, CupyBackend, DeviceFacts, Geometry, KernelLoader, compile_error, source_of
from cupyllm.errors import DeviceError
from cupyllm.ops.reference import Norm


class CountingBackend:
    """Compiles nothing, and notes what it was asked for."""

    facts = DeviceFacts("counting", 80, 1, 48 * 1024)

    def __init__(self) -> None:
        self.compiled: list[tuple[str, tuple[str, ...]]] = []
        self.launched: list[tuple[tuple[int, ...], int]] = []

    def compile(self, name: str, source: str, options: tuple[str, ...]):
        self.compiled.append((name, options))
        return lambda grid, block, args, *, shared_mem=0: self.launched.append((grid, shared_mem))

    null = None

    def empty(self, shape, dtype):
        return np.empty(shape, dtype)

    zeros = staticmethod(np.zeros)

    def capture(self, run):
        raise NotImplementedError


@pytest.fixture
def backend() -> CountingBackend:
    return CountingBackend()


def test_a_kernel_is_compiled_once_for_each_set_of_constants_and_only_when_asked_for(backend: Backend) -> None:
    loader = KernelLoader(backend)
    assert backend.compiled == []
    first = loader.kernel("embedding", ELEMENT_BF16=0, TABLE_FLOAT32=1)
    assert loader.kernel("embedding", TABLE_FLOAT32=1, ELEMENT_BF16=0) is first
    assert loader.kernel("embedding", ELEMENT_BF16=1, TABLE_FLOAT32=0) is not first
    assert backend.compiled == [
        ("embedding", ("-DELEMENT_BF16=0", "-DTABLE_FLOAT32=1")),
        ("embedding", ("-DELEMENT_BF16=1", "-DTABLE_FLOAT32=0")),
    ]


def test_threads_that_ask_at_once_share_one_kernel(backend: Backend) -> None:
    loader, start, kernels = KernelLoader(backend), threading.Barrier(8), []

    def ask() -> None:
        start.wait()
        kernels.append(loader.kernel("silu_mul"))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(backend.compiled) == 1
    assert all(kernel is kernels[0] for kernel in kernels)


def test_a_grid_without_blocks_is_not_launched(backend: Backend) -> None:
    loader = KernelLoader(backend)
    loader.launch("silu_mul", Geometry((0, 3), (256,)), ())
    loader.launch("silu_mul", Geometry((2, 3), (256,), shared_mem=64), ())
    assert backend.launched == [((2, 3), 64)]


def test_the_source_names_the_real_files_and_lines() -> None:
    lines = source_of("rms_norm").splitlines()
    start = lines.index('#line 1 "cupyllm/cuda/rms_norm.cu"') + 1
    file = Path(rms_norm.__file__).with_suffix(".cu").read_text(encoding="utf-8").splitlines()
    assert lines[start:] == file
    assert lines[0] == '#line 1 "cupyllm/cuda/common.cuh"'


def test_a_kernel_that_does_not_compile_names_file_line_and_message() -> None:
    loader = CheckedLaunches().loader
    with pytest.raises(DeviceError, match=r"embedding.*cupyllm/cuda/embedding\.cu:\d+.*TABLE_FLOAT32 is 0 or 1"):
        loader.kernel("embedding", TABLE_FLOAT32=2)


@pytest.mark.parametrize(
    ("log", "message"),
    [
        (
            'cupyllm/cuda/gemv.cu(2): warning #177-D: unused\ncupyllm/cuda/gemv.cu(34): error: "K" is undefined',
            'kernel gemv does not compile: cupyllm/cuda/gemv.cu:34: "K" is undefined',
        ),
        (
            "cupyllm/cuda/common.cuh(7): error #20: static assertion failed with x\n1 error detected",
            "kernel gemv does not compile: cupyllm/cuda/common.cuh:7: static assertion failed with x",
        ),
        ("nvrtc: something else", "kernel gemv does not compile: nvrtc: something else"),
    ],
)
def test_the_first_message_of_a_log_becomes_the_error(log: str, message: str) -> None:
    assert str(compile_error("gemv", log)) == message


def test_without_a_gpu_the_cuda_back_end_says_what_to_install() -> None:
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed; the message without it is tested elsewhere")
    if cupy.cuda.is_available():
        pytest.skip("there is a GPU; without one this would test the message")
    with pytest.raises(DeviceError, match="install the NVIDIA driver"):
        CupyBackend()


def test_without_cupy_the_cuda_back_end_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupy", None)
    with pytest.raises(DeviceError, match=r"install cupyllm\[cuda12\]"):
        CupyBackend()


class FakeCupy:
    """As much of CuPy as a capture needs; `log` has what happened, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.allocators: list[Any] = []
        stream = MagicMock()
        stream.__enter__.side_effect = lambda *_: self.log.append("stream")
        stream.__exit__.side_effect = lambda *_: self.log.append("stream before") and None
        stream.begin_capture.side_effect = lambda: self.log.append("begin")
        stream.end_capture.side_effect = lambda: (
            self.log.append("end") or SimpleNamespace(launch=lambda: self.log.append("launch"))
        )
        self.cuda = MagicMock()
        self.cuda.Stream.side_effect = lambda *, non_blocking: stream if non_blocking else None
        self.cuda.using_allocator.side_effect = self.using
        self.cuda.MemoryPool.return_value.total_bytes.side_effect = [100, 350]
        self.cuda.runtime.getDeviceProperties.return_value = {"name": b"fake", "multiProcessorCount": 2}

    @contextmanager
    def using(self, allocator: Any) -> Iterator[None]:
        assert allocator is self.cuda.MemoryPool.return_value.malloc
        self.log.append("arena")
        yield
        self.log.append("pool")


def test_cupy_captures_on_a_stream_of_its_own_with_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of calls, which is what CuPy's documentation asks for; `gpu-check` replays graphs on a real GPU."""
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    backend = CupyBackend()
    replay, num_bytes = backend.capture(lambda: fake.log.append("run"))
    assert fake.log == ["stream", "arena", "begin", "run", "end", "pool", "stream before"]
    assert num_bytes == 250
    replay()
    assert fake.log[-1] == "launch"


def test_a_capture_that_fails_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCupy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    with pytest.raises(ZeroDivisionError):
        CupyBackend().capture(lambda: print(1 // 0))
    assert "end" in fake.log


def test_wrong_arrays_are_refused_with_what_they_are_and_what_is_supported() -> None:
    loader = CheckedLaunches().loader
    x = random_floats(np.random.default_rng(0), 2, 16)
    with pytest.raises(DeviceError, match=r"silu_mul: gate_up is float64 \(2, 16\); supported is float32 \(any, any\)"):
        silu_mul.launch(loader, x.astype(np.float64))
    with pytest.raises(DeviceError, match=r"rms_norm: norm\.weight is float32 \(8,\); supported is float32 \(16,\)"):
        rms_norm.launch(loader, x, Norm(x[0, :8], 1e-6))
    with pytest.raises(DeviceError, match="silu_mul: gate_up is a view with strides"):
        silu_mul.launch(loader, x[:, :8])
    with pytest.raises(DeviceError, match="embedding: table is int8; supported are float16, and uint16"):
        embedding.launch(loader, np.zeros(1, np.int32), np.zeros((4, 8), np.int8))
    with pytest.raises(DeviceError, match="embedding: C is 12; supported are multiples of 8"):
        embedding.launch(loader, np.zeros(1, np.int32), np.zeros((4, 12), np.float16))
