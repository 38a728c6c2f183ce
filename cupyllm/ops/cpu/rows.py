"""Rows one by one: embedding, RMSNorm and SiLU * up where they stand alone."""

from __future__ import annotations

from functools import cache
from typing import Any

from cupyllm.ops.cpu.compile import kernel
from cupyllm.ops.cpu.numerics import load_number
from cupyllm.ops.cpu.numerics import silu as silu_of
from cupyllm.ops.cpu.rms import inverse_root_mean_square


@kernel()
def embedding(team: Any, out: Any, token_ids: Any, table: Any) -> None:
    """out (T, C) = the rows token_ids of table (V, C), as float32."""
    C = table.shape[1]
    for t in range(len(token_ids)):
        for c in range(C):
            out[t, c] = load_number(table, token_ids[t] * C + c)


@kernel()
def silu_mul(team: Any, out: Any, gate_up: Any) -> None:
    """out (T, I) = SiLU(gate) * up from gate_up (T, 2 * I)."""
    T, I = out.shape  # noqa: E741
    for t in range(T):
        for i in range(I):
            out[t, i] = silu_of(gate_up[t, i]) * gate_up[t, I + i]


@cache
def rms_norm_kernel(lanes: int) -> Any:
    """Compile for rows whose length is a multiple of 2 * lanes."""
    LANES = lanes

    @kernel()
    def rms_norm(team: Any, out: Any, x: Any, weight: Any, eps: float) -> None:
        """out (N, C) = each row of x over its root mean square, times weight."""
        N, C = x.shape
        for n in range(N):
            scale = inverse_root_mean_square(x, n * C, C, eps, LANES)
            for c in range(C):
                out[n, c] = x[n, c] * scale * weight[c]

    return rms_norm
