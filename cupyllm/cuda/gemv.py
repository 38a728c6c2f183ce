"""Launches gemv.cu: a linear layer for one row, with its norm, bias, residual or SiLU(gate) * up."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.linear_arguments import LinearCall
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

# (ROWS, K_WARPS), from the fewest blocks to the most.
LAYOUTS = ((4, 1), (4, 4), (2, 4), (2, 8))
CONSTANT_SETS = tuple(
    {"ELEMENT_BF16": bf16, "GATE_UP": gate_up, "ROWS": rows, "K_WARPS": k_warps}
    for bf16 in (0, 1)
    for gate_up in (0, 1)
    for rows, k_warps in LAYOUTS
)
MAX_REGISTERS = 80
MARKERS = ("LDG.E.128",)
WARPS = 8
# Fewer blocks than this for each multiprocessor leave memory bandwidth unused.
BLOCKS_WANTED = 4


def geometry(N: int, K: int, constants: dict[str, int], num_multiprocessors: int) -> Geometry:
    """The layout with the fewest blocks that still fill the GPU, and with work for every warp."""
    for rows, k_warps in LAYOUTS:
        if k_warps > 1 and (k_warps - 1) * 32 >= K // 8:
            break
        outputs = WARPS // k_warps * rows // (1 + constants["GATE_UP"])
        blocks, layout = -(-N // outputs), {"ROWS": rows, "K_WARPS": k_warps}
        if blocks >= BLOCKS_WANTED * num_multiprocessors:
            break
    return Geometry((blocks,), (WARPS * 32,), constants={**constants, **layout})


def least_bytes(N: int, K: int, gate_up: int = 0, norm: int = 0, bias: int = 0, residual: int = 0) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return {
        "x": 4 * K,
        "weight": 2 * N * K * (1 + gate_up),
        "norm_weight": 4 * K * norm,
        "bias": 2 * N * bias,
        "residual": 4 * N * residual,
        "y": 4 * N,
    }


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    outputs = WARPS // constants["K_WARPS"] * constants["ROWS"] // (1 + constants["GATE_UP"])
    return Geometry((-(-3584 // outputs),), (WARPS * 32,), constants=constants)


def launch(loader: KernelLoader, call: LinearCall) -> Array:
    """The linear layer for one row: (1, K) float32 -> (1, N). Raises DeviceError for what is not supported."""
    constants = call.check("gemv", max_rows=1)
    y = loader.empty((1, call.outputs), np.float32)
    args = (*call.arrays(loader), y, np.int32(call.outputs), np.int32(call.inner), np.float32(call.eps))
    loader.launch("gemv", geometry(call.outputs, call.inner, constants, loader.facts.num_multiprocessors), args)
    return y
