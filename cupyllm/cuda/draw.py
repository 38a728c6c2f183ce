"""Launches draw.cu: one token for each row, by Gumbel noise from the row's own random numbers."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.group_maxima import num_groups
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.sampling_batch import GREEDY_BELOW

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 64
MARKERS = ("LDG.E.128",)
BLOCK = 512


def geometry(R: int) -> Geometry:
    """A block for every row."""
    return Geometry(grid=(R,), block=(BLOCK,))


def least_bytes(R: int, N: int) -> dict[str, int]:
    """The fewest bytes each array can cost: of logits the group of the most likely token."""
    words = dict.fromkeys(("most_likely", "temperature", "positions", "token_ids"), 4 * R)
    longs = dict.fromkeys(("cutoffs", "seeds"), 8 * R)
    return {"logits": 4 * R * min(N, 128), "maxima": 4 * R * num_groups(N), **words, **longs}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(R=64)


def launch(
    loader: KernelLoader,
    logits: Array,
    N: int,
    maxima: Array,
    most_likely: Array,
    cutoffs: Array,
    *,
    temperature: Array,
    seeds: Array,
    positions: Array,
    out: Array | None = None,
) -> Array:
    """The next token of every row: (R, V) float32 -> (R,) int32, -1 where cutoff found no most likely token.

    They are written to `out` if it is given. Raises DeviceError for what is not supported.
    """
    check_array("draw", "logits", logits, np.float32, (None, None))
    R, V = logits.shape
    check_array("draw", "maxima", maxima, np.float32, (R, num_groups(N)))
    check_array("draw", "most_likely", most_likely, np.int32, (R,))
    check_array("draw", "cutoffs", cutoffs, np.uint64, (R,))
    check_array("draw", "temperature", temperature, np.float32, (R,))
    check_array("draw", "seeds", seeds, np.uint64, (R,))
    check_array("draw", "positions", positions, np.int32, (R,))
    token_ids = loader.empty((R,), np.int32) if out is None else out
    check_array("draw", "out", token_ids, np.int32, (R,))
    args = (logits, maxima, most_likely, cutoffs, temperature, seeds, positions, token_ids)
    loader.launch("draw", geometry(R), (*args, np.int32(V), np.int32(N), np.float32(GREEDY_BELOW)))
    return token_ids
