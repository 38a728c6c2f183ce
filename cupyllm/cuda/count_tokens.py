"""Launches count_tokens.cu: how often every token has come in decode rows."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.row_sampling import count_width

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 32
MARKERS = ("STG.E.128",)
BLOCK = 256
BLOCK_IDS = 4096


def geometry(J: int, N: int) -> Geometry:
    """A block for every 4096 ids of every job."""
    return Geometry(grid=(-(-count_width(N) // BLOCK_IDS), J), block=(BLOCK,))


def least_bytes(J: int, N: int, M: int, cleared: int) -> dict[str, int]:
    """The fewest bytes each array can cost, when `cleared` of J rows are and all M tokens fall into these."""
    return {"jobs": 20 * J, "tokens": 4 * M, "counts": 4 * cleared * count_width(N)}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(J=1, N=151936)


def launch(loader: KernelLoader, counts: Array, jobs: Array, tokens: Array, *, vocab_limit: int) -> None:
    """Count tokens in place: counts (R, W) uint32, jobs (J, 5) and tokens (M,) int32; see ReferenceOps.count_tokens.

    Raises DeviceError for what is not supported.
    """
    check_array("count_tokens", "counts", counts, np.uint32, (None, count_width(vocab_limit)))
    check_array("count_tokens", "jobs", jobs, np.int32, (None, 5))
    check_array("count_tokens", "tokens", tokens, np.int32, (None,))
    loader.launch("count_tokens", geometry(len(jobs), vocab_limit), (jobs, tokens, counts, np.int32(vocab_limit)))
