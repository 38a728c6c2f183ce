"""Launches round_rows.cu and tile_gemm.cu: a linear layer for many rows, with its norm, bias, residual or SiLU * up."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda import round_rows
from cupyllm.cuda.linear_arguments import LinearCall
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

TILES = (128, 64)
CONSTANT_SETS = tuple(
    {"ELEMENT_BF16": bf16, "GATE_UP": gate_up, "TILE": tile} for bf16 in (0, 1) for gate_up in (0, 1) for tile in TILES
)
MAX_REGISTERS = 208  # on sm_70 and sm_75; 128 from sm_80 on
MARKERS = ("HMMA",)
THREADS = 256
STAGES = 3
ROW_BYTES = 64  # of a row of a K tile in shared memory


def _with_tile(T: int, N: int, constants: dict[str, int], tile: int) -> Geometry:
    grid = (-(-T // tile), -(-N // (tile // (1 + constants["GATE_UP"]))))
    return Geometry(grid, (THREADS,), STAGES * 2 * tile * ROW_BYTES, {**constants, "TILE": tile})


def geometry(T: int, N: int, constants: dict[str, int], num_multiprocessors: int) -> Geometry:
    """The larger tile where it has a block for every multiprocessor, else the smaller."""
    large, small = (_with_tile(T, N, constants, tile) for tile in TILES)
    return large if large.grid[0] * large.grid[1] >= num_multiprocessors else small


def least_bytes(T: int, N: int, K: int, gate_up: int = 0, bias: int = 0, residual: int = 0) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return {
        "x": 2 * T * K,
        "inverse_scales": 4 * T,
        "weight": 2 * N * K * (1 + gate_up),
        "bias": 2 * N * bias,
        "residual": 4 * T * N * residual,
        "y": 4 * T * N,
    }


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return _with_tile(512, 18944, constants, constants["TILE"])


def launch(loader: KernelLoader, call: LinearCall) -> Array:
    """The linear layer for any number of rows: (T, K) float32 -> (T, N). Two launches: the rows are rounded first.

    Raises DeviceError for what is not supported.
    """
    constants = call.check("tile_gemm", max_rows=2**31 - 1)
    T, N, K = call.tokens, call.outputs, call.inner
    rounded, inverse_scales = round_rows.launch(loader, call.x, call.norm, bf16=constants["ELEMENT_BF16"])
    y = loader.empty((T, N), np.float32)
    bias, residual = (loader.nothing if array is None else array for array in (call.bias, call.residual))
    args = (rounded, inverse_scales, call.weight, bias, residual, y, np.int32(T), np.int32(N), np.int32(K))
    loader.launch("tile_gemm", geometry(T, N, constants, loader.facts.num_multiprocessors), args)
    return y
