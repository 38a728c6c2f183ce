"""The speed of each kernel on the shapes of a model, beside the measured limits and, for products, beside cuBLAS.

What is timed is the launch as the engine makes it, its allocation included, in float16: CuPy multiplies bf16 only with
another package installed, and both types move the same bytes. cuBLAS computes the bare product, in float16 to float16;
the kernels also do what stands around it (norm, bias, residual, SiLU * up), from and to float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cupyllm.figures import Row
from cupyllm.gpu_check.gpu import Launch
from cupyllm.gpu_check.limits import Limits
from cupyllm.gpu_check.measure import CACHES, Arrays, Timing, copies_for, measure

Make = Callable[[Arrays], Launch]


class Product(NamedTuple):
    """x (T, K) @ weight (N, K).T, for cuBLAS."""

    T: int
    N: int
    K: int


@dataclass(frozen=True)
class KernelCase:
    """A kernel on one shape. `make` makes a launch with arrays of its own, from pools."""

    kernel: str
    shape: str  # in the figure's name, such as "qwen2.5-7b.qkv.T1"
    num_bytes: int  # least_bytes over all arrays
    make: Make
    operations: int | None = None  # where arithmetic is the limit, not bytes
    product: Product | None = None  # what cuBLAS is asked to do beside it


def kernel_rows(arrays: Arrays, limits: Limits, case: KernelCase, *, repeats: int) -> tuple[list[Row], bool]:
    """Two figures of a case: microseconds beside cuBLAS, and the rate beside the measured limit.

    Also whether the host could not launch fast enough, so that its time is in them.
    """
    timing = time_case(arrays, case, repeats=repeats)
    name = f"{case.kernel}.{case.shape}"
    peer = "cuBLAS, bare product" if timing.peer_runs else None
    time_row = Row(f"{name}.time", "us", _microseconds(timing.runs), peer, _microseconds(timing.peer_runs))
    return [time_row, rate_row(name, case, timing, limits)], timing.host_bound


def time_case(arrays: Arrays, case: KernelCase, *, repeats: int) -> Timing:
    """Time the kernel and, where there is one, its product through cuBLAS in turn."""
    count = copies_for(case.num_bytes, arrays.gpu.cache_bytes)
    own = [case.make(arrays) for _ in range(count)]
    peer: list[Launch] = []
    if case.product is not None and arrays.gpu.has_cublas:
        peer = [bare_product(arrays, case.product) for _ in range(count)]
    return measure(arrays.gpu, own, peer, repeats=repeats)


def rate_row(name: str, case: KernelCase, timing: Timing, limits: Limits) -> Row:
    """GB/s of the bytes that must move, or TFLOP/s, beside the measured limit: the ratio is the share of it."""
    if case.operations is None:
        rates = [rate / 1e9 for rate in timing.rates(case.num_bytes)]
        return Row(f"{name}.rate", "GB/s", rates, "limit of bandwidth", [limits.bandwidth / 1e9] * len(rates))
    rates = [rate / 1e12 for rate in timing.rates(case.operations)]
    if limits.flops is None:
        return Row(f"{name}.rate", "TFLOP/s", rates)
    return Row(f"{name}.rate", "TFLOP/s", rates, "limit of matmul", [limits.flops / 1e12] * len(rates))


def bare_product(arrays: Arrays, product: Product) -> Launch:
    """The product through cuBLAS, in float16."""
    T, N, K = product
    x, weight = arrays.elements.take(T, K), arrays.elements.take(N, K)
    out = arrays.gpu.loader.empty((T, N), np.float16)
    return lambda: arrays.gpu.matmul(x, weight.T, out)


def pool_sizes(cases: Sequence[KernelCase], cache_bytes: int) -> tuple[int, int]:
    """Numbers that the pools of elements and of floats must hold: enough for each case, and more than the cache."""
    most_bytes = max(case.num_bytes for case in cases)
    # Products of many rows count their rows as elements, and take them as floats; weights are never floats.
    most_floats = max(case.num_bytes // (2 if case.operations else 4) for case in cases if not is_weight_bound(case))
    return max(most_bytes, 2 * CACHES * cache_bytes) // 2, max(most_floats, 2 * CACHES * cache_bytes // 4)


def is_weight_bound(case: KernelCase) -> bool:
    """Whether nearly all bytes of a case are those of weights."""
    return case.product is not None and case.operations is None


def _microseconds(seconds: list[float]) -> list[float]:
    return [value * 1e6 for value in seconds]
