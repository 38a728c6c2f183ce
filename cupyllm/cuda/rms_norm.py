"""Launches rms_norm.cu: RMSNorm of every row."""

from __future__ import annotations

import math

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.errors import DeviceError
from cupyllm.ops.reference import Norm

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 40
MARKERS = ("LDG.E.128",)
BLOCK = 256


def geometry(T: int) -> Geometry:
    """A block for every row."""
    return Geometry(grid=(T,), block=(BLOCK,))


def least_bytes(T: int, C: int) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return {"x": 4 * T * C, "weight": 4 * C, "y": 4 * T * C}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(T=64)


def launch(loader: KernelLoader, x: Array, norm: Norm) -> Array:
    """RMSNorm of every row: (..., C) float32 -> the same shape. Raises DeviceError for what is not supported."""
    C = x.shape[-1]
    check_array("rms_norm", "x", x, np.float32, (None,) * len(x.shape[:-1]) + (C,))
    check_array("rms_norm", "norm.weight", norm.weight, np.float32, (C,))
    if C % 4:
        raise DeviceError(
            f"rms_norm: C is {C}; supported are multiples of 4, whose rows can be read 16 bytes at a time"
        )
    y = loader.empty(x.shape, np.float32)
    args = (x, norm.weight, y, np.int32(C), np.float32(norm.eps))
    loader.launch("rms_norm", geometry(math.prod(x.shape[:-1])), args)
    return y
