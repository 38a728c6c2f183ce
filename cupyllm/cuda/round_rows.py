"""Launches round_rows.cu: norm rows where wanted, and round them to the weights' type."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array, check_inner_size
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.ops.reference import Norm

CONSTANT_SETS = ({"ELEMENT_BF16": 0}, {"ELEMENT_BF16": 1})
MAX_REGISTERS = 48
MARKERS = ("LDG.E.128",)
BLOCK = 256


def geometry(T: int, constants: dict[str, int]) -> Geometry:
    """A block for every row."""
    return Geometry(grid=(T,), block=(BLOCK,), constants=constants)


def least_bytes(T: int, K: int, norm: int = 0) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return {"x": 4 * T * K, "norm_weight": 4 * K * norm, "rounded": 2 * T * K, "inverse_scales": 4 * T}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(512, constants)


def launch(loader: KernelLoader, x: Array, norm: Norm | None, *, bf16: int) -> tuple[Array, Array]:
    """x (T, K) float32 -> normed and rounded rows (T, K) as elements, and their inverse scales (T,) float32.

    rounded * inverse_scales[:, None] is the normed x to within one rounding. Raises DeviceError for what is not
    supported.
    """
    check_array("round_rows", "x", x, np.float32, (None, None))
    T, K = x.shape
    check_inner_size("round_rows", "K", K)
    if norm is not None:
        check_array("round_rows", "norm.weight", norm.weight, np.float32, (K,))
    rounded = loader.empty((T, K), np.uint16 if bf16 else np.float16)
    inverse_scales = loader.empty((T,), np.float32)
    weight, eps = (loader.nothing, 0.0) if norm is None else norm
    args = (x, weight, rounded, inverse_scales, np.int32(K), np.float32(eps))
    loader.launch("round_rows", geometry(T, {"ELEMENT_BF16": bf16}), args)
    return rounded, inverse_scales
