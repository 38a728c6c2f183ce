"""Launches adjust_logits.cu: repetition penalties, offsets and masks, on a copy of the logits."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.errors import DeviceError

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 40
MARKERS = ("LDG.E.128",)
BLOCK = 256
BLOCK_IDS = 4096
# The arrays of a SamplingBatch that `launch` takes, under their names there.
CHANGES = (
    "repetition_penalty",
    "penalty_starts",
    "penalty_ids",
    "offset_starts",
    "offset_ids",
    "offsets",
    "mask_rows",
    "masks",
)


def geometry(R: int, N: int) -> Geometry:
    """A block for every 4096 ids of every row."""
    return Geometry(grid=(-(-N // BLOCK_IDS), R), block=(BLOCK,))


def least_bytes(R: int, N: int, M: int, O: int = 0, masked: int = 0) -> dict[str, int]:  # noqa: E741
    """The fewest bytes each array can cost; M and O are the penalised and moved ids of all rows, of which `masked`
    have a mask.
    """
    return {
        "logits": 4 * R * N,
        "repetition_penalty": 4 * R,
        "penalty_starts": 4 * (R + 1),
        "penalty_ids": 4 * M,
        "offset_starts": 4 * (R + 1),
        "offset_ids": 4 * O,
        "offsets": 4 * O,
        "mask_rows": 4 * R,
        "masks": 4 * masked * mask_words(N),
        "adjusted": 4 * R * padded(N),
    }


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(R=64, N=151936)


def padded(N: int) -> int:
    """The columns of the copy: its rows start at multiples of 16 bytes."""
    return -(-N // 4) * 4


def mask_words(N: int) -> int:
    """The words of a mask: one bit for each id."""
    return -(-N // 32)


def launch(
    loader: KernelLoader,
    logits: Array,
    N: int,
    *,
    repetition_penalty: Array,
    penalty_starts: Array,
    penalty_ids: Array,
    offset_starts: Array,
    offset_ids: Array,
    offsets: Array,
    mask_rows: Array,
    masks: Array,
) -> Array:
    """The first N columns of (R, V) logits as the rows' requests want them: (R, W), W >= N a multiple of 4.

    The arrays are those of a SamplingBatch. Raises DeviceError for what is not supported.
    """
    check_array("adjust_logits", "logits", logits, np.float32, (None, None))
    R, V = logits.shape
    check_array("adjust_logits", "repetition_penalty", repetition_penalty, np.float32, (R,))
    check_array("adjust_logits", "penalty_starts", penalty_starts, np.int32, (R + 1,))
    check_array("adjust_logits", "penalty_ids", penalty_ids, np.int32, (None,))
    check_array("adjust_logits", "offset_starts", offset_starts, np.int32, (R + 1,))
    check_array("adjust_logits", "offset_ids", offset_ids, np.int32, (None,))
    check_array("adjust_logits", "offsets", offsets, np.float32, offset_ids.shape)
    check_array("adjust_logits", "mask_rows", mask_rows, np.int32, (R,))
    check_array("adjust_logits", "masks", masks, np.uint32, (None, None))
    words = masks.shape[1]
    if words < mask_words(N):
        raise DeviceError(
            f"adjust_logits: masks have {words} words a row; supported are {mask_words(N)} or more, for {N} token ids"
        )
    adjusted = loader.empty((R, padded(N)), np.float32)
    changes = (repetition_penalty, penalty_starts, penalty_ids, offset_starts, offset_ids, offsets, mask_rows, masks)
    args = (logits, *changes, adjusted, np.int32(V), np.int32(N), np.int32(words))
    loader.launch("adjust_logits", geometry(R, N), args)
    return adjusted
