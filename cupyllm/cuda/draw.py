"""Launches draw.cu: one token for each row, among those that its filters keep."""

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
    words = dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "positions", "token_ids"), 4 * R)
    longs = dict.fromkeys(("seeds", "cutoffs"), 8 * R)
    return {"logits": 4 * R * min(N, 128), "maxima": index, "sums": index, **words, **longs}


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
    seeds: Array,
    positions: Array,
    out: Array | None = None,
) -> tuple[Array, Array]:
    """The next token of every row, and the last rank that its filters keep: (R, V) -> (R,) int32 and (R,) uint64.

    `index` is what group_maxima returned for the same logits. The tokens are written to `out` if it is given. Raises
    DeviceError for what is not supported.
    """
    check_array("draw", "logits", logits, np.float32, (None, None))
    R, V = logits.shape
    if N > MAX_IDS:
        raise DeviceError(f"draw: N is {N}; supported are up to {MAX_IDS} token ids")
    for name, array in zip(("maxima", "sums"), index, strict=True):
        check_array("draw", name, array, np.float32, (R, num_groups(N)))
    for name, array in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check_array("draw", name, array, np.float32, (R,))
    check_array("draw", "top_k", top_k, np.int32, (R,))
    check_array("draw", "seeds", seeds, np.uint64, (R,))
    check_array("draw", "positions", positions, np.int32, (R,))
    token_ids = loader.empty((R,), np.int32) if out is None else out
    check_array("draw", "out", token_ids, np.int32, (R,))
    cutoffs = loader.empty((R,), np.uint64)
    args = (logits, *index, temperature, top_k, top_p, min_p, seeds, positions, token_ids, cutoffs)
    loader.launch("draw", geometry(R, N), (*args, np.int32(V), np.int32(N), np.float32(GREEDY_BELOW)))
    return token_ids, cutoffs
