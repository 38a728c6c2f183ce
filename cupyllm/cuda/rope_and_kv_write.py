"""Launches rope_and_kv_write.cu: rotate queries and keys, write keys and values into the cache."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array, element_bf16
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.errors import DeviceError
from cupyllm.ops.reference import Norm

HEAD_SIZES = (64, 128)
CONSTANT_SETS = tuple(
    {"ELEMENT_BF16": bf16, "HEAD_SIZE": head_size, "HAS_NORM": norm}
    for bf16 in (0, 1)
    for head_size in HEAD_SIZES
    for norm in (0, 1)
)
MAX_REGISTERS = 48
MARKERS = ("LDG.E.128",)
BLOCK = 128


def geometry(T: int, H: int, KH: int, constants: dict[str, int]) -> Geometry:
    """A block for every 128 lanes of a token's heads, D / 8 lanes a head."""
    lanes = (H + 2 * KH) * constants["HEAD_SIZE"] // 8
    return Geometry(grid=(T, -(-lanes // BLOCK)), block=(BLOCK,), constants=constants)


def least_bytes(T: int, H: int, KH: int, D: int, norm: int = 0) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return {
        "qkv": 4 * T * (H + 2 * KH) * D,
        "rope_table": 4 * T * D,
        "positions": 4 * T,
        "slots": 4 * T,
        "q_norm": 4 * D * norm,
        "k_norm": 4 * D * norm,
        "q": 4 * T * H * D,
        "keys": 2 * T * KH * D,
        "values": 2 * T * KH * D,
    }


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(T=64, H=28, KH=4, constants=constants)


def launch(
    loader: KernelLoader,
    qkv: Array,
    rope_table: Array,
    positions: Array,
    slots: Array,
    keys: Array,
    values: Array,
    *,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
) -> Array:
    """Rotated queries (T, H, D) float32 of qkv (T, (H + 2 * KH) * D); writes the slots of keys and values.

    A slot of -1 writes nothing: a row that only fills a captured step up. Raises DeviceError for what is not supported.
    """
    name = "rope_and_kv_write"
    bf16 = element_bf16(name, "keys", keys)
    check_array(name, "keys", keys, keys.dtype, (None, None, None, None))
    check_array(name, "values", values, keys.dtype, keys.shape)
    KH, D = keys.shape[2:]
    if D not in HEAD_SIZES:
        raise DeviceError(f"{name}: the head size is {D}; supported are 64 and 128")
    check_array(name, "qkv", qkv, np.float32, (None, None))
    T, H = len(qkv), qkv.shape[1] // D - 2 * KH
    if H < 1 or qkv.shape[1] % D:
        raise DeviceError(f"{name}: qkv has {qkv.shape[1]} columns; supported are H + 2 * {KH} heads of {D}")
    check_array(name, "rope_table", rope_table, np.float32, (None, D))
    check_array(name, "positions", positions, np.int32, (T,))
    check_array(name, "slots", slots, np.int32, (T,))
    has_norm = _check_norms(name, D, q_norm, k_norm)
    constants = {"ELEMENT_BF16": bf16, "HEAD_SIZE": D, "HAS_NORM": has_norm}
    weights = [norm.weight if norm else loader.nothing for norm in (q_norm, k_norm)]
    eps = [np.float32(norm.eps if norm else 0.0) for norm in (q_norm, k_norm)]
    q = loader.empty((T, H, D), np.float32)
    args = (qkv, rope_table, positions, slots, *weights, q, keys, values, np.int32(H), np.int32(KH), *eps)
    loader.launch(name, geometry(T, H, KH, constants), args)
    return q


def _check_norms(kernel: str, D: int, q_norm: Norm | None, k_norm: Norm | None) -> int:
    """The constant HAS_NORM. Raises DeviceError for weights of another shape and for one norm without the other."""
    if (q_norm is None) != (k_norm is None):
        raise DeviceError(f"{kernel}: one of q_norm and k_norm is given; supported are both or none")
    for name, norm in (("q_norm.weight", q_norm), ("k_norm.weight", k_norm)):
        if norm is not None:
            check_array(kernel, name, norm.weight, np.float32, (D,))
    return int(q_norm is not None)
