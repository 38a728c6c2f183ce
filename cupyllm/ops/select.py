"""Which ops and which device the config key `device` means on this machine, and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cupyllm.cuda.loader import Mode, cuda_loader, emulated_loader
from cupyllm.device import CupyDevice, Device, HostDevice
from cupyllm.errors import DeviceError
from cupyllm.model_config import ModelConfig
from cupyllm.ops.cuda import CudaOps, check_model
from cupyllm.ops.reference import ReferenceOps

KERNEL_DTYPES = ("float16", "bfloat16")


class Backend(NamedTuple):
    """Ops, the device their arrays live on, the dtypes they can work with, and why they were chosen."""

    ops: ReferenceOps
    device: Device
    dtypes: tuple[str, ...]
    check_model: Callable[[ModelConfig, int], None]  # config, page_size; raises DeviceError for what it cannot run
    reason: str


def make_backend(device: str, *, emulator_mode: Mode = "fast") -> Backend:
    """The backend for the config key `device`. Raises DeviceError for one that this machine cannot run."""
    if device in ("reference", "cpu"):
        return _reference("NumPy")
    if device == "emulated":
        loader = emulated_loader(emulator_mode)
        reason = f"{emulator_mode} mode, {loader.facts.name}"
        return Backend(CudaOps(loader, HostDevice()), HostDevice(), KERNEL_DTYPES, check_model, reason)
    if device == "cuda":
        loader = cuda_loader()
        gpu = CupyDevice()
        return Backend(CudaOps(loader, gpu), gpu, KERNEL_DTYPES, check_model, loader.facts.name)
    assert device == "auto"
    try:
        return make_backend("cuda")
    except DeviceError as error:
        return _reference(f"NumPy; no GPU: {error}")


def _reference(reason: str) -> Backend:
    return Backend(ReferenceOps(), HostDevice(), ("float32",), lambda config, page_size: None, reason)
