"""Launches cutoff.cu: how far down its ranking each row may draw."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.group_maxima import num_groups
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.errors import DeviceError
from cupyllm.sampling_batch import GREEDY_BELOW

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 64
MARKERS = ("LDG.E.128",)
BLOCK = 512
MAX_IDS = 2**19  # a rank has 19 bits for the id


def geometry(R: int, N: int) -> Geometry:
    """A block for every row, with the distances of its groups in shared memory."""
    return Geometry(grid=(R,), block=(BLOCK,), shared_mem=4 * num_groups(N))


def least_bytes(R: int, N: int) -> dict[str, int]:
    """The fewest bytes each array can cost: of logits the group of the most likely token."""
    index = 4 * R * num_groups(N)
    each = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "most_likely"), 4 * R)
    return {"logits": 4 * R * min(N, 128), "maxima": index, "sums": index, **each, "cutoffs": 8 * R}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(R=64, N=151936)


def launch(
    loader: KernelLoader,
    logits: Array,
    N: int,
    index: tuple[Array, Array],
    *,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    min_p: Array,
) -> tuple[Array, Array]:
    """The most likely id of each row and the last rank that its filters keep: (R, V) -> (R,) int32 and (R,) uint64.

    `index` is what group_maxima returned for the same logits. Raises DeviceError for what is not supported.
    """
    check_array("cutoff", "logits", logits, np.float32, (None, None))
    R, V = logits.shape
    if N > MAX_IDS:
        raise DeviceError(f"cutoff: N is {N}; supported are up to {MAX_IDS} token ids")
    for name, array in zip(("maxima", "sums"), index, strict=True):
        check_array("cutoff", name, array, np.float32, (R, num_groups(N)))
    for name, array in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check_array("cutoff", name, array, np.float32, (R,))
    check_array("cutoff", "top_k", top_k, np.int32, (R,))
    results = loader.empty((R,), np.int32), loader.empty((R,), np.uint64)
    args = (logits, *index, temperature, top_k, top_p, min_p, *results)
    loader.launch("cutoff", geometry(R, N), (*args, np.int32(V), np.int32(N), np.float32(GREEDY_BELOW)))
    return results
