"""Examples of the linear layers: gemv for one row, skinny_gemm for a few, round_rows and tile_gemm for many."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np

from cupyllm.cuda import gemv, round_rows, skinny_gemm, tile_gemm
from cupyllm.cuda.examples.case import EPSILON, ExampleRun, Output, Place, random_floats, to_elements, to_floats
from cupyllm.cuda.linear_arguments import LinearCall
from cupyllm.cuda.loader import KernelLoader
from cupyllm.device import Array
from cupyllm.ops.reference import Norm, ReferenceOps

_REFERENCE = ReferenceOps()


def gemv_example(
    loader: KernelLoader,
    place: Place,
    *,
    N: int = 256,
    K: int = 896,
    dtype: str = "bfloat16",
    around: str = "norm bias",
) -> ExampleRun:
    """A linear layer for one row; `around` names what is fused: norm, bias, residual, gate_up."""
    call = linear_call(1, N, K, dtype, around)
    least = gemv.least_bytes(N, K, **dict.fromkeys(around.split(), 1))
    return run_linear(gemv, loader, place, call, least, 32 * EPSILON["float32"])


def skinny_gemm_example(
    loader: KernelLoader,
    place: Place,
    *,
    T: int = 5,
    N: int = 256,
    K: int = 896,
    dtype: str = "bfloat16",
    around: str = "norm bias",
    growth: float = 1.0,
) -> ExampleRun:
    """A linear layer for T rows, whose last values are `growth` times as large as their first."""
    call = linear_call(T, N, K, dtype, around)
    call.x[:] *= np.geomspace(1.0, growth, K, dtype=np.float32)
    least = skinny_gemm.least_bytes(T, N, K, **dict.fromkeys(around.split(), 1))
    return run_linear(skinny_gemm, loader, place, call, least, EPSILON[dtype])  # x is rounded to the weights' type


def tile_gemm_example(
    loader: KernelLoader,
    place: Place,
    *,
    T: int = 96,
    N: int = 128,
    K: int = 256,
    dtype: str = "bfloat16",
    around: str = "norm bias",
) -> ExampleRun:
    """A linear layer for T rows, which round_rows norms and rounds first."""
    call = linear_call(T, N, K, dtype, around)
    extras = dict.fromkeys(set(around.split()) - {"norm"}, 1)
    return run_linear(tile_gemm, loader, place, call, tile_gemm.least_bytes(T, N, K, **extras), EPSILON[dtype])


def round_rows_example(
    loader: KernelLoader, place: Place, *, T: int = 3, K: int = 1024, dtype: str = "float16"
) -> ExampleRun:
    """T rows far beyond the range of fp16, normed and rounded."""
    rng = np.random.default_rng(0)
    x, weight = random_floats(rng, T, K, scale=1e8), random_floats(rng, K, scale=1e6)
    norm = Norm(place.upload(weight), 1e-6)
    rounded, inverse_scales = round_rows.launch(loader, place.upload(x), norm, bf16=int(dtype == "bfloat16"))
    actual = to_floats(place.download(rounded)) * place.download(inverse_scales)[:, None]
    output = Output("rounded", actual, _REFERENCE.rms_norm(x, Norm(weight, 1e-6)), 0.51 * EPSILON[dtype])
    return ExampleRun("rms_norm", {"T": T, "K": K}, round_rows.least_bytes(T, K, norm=1), (output,))


def linear_call(T: int, N: int, K: int, dtype: str, around: str) -> LinearCall:
    """A linear layer on the host, with random arrays."""
    rng = np.random.default_rng(0)
    rows = 2 * N if "gate_up" in around else N
    return LinearCall(
        x=random_floats(rng, T, K),
        weight=to_elements(rng.standard_normal((rows, K)) / np.sqrt(K), dtype),
        bias=to_elements(rng.standard_normal(N), dtype) if "bias" in around else None,
        norm=Norm(random_floats(rng, K), 1e-6) if "norm" in around else None,
        residual=random_floats(rng, T, N) if "residual" in around else None,
        gate_up="gate_up" in around,
    )


def run_linear(
    kernel: ModuleType,
    loader: KernelLoader,
    place: Place,
    call: LinearCall,
    least_bytes: dict[str, int],
    tolerance: float,
) -> ExampleRun:
    """Launch a kernel with a linear layer of the host, and ask the reference op the same."""
    y = place.download(kernel.launch(loader, _with_arrays(call, place.upload)))
    weight = to_floats(call.weight)
    if call.gate_up and call.norm:
        expected = _REFERENCE.gate_up_silu_mul(call.x, weight, norm=call.norm)
    else:
        bias = None if call.bias is None else to_floats(call.bias)
        expected = _REFERENCE.linear(call.x, weight, bias, norm=call.norm, residual=call.residual)
    sizes = {"T": call.tokens, "N": call.outputs, "K": call.inner}
    twin = "gate_up_silu_mul" if call.gate_up else "linear"
    return ExampleRun(twin, sizes, least_bytes, (Output("y", y, expected, tolerance),))


def _with_arrays(call: LinearCall, change: Callable[[np.ndarray], Array]) -> LinearCall:
    """The same call with every array changed."""
    return replace(
        call,
        x=change(call.x),
        weight=change(call.weight),
        bias=None if call.bias is None else change(call.bias),
        norm=None if call.norm is None else Norm(change(call.norm.weight), call.norm.eps),
        residual=None if call.residual is None else change(call.residual),
    )
