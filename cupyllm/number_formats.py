"""float32, float16 and bfloat16 as NumPy arrays, and conversion between them.

NumPy has no bfloat16. Its bits, which are the upper half of a float32, are held as uint16; nothing else in weights is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def numpy_type(dtype: str) -> np.dtype[Any]:
    """The NumPy type that holds "float32", "float16" or "bfloat16"."""
    return np.dtype(np.uint16 if dtype == "bfloat16" else dtype)


def convert(source: NDArray[Any], out: NDArray[Any]) -> None:
    """Write `source` into `out`, rounding to nearest even where out's type is narrower.

    Raises FloatingPointError for a value beyond float16's range: an infinity would spoil every output silently.
    """
    if source.dtype == out.dtype:
        out[...] = source
        return
    if source.dtype == np.uint16:
        source = bfloat16_to_float32(source)
    if out.dtype == np.uint16:
        out[...] = float32_to_bfloat16(source.astype(np.float32, copy=False))
        return
    with np.errstate(over="raise", invalid="ignore"):
        out[...] = source


def bfloat16_to_float32(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Exact, for every bit pattern."""
    wide: NDArray[np.uint32] = np.left_shift(bits, np.uint32(16))
    return wide.view(np.float32)


def float32_to_bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to nearest, ties to even; a NaN stays one."""
    bits = values.view(np.uint32)
    rounded: NDArray[np.uint32] = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)  # just under a half, or a half where the last bit kept is odd
    rounded += bits
    rounded >>= np.uint32(16)
    nan = np.isnan(values)
    if nan.any():  # rounding could carry a NaN over into an infinity or a zero
        rounded[nan] = bits[nan] >> np.uint32(16) | np.uint32(0x40)
    return rounded.astype(np.uint16)
