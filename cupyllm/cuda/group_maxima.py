"""Launches group_maxima.cu: the largest and the weight of every 128 neighbouring logits."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS = ({"HAS_TEMPERATURE": 0}, {"HAS_TEMPERATURE": 1})
MAX_REGISTERS = 40
MARKERS = ("LDG.E.128",)
WARPS = 8
GROUP_IDS = 128


def num_groups(N: int) -> int:
    """How many groups N logits have."""
    return -(-N // GROUP_IDS)


def geometry(R: int, N: int, constants: dict[str, int]) -> Geometry:
    """A block for every eight groups of every row."""
    return Geometry(grid=(-(-num_groups(N) // WARPS), R), block=(WARPS * 32,), constants=constants)


def least_bytes(R: int, N: int) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return {"logits": 4 * R * N, "maxima": 4 * R * num_groups(N), "sums": 4 * R * num_groups(N)}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(R=64, N=151936, constants=constants)


def launch(loader: KernelLoader, logits: Array, N: int, temperature: Array | None = None) -> tuple[Array, Array]:
    """Maxima and sums of the groups of each row's first N logits: (R, V) float32 -> two arrays (R, G).

    Raises DeviceError for what is not supported.
    """
    check_array("group_maxima", "logits", logits, np.float32, (None, None))
    R, V = logits.shape
    if temperature is not None:
        check_array("group_maxima", "temperature", temperature, np.float32, (R,))
    constants = {"HAS_TEMPERATURE": int(temperature is not None)}
    maxima, sums = (loader.empty((R, num_groups(N)), np.float32) for _ in range(2))
    args = (logits, loader.nothing if temperature is None else temperature, maxima, sums)
    loader.launch("group_maxima", geometry(R, N, constants), (*args, np.int32(V), np.int32(N)))
    return maxima, sums
