"""Launches advance_rows.cu: every decode row takes the token sampled for it, one position further on."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array, check_inner_size, element_bf16
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS = ({"ELEMENT_BF16": 0}, {"ELEMENT_BF16": 1})
MAX_REGISTERS = 32
MARKERS = ("LDG.E.128",)
BLOCK = 256


def geometry(R: int, constants: dict[str, int]) -> Geometry:
    """A block for every row."""
    return Geometry(grid=(R,), block=(BLOCK,), constants=constants)


def least_bytes(R: int, C: int, counted: int = 0) -> dict[str, int]:
    """The fewest bytes each array can cost when every row is in use, and the tokens of all are `counted` or not."""
    once = dict.fromkeys(("sampled", "page_tables", "token_ids", "positions", "slots"), 4 * R)
    counts = {"counts": 8 * R} if counted else {}
    return {**once, "context_lens": 8 * R, **counts, "table": 2 * R * C, "x": 4 * R * C}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a full decode batch, for the table of occupancy."""
    return geometry(R=64, constants=constants)


def launch(
    loader: KernelLoader,
    sampled: Array,
    page_tables: Array,
    table: Array,
    *,
    token_ids: Array,
    positions: Array,
    slots: Array,
    context_lens: Array,
    counts: Array | None,
    page_size: int,
) -> Array:
    """Move R rows on in place, and the embeddings of their tokens: (R, C) float32.

    sampled is (R,), page_tables (R, max_pages), the arrays that change (R,), all int32, table (V, C), and counts, where
    they are kept, (R, W) uint32. Raises DeviceError for what is not supported.
    """
    constants = {"ELEMENT_BF16": element_bf16("advance_rows", "table", table)}
    check_array("advance_rows", "sampled", sampled, np.int32, (None,))
    R = len(sampled)
    check_array("advance_rows", "page_tables", page_tables, np.int32, (R, None))
    check_array("advance_rows", "table", table, table.dtype, (None, None))
    V, C = table.shape
    check_inner_size("advance_rows", "C", C)
    moved = {"token_ids": token_ids, "positions": positions, "slots": slots, "context_lens": context_lens}
    for name, array in moved.items():
        check_array("advance_rows", name, array, np.int32, (R,))
    if counts is not None:
        check_array("advance_rows", "counts", counts, np.uint32, (R, None))
    x = loader.empty((R, C), np.float32)
    kept = (loader.nothing, 0) if counts is None else (counts, counts.shape[1])
    args = (sampled, page_tables, table, *moved.values(), kept[0], x)
    sizes = (page_tables.shape[1], page_size, kept[1], V, C)
    loader.launch("advance_rows", geometry(R, constants), (*args, *map(np.int32, sizes)))
    return x
