"""Launches silu_mul.cu: SiLU(gate) * up."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 32
MARKERS: tuple[str, ...] = ()
BLOCK = 256


def geometry(T: int, I: int) -> Geometry:  # noqa: E741
    """A block for every 256 columns of every row."""
    return Geometry(grid=(T, -(-I // BLOCK)), block=(BLOCK,))


def least_bytes(T: int, I: int) -> dict[str, int]:  # noqa: E741
    """The fewest bytes each array can cost."""
    return {"gate_up": 8 * T * I, "hidden": 4 * T * I}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(T=64, I=18944)


def launch(loader: KernelLoader, gate_up: Array) -> Array:
    """SiLU(gate) * up: (T, 2 * I) float32 -> (T, I). Raises DeviceError for what is not supported."""
    check_array("silu_mul", "gate_up", gate_up, np.float32, (None, None))
    T, columns = gate_up.shape
    hidden = loader.empty((T, columns // 2), np.float32)
    loader.launch("silu_mul", geometry(T, columns // 2), (gate_up, hidden, np.int32(columns // 2)))
    return hidden
