"""Launches penalise.cu: the repetition penalty, on a copy of the logits."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 40
MARKERS = ("LDG.E.128",)
BLOCK = 256
BLOCK_IDS = 4096


def geometry(R: int, N: int) -> Geometry:
    """A block for every 4096 ids of every row."""
    return Geometry(grid=(-(-N // BLOCK_IDS), R), block=(BLOCK,))


def least_bytes(R: int, N: int, M: int) -> dict[str, int]:
    """The fewest bytes each array can cost; M is the number of penalised ids of all rows."""
    return {
        "logits": 4 * R * N,
        "repetition_penalty": 4 * R,
        "penalty_starts": 4 * (R + 1),
        "penalty_ids": 4 * M,
        "penalised": 4 * R * padded(N),
    }


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(R=64, N=151936)


def padded(N: int) -> int:
    """The columns of the copy: its rows start at multiples of 16 bytes."""
    return -(-N // 4) * 4


def launch(
    loader: KernelLoader,
    logits: Array,
    N: int,
    *,
    repetition_penalty: Array,
    penalty_starts: Array,
    penalty_ids: Array,
) -> Array:
    """The first N columns of (R, V) logits with the penalties applied: (R, W), W >= N a multiple of 4.

    Raises DeviceError for what is not supported.
    """
    check_array("penalise", "logits", logits, np.float32, (None, None))
    R, V = logits.shape
    check_array("penalise", "repetition_penalty", repetition_penalty, np.float32, (R,))
    check_array("penalise", "penalty_starts", penalty_starts, np.int32, (R + 1,))
    check_array("penalise", "penalty_ids", penalty_ids, np.int32, (None,))
    penalised = loader.empty((R, padded(N)), np.float32)
    args = (logits, repetition_penalty, penalty_starts, penalty_ids, penalised, np.int32(V), np.int32(N))
    loader.launch("penalise", geometry(R, N), args)
    return penalised
