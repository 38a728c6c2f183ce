"""Launches skinny_gemm.cu: a linear layer for 2 to 64 rows, with its norm, bias, residual or SiLU(gate) * up."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.linear_arguments import LinearCall
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

TOKENS = (8, 16, 32, 64)
MAX_ROWS = TOKENS[-1]
CONSTANT_SETS = tuple(
    {"ELEMENT_BF16": bf16, "GATE_UP": gate_up, "TOKENS": tokens}
    for bf16 in (0, 1)
    for gate_up in (0, 1)
    for tokens in TOKENS
)
MAX_REGISTERS = 128
MARKERS = ("LDG.E.128", "HMMA")
THREADS = 256
# So many blocks a multiprocessor keep enough loads under way.
BLOCKS_WANTED = 2
# More parts than this cost the last block longer to add up than they save.
MAX_SPLITS = 8


def geometry(
    T: int, N: int, K: int, constants: dict[str, int], num_multiprocessors: int, tokens: int | None = None
) -> Geometry:
    """Blocks of 4 * TOKENS rows of weight; K is split over several where those do not fill the GPU.

    TOKENS, and with it the order of every sum, follows from T, or is `tokens`.
    """
    tokens = tokens or next(size for size in TOKENS if size >= T)
    blocks = -(-N // (4 * tokens // (1 + constants["GATE_UP"])))
    k_tiles = -(-K // (2048 // tokens))
    splits = max(1, min(MAX_SPLITS, k_tiles, BLOCKS_WANTED * num_multiprocessors // blocks))
    return Geometry((blocks, splits), (THREADS,), constants={**constants, "TOKENS": tokens})


def least_bytes(
    T: int, N: int, K: int, gate_up: int = 0, norm: int = 0, bias: int = 0, residual: int = 0
) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return {
        "x": 4 * T * K,
        "weight": 2 * N * K * (1 + gate_up),
        "norm_weight": 4 * K * norm,
        "bias": 2 * N * bias,
        "residual": 4 * T * N * residual,
        "y": 4 * T * N,
    }


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(constants["TOKENS"], 3584, 18944, constants, 132)


def launch(loader: KernelLoader, call: LinearCall, *, tokens: int | None = None) -> Array:
    """The linear layer for up to 64 rows: (T, K) float32 -> (T, N). `tokens` fixes TOKENS, which T decides else.

    Raises DeviceError for what is not supported.
    """
    constants = call.check("skinny_gemm", max_rows=MAX_ROWS)
    T, N, K = call.tokens, call.outputs, call.inner
    if T == 0:
        return loader.empty((0, N), np.float32)
    g = geometry(T, N, K, constants, loader.facts.num_multiprocessors, tokens)
    (blocks, splits), width = g.grid, g.constants["TOKENS"]
    y = loader.empty((T, N), np.float32)
    totals = loader.empty((splits, blocks, width, 4 * width + 1), np.float32)
    scratch = (y, totals, loader.tickets(blocks))
    loader.launch(
        "skinny_gemm",
        g,
        (*call.arrays(loader), *scratch, np.int32(T), np.int32(N), np.int32(K), np.float32(call.eps)),
    )
    return y
