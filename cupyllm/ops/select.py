"""Which ops and which device the config key `device` means on this machine, and why."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from cupyllm.cuda.loader import KernelLoader, Mode, cuda_loader, emulated_loader
from cupyllm.device import Capture, CupyDevice, Device, HostDevice
from cupyllm.errors import DeviceError
from cupyllm.model_config import ModelConfig
from cupyllm.ops.cuda import CudaOps, check_model
from cupyllm.ops.deterministic import DeterministicCudaOps, DeterministicReferenceOps
from cupyllm.ops.reference import ReferenceOps
from cupyllm.weights import Upload

KERNEL_DTYPES = ("float16", "bfloat16")
CPU_DTYPES = ("bfloat16", "float16", "float32")


class WarmUp(NamedTuple):
    """One thing to do before the first step, such as compiling a kernel."""

    name: str
    run: Callable[[], object]


class Backend(NamedTuple):
    """Ops, the device their arrays live on, the dtypes they can work with, and why they were chosen.

    dtypes are of weights, cache_dtypes of the cache, the preferred one last; where there are none the cache has the
    weights' dtype.
    """

    ops: ReferenceOps
    device: Device
    dtypes: tuple[str, ...]
    check_model: Callable[[ModelConfig, int], None]  # config, page_size; raises DeviceError for what it cannot run
    reason: str
    cache_dtypes: tuple[str, ...] = ()
    # config, dtype, cache_dtype, what weights are uploaded with
    warm_ups: Callable[[ModelConfig, str, str, Upload], list[WarmUp]] = lambda config, dtype, cache_dtype, upload: []
    int8_upload: Callable[[ModelConfig], Upload] | None = None  # None: there are no kernels for `weights: "int8"`
    capture: Capture | None = None  # captures launches of the ops, where they are launches


def make_backend(
    device: str,
    *,
    emulator_mode: Mode = "fast",
    cpu_isa: str = "auto",
    threads: int | str = "auto",
    deterministic: bool = False,
) -> Backend:
    """The backend for the config key `device`. Raises DeviceError for one that this machine cannot run.

    The ops of a deterministic one do not depend on the batch; its steps are launched one by one.
    """
    if device == "reference":
        return _reference("NumPy", deterministic)
    if device == "cpu":
        return _cpu(cpu_isa, threads, deterministic)
    if device == "emulated":
        loader = emulated_loader(emulator_mode)
        return _cuda(loader, HostDevice(), f"{emulator_mode} mode, {loader.facts.name}", deterministic)
    if device == "cuda":
        loader = cuda_loader()
        return _cuda(loader, CupyDevice(), loader.facts.name, deterministic)
    assert device == "auto"
    try:
        return make_backend("cuda", deterministic=deterministic)
    except DeviceError as error:
        backend = _cpu(cpu_isa, threads, deterministic)
        return backend._replace(reason=f"{backend.reason}; no GPU: {error}")


def _cuda(loader: KernelLoader, device: Device, reason: str, deterministic: bool) -> Backend:
    if deterministic:
        return Backend(DeterministicCudaOps(loader, device), device, KERNEL_DTYPES, check_model, reason)
    return Backend(CudaOps(loader, device), device, KERNEL_DTYPES, check_model, reason, capture=loader.capture)


def _reference(reason: str, deterministic: bool) -> Backend:
    ops = DeterministicReferenceOps() if deterministic else ReferenceOps()
    return Backend(ops, HostDevice(), ("float32",), lambda config, page_size: None, reason)


def _cpu(cpu_isa: str, threads: int | str, deterministic: bool) -> Backend:
    """Compiled kernels, which are deterministic anyway, where numba is installed, else NumPy."""
    try:
        import numba  # noqa: F401
    except ImportError:
        if cpu_isa != "auto" or threads != "auto":
            raise DeviceError("cpu_isa and threads need compiled kernels: pip install 'cupyllm[cpu]'") from None
        return _reference("NumPy; for compiled kernels, pip install 'cupyllm[cpu]'", deterministic)
    from cupyllm.ops.cpu.backend import check_model, make_int8, make_ops, warm_ups  # numba takes a second to import

    ops = make_ops(cpu_isa, threads)
    reason = f"numba, {ops.isa.name}, {ops.threads} thread{'s' * (ops.threads > 1)}"

    def warm_ups_of(config: ModelConfig, dtype: str, cache_dtype: str, upload: Upload) -> list[WarmUp]:
        return [WarmUp(name, run) for name, run in warm_ups(ops, config, dtype, cache_dtype, upload)]

    return Backend(ops, HostDevice(), CPU_DTYPES, check_model, reason, CPU_DTYPES, warm_ups_of, partial(make_int8, ops))
