"""Launches embedding.cu: rows of a table by their ids."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array, check_inner_size, element_bf16
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS = (
    {"ELEMENT_BF16": 0, "TABLE_FLOAT32": 0},
    {"ELEMENT_BF16": 1, "TABLE_FLOAT32": 0},
    {"ELEMENT_BF16": 0, "TABLE_FLOAT32": 1},
)
MAX_REGISTERS = 32
MARKERS = ("LDG.E.128",)
BLOCK = 128


def geometry(T: int, C: int, constants: dict[str, int]) -> Geometry:
    """A block for every 1024 columns of every row."""
    return Geometry(grid=(T, -(-C // (8 * BLOCK))), block=(BLOCK,), constants=constants)


def least_bytes(T: int, C: int, table_float32: int = 0) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return {"row_ids": 4 * T, "table": (4 if table_float32 else 2) * T * C, "x": 4 * T * C}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(T=64, C=3584, constants=constants)


def launch(loader: KernelLoader, row_ids: Array, table: Array) -> Array:
    """table[row_ids] as float32: (T,) int32, (V, C) -> (T, C). Raises DeviceError for what is not supported."""
    V, C = table.shape
    float32 = int(table.dtype == np.float32)
    constants = {"ELEMENT_BF16": 0 if float32 else element_bf16("embedding", "table", table), "TABLE_FLOAT32": float32}
    check_array("embedding", "row_ids", row_ids, np.int32, (None,))
    check_array("embedding", "table", table, table.dtype, (None, None))
    check_inner_size("embedding", "C", C)
    T = len(row_ids)
    x = loader.empty((T, C), np.float32)
    loader.launch("embedding", geometry(T, C, constants), (row_ids, table, x, np.int32(V), np.int32(C)))
    return x
