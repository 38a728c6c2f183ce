"""The root mean square of a row, which every norm begins with."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.ops.cpu.compile import part
from cupyllm.ops.cpu.dot_tile import dot_tile


@part
def inverse_root_mean_square(x: Any, offset: int, length: int, eps: float, LANES: int) -> Any:
    """1 / sqrt(mean(x ** 2) + eps) of `length` numbers of x's memory."""
    squares = np.empty(1, np.float32)
    dot_tile(squares, 0, 0, x, offset, 0, x, offset, 0, 0, squares, 0, 0, length, length, 0, 1, 1, LANES, 0)
    return np.float32(1) / np.sqrt(squares[0] / np.float32(length) + np.float32(eps))
