"""Which ops and which device the config key `device` means on this machine, and why."""

from __future__ import annotations

from typing import NamedTuple

from cupyllm.device import Device, HostDevice
from cupyllm.errors import DeviceError
from cupyllm.ops.reference import ReferenceOps


class Backend(NamedTuple):
    """Ops, the device their arrays live on, and one phrase that says why they were chosen."""

    ops: ReferenceOps
    device: Device
    reason: str


def make_backend(device: str) -> Backend:
    """The backend for the config key `device`. Raises DeviceError for one that this machine or version cannot run."""
    if device in ("reference", "cpu"):
        return Backend(ReferenceOps(), HostDevice(), "NumPy reference ops")
    if device == "auto":
        return Backend(ReferenceOps(), HostDevice(), "auto: NumPy reference ops, the only ones in this version")
    raise DeviceError(f'device "{device}" is not part of this version yet; use "auto", "cpu" or "reference"')
