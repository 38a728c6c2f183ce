"""Launches top_logprobs.cu: log-probabilities of the chosen and of the most likely tokens."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.group_maxima import num_groups
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.errors import DeviceError

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 48
MARKERS = ("LDG.E.128",)
BLOCK = 256


def geometry(R: int, N: int) -> Geometry:
    """A block for every row, with what is left of its groups in shared memory."""
    return Geometry(grid=(R,), block=(BLOCK,), shared_mem=4 * num_groups(N))


def least_bytes(R: int, N: int, n: int) -> dict[str, int]:
    """The fewest bytes each array can cost: of logits a group for every one of the n tokens."""
    index = 4 * R * num_groups(N)
    tops = dict.fromkeys(("top_ids", "top_logprobs_out"), 4 * R * n)
    each = dict.fromkeys(("token_ids", "logprobs"), 4 * R)
    return {"logits": 4 * R * min(N, 128 * n), "maxima": index, "sums": index, **each, **tops}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(R=64, N=151936)


def launch(
    loader: KernelLoader, logits: Array, N: int, index: tuple[Array, Array], token_ids: Array, n: int
) -> tuple[Array, Array, Array]:
    """Log-probability of each row's token, and the n most likely ids with theirs: (R,), (R, n) int32, (R, n).

    `index` is what group_maxima returned for the same logits, without a temperature. Raises DeviceError for what is
    not supported.
    """
    check_array("top_logprobs", "logits", logits, np.float32, (None, None))
    R, V = logits.shape
    if n > N:
        raise DeviceError(f"top_logprobs: n is {n}; supported are up to the {N} token ids there are")
    for name, array in zip(("maxima", "sums"), index, strict=True):
        check_array("top_logprobs", name, array, np.float32, (R, num_groups(N)))
    check_array("top_logprobs", "token_ids", token_ids, np.int32, (R,))
    logprobs = loader.empty((R,), np.float32)
    top_ids, top_values = loader.empty((R, n), np.int32), loader.empty((R, n), np.float32)
    args = (logits, *index, token_ids, logprobs, top_ids, top_values, np.int32(V), np.int32(N), np.int32(n))
    loader.launch("top_logprobs", geometry(R, N), args)
    return logprobs, top_ids, top_values
