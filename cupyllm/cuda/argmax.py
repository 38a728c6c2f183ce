"""Launches argmax.cu: the most likely token of every row."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 48
MARKERS = ("LDG.E.128",)
BLOCK = 1024


def geometry(R: int) -> Geometry:
    """A block for every row."""
    return Geometry(grid=(R,), block=(BLOCK,))


def least_bytes(R: int, N: int) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return {"logits": 4 * R * N, "token_ids": 4 * R}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(R=64)


def launch(loader: KernelLoader, logits: Array, N: int, *, out: Array | None = None) -> Array:
    """The id of the largest of each row's first N logits: (R, V) float32 -> (R,) int32, -1 where a row is not finite.

    They are written to `out` if it is given. Raises DeviceError for what is not supported.
    """
    check_array("argmax", "logits", logits, np.float32, (None, None))
    R, V = logits.shape
    token_ids = loader.empty((R,), np.int32) if out is None else out
    check_array("argmax", "out", token_ids, np.int32, (R,))
    loader.launch("argmax", geometry(R), (logits, token_ids, np.int32(V), np.int32(N)))
    return token_ids
