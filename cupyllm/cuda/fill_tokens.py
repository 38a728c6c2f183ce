"""Launches fill_tokens.cu: tokens that the host does not know yet, put into a batch."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 16
MARKERS = ("LDG.E",)
BLOCK = 256


def geometry(T: int) -> Geometry:
    """A thread for every token."""
    return Geometry(grid=(-(-T // BLOCK),), block=(BLOCK,))


def least_bytes(T: int, num_known: int = 0) -> dict[str, int]:
    """The fewest bytes each array can cost, when `num_known` of the tokens were known."""
    return {"token_ids": 4 * num_known, "sampled": 4 * (T - num_known), "rows": 4 * T, "out": 4 * T}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a full decode batch, for the table of occupancy."""
    return geometry(T=64)


def launch(loader: KernelLoader, token_ids: Array, sampled: Array, rows: Array) -> Array:
    """(T,), (R,), (T,) int32 -> (T,) int32. Raises DeviceError for what is not supported."""
    check_array("fill_tokens", "token_ids", token_ids, np.int32, (None,))
    T = len(token_ids)
    check_array("fill_tokens", "sampled", sampled, np.int32, (None,))
    check_array("fill_tokens", "rows", rows, np.int32, (T,))
    out = loader.empty((T,), np.int32)
    loader.launch("fill_tokens", geometry(T), (token_ids, sampled, rows, out, np.int32(T)))
    return out
