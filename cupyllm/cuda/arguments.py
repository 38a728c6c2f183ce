"""Checks of a launch's arrays from what the host knows of them: dtype, shape and layout, never their values.

CuPy's kernels check nothing and take the pointer of a view without its strides. So every launch module checks each
array here before it passes a pointer on.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.device import Array
from cupyllm.errors import DeviceError

# The dtypes of weights: fp16, and bf16 held as its bits. The value is the constant ELEMENT_BF16.
ELEMENT_BF16 = {np.dtype(np.float16): 0, np.dtype(np.uint16): 1}


def check_array(kernel: str, name: str, array: Array, dtype: Any, shape: tuple[int | None, ...]) -> None:
    """Raise DeviceError unless the array has this dtype and shape (None: any size) and is C-contiguous."""
    expected = np.dtype(dtype)
    fits = len(array.shape) == len(shape) and all(
        want is None or have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if array.dtype != expected or not fits:
        wanted = str(shape).replace("None", "any")
        raise DeviceError(f"{kernel}: {name} is {array.dtype} {array.shape}; supported is {expected} {wanted}")
    if not array.flags.c_contiguous:
        raise DeviceError(f"{kernel}: {name} is a view with strides; supported are contiguous arrays")


def element_bf16(kernel: str, name: str, array: Array) -> int:
    """The constant ELEMENT_BF16 for an array of weights. Raises DeviceError for any other dtype."""
    if array.dtype not in ELEMENT_BF16:
        raise DeviceError(f"{kernel}: {name} is {array.dtype}; supported are float16, and uint16 with the bits of bf16")
    return ELEMENT_BF16[array.dtype]


def check_inner_size(kernel: str, name: str, size: int) -> None:
    """Raise DeviceError unless rows of `size` elements of 2 bytes start at multiples of 16 bytes."""
    if size % 8:
        raise DeviceError(
            f"{kernel}: {name} is {size}; supported are multiples of 8, whose rows can be read 16 bytes at a time"
        )
