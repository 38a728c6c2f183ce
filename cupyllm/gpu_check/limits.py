"""What this GPU can do at most, measured: bytes a second from memory, and operations a second of matrix products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cupyllm.figures import Row
from cupyllm.gpu_check.gpu import Launch
from cupyllm.gpu_check.measure import Arrays, Timing, measure


@dataclass(frozen=True)
class Limits:
    """The limits that shares are taken of, and the rows that say how they were found."""

    bandwidth: float  # bytes/s: the faster of reading and copying
    flops: float | None  # operations/s of float16 products; None without cuBLAS
    rows: tuple[Row, ...]


def measure_limits(arrays: Arrays, *, matrix_size: int, repeats: int) -> Limits:
    """Copy and read the halves of the pool of elements, and multiply square matrices of this size."""
    gpu = arrays.gpu
    pieces = arrays.elements.halves()
    num_bytes = int(pieces[0].nbytes)
    copies: list[Launch] = [
        lambda: gpu.copy(pieces[0], pieces[1]),
        lambda: gpu.copy(pieces[1], pieces[0]),
    ]
    copied = measure(gpu, copies, repeats=repeats)
    reads: list[Launch] = [lambda piece=piece: gpu.read(piece) for piece in pieces]  # type: ignore[misc]
    read = measure(gpu, reads, repeats=repeats)
    rows = [_rate("limit.copy", "GB/s", copied, 2 * num_bytes), _rate("limit.read", "GB/s", read, num_bytes)]
    bandwidth = max(row.value for row in rows) * 1e9
    flops = None
    if gpu.has_cublas:
        products = measure(gpu, _products(arrays, matrix_size), repeats=repeats)
        rows.append(_rate("limit.matmul.float16", "TFLOP/s", products, 2 * matrix_size**3))
        flops = rows[-1].value * 1e12
    return Limits(bandwidth, flops, tuple(rows))


def _products(arrays: Arrays, size: int) -> Sequence[Launch]:
    """A square product of random matrices, through cuBLAS."""
    a, b = (arrays.elements.take(size, size) for _ in range(2))
    out = arrays.gpu.loader.empty((size, size), np.float16)
    return [lambda: arrays.gpu.matmul(a, b, out)]


def _rate(name: str, unit: str, timing: Timing, work: int) -> Row:
    scale = {"GB/s": 1e9, "TFLOP/s": 1e12}[unit]
    return Row(name, unit, [rate / scale for rate in timing.rates(work)])
