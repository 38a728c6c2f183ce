"""Launches advance_rows.cu: every decode row takes the token sampled for it, one position further on."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 24
MARKERS = ("LDG.E",)
BLOCK = 256


def geometry(R: int) -> Geometry:
    """A thread for every row."""
    return Geometry(grid=(-(-R // BLOCK),), block=(BLOCK,))


def least_bytes(R: int) -> dict[str, int]:
    """The fewest bytes each array can cost when every row is in use."""
    once = dict.fromkeys(("sampled", "page_tables", "token_ids", "positions", "slots"), 4 * R)
    return {**once, "context_lens": 8 * R}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a full decode batch, for the table of occupancy."""
    return geometry(R=64)


def launch(
    loader: KernelLoader,
    sampled: Array,
    page_tables: Array,
    *,
    token_ids: Array,
    positions: Array,
    slots: Array,
    context_lens: Array,
    page_size: int,
) -> None:
    """Move R rows on in place: sampled (R,), page_tables (R, max_pages), the others (R,), all int32.

    Raises DeviceError for what is not supported.
    """
    check_array("advance_rows", "sampled", sampled, np.int32, (None,))
    R = len(sampled)
    check_array("advance_rows", "page_tables", page_tables, np.int32, (R, None))
    moved = {"token_ids": token_ids, "positions": positions, "slots": slots, "context_lens": context_lens}
    for name, array in moved.items():
        check_array("advance_rows", name, array, np.int32, (R,))
    sizes = np.int32(R), np.int32(page_tables.shape[1]), np.int32(page_size)
    loader.launch("advance_rows", geometry(R), (sampled, page_tables, *moved.values(), *sizes))
