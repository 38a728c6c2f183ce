"""Cases of the linear layers of a model: one row, a batch of rows, a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from cupyllm.cuda import gemv, skinny_gemm, tile_gemm
from cupyllm.cuda.linear_arguments import LinearCall
from cupyllm.gpu_check.gpu import Launch
from cupyllm.gpu_check.kernels import KernelCase, Product
from cupyllm.gpu_check.measure import Arrays
from cupyllm.model_config import ModelConfig
from cupyllm.ops.reference import Norm

DECODE_ROWS = (1, 8, 64)


def layers(config: ModelConfig) -> dict[str, tuple[int, int, str]]:
    """Name -> outputs N, inputs K, and what is fused, of a model's linear layers."""
    C, I = config.hidden_size, config.intermediate_size  # noqa: E741
    q = config.num_heads * config.head_size
    qkv = q + 2 * config.num_kv_heads * config.head_size
    return {
        "qkv": (qkv, C, "norm bias" if config.qkv_bias else "norm"),
        "o": (C, q, "residual"),
        "gate_up": (I, C, "norm gate_up"),
        "down": (C, I, "residual"),
        "head": (config.vocab_size, C, "norm"),
    }


def linear_cases(model: str, config: ModelConfig, *, prompt_rows: int) -> Iterator[KernelCase]:
    """Every layer for 1, 8 and 64 rows; all but the head, which sees few rows, for `prompt_rows` too."""
    for T in (*DECODE_ROWS, prompt_rows):
        for layer, (N, K, around) in layers(config).items():
            if T in DECODE_ROWS or layer != "head":
                yield linear_case(f"{model}.{layer}.T{T}", T, N, K, around)


def linear_case(shape: str, T: int, N: int, K: int, around: str) -> KernelCase:
    """One layer with the kernel that the engine takes for so many rows."""
    fused = dict.fromkeys(around.split(), 1)
    rows = N * (2 if "gate_up" in fused else 1)
    operations = None
    kernel: ModuleType
    if T == 1:
        kernel, least = gemv, gemv.least_bytes(N, K, **fused)
    elif T <= skinny_gemm.MAX_ROWS:
        kernel, least = skinny_gemm, skinny_gemm.least_bytes(T, N, K, **fused)
    else:  # its norm is round_rows' work, which is part of the launch
        fused.pop("norm", None)
        kernel, least, operations = tile_gemm, tile_gemm.least_bytes(T, N, K, **fused), 2 * T * rows * K

    def make(arrays: Arrays) -> Launch:
        return _launch(arrays, kernel, T, N, K, around)

    name = kernel.__name__.rpartition(".")[2]
    return KernelCase(name, shape, sum(least.values()), make, operations, Product(T, rows, K))


def _launch(arrays: Arrays, kernel: ModuleType, T: int, N: int, K: int, around: str) -> Launch:
    rows = 2 * N if "gate_up" in around else N
    call = LinearCall(
        x=arrays.floats.take(T, K),
        weight=arrays.elements.take(rows, K),
        bias=arrays.elements.take(N) if "bias" in around else None,
        norm=Norm(arrays.floats.take(K), 1e-6) if "norm" in around else None,
        residual=arrays.floats.take(T, N) if "residual" in around else None,
        gate_up="gate_up" in around,
    )
    return lambda: kernel.launch(arrays.gpu.loader, call)
