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


def least_bytes(R: int, C: int) -> dict[str, int]:
    """The fewest bytes each array can cost when every row is in use."""
    once = dict.fromkeys(("sampled", "page_tables", "token_ids", "positions", "slots"), 4 * R)
    return {**once, "context_lens": 8 * R, "table": 2 * R * C, "x": 4 * R * C}


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
    page_size: int,
) -> Array:
    """Move R rows on in place, and the embeddings of their tokens: (R, C) float32.

    sampled is (R,), page_tables (R, max_pages), the arrays that change (R,), all int32, and table (V, C). Raises
    DeviceError for what is not supported.
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
    x = loader.empty((R, C), np.float32)
    sizes = np.int32(page_tables.shape[1]), np.int32(page_size), np.int32(V), np.int32(C)
    loader.launch("advance_rows", geometry(R, constants), (sampled, page_tables, table, *moved.values(), x, *sizes))
    return x
