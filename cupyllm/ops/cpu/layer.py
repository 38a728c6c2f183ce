"""A whole decoder layer as one kernel: the same parts as the single ops, called one after another.

Between two ops Python needs several microseconds, most of them waiting for memory, since the weights that went by have
put everything else out of the caches. A step of a small model has some 150 ops, so calling one kernel for each layer
instead of six makes it a few per cent faster. It computes what `decoder_layer` says (model.py), to the last bit.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cupyllm.ops.cpu.attention import attention_of, vectors_of
from cupyllm.ops.cpu.compile import kernel
from cupyllm.ops.cpu.linear import gate_up_of, linear_of
from cupyllm.ops.cpu.rope import rope_of


class Operand(NamedTuple):
    """Weights as the kernels take them. `lanes` and `pairs`: see linear.py."""

    w: np.ndarray
    packed_like: np.ndarray
    lanes: int
    pairs: bool


@cache
def layer_kernel(
    lanes: tuple[int, int, int, int], pairs: tuple[bool, bool, bool], head_size: int, bf16_cache: bool
) -> Any:
    """For the lanes of rows as long as the hidden size, the attention's output, the MLP's inside, and a head."""
    C_LANES, Q_LANES, I_LANES, LANES = lanes
    C_PAIRS, Q_PAIRS, I_PAIRS = (int(pair) for pair in pairs)
    D, KEY_PAIRS, VECTORS = head_size, int(bf16_cache), vectors_of(head_size, LANES)

    @kernel()
    def decoder_layer(
        team: Any, out: Any, scratch: Any, x: Any, table: Any, keys: Any, values: Any,
        positions: Any, slots: Any, query_starts: Any, context_lens: Any, page_tables: Any, window: int,
        eps: float, attention_norm: Any, qkv_w: Any, qkv_bias: Any, q_norm: Any, k_norm: Any, o_w: Any,
        mlp_norm: Any, gate_up_w: Any, down_w: Any, c_packed: Any, q_packed: Any, i_packed: Any,
    ) -> None:  # fmt: skip
        """out (T, C) from x (T, C): attention and MLP, each on a norm of the residual stream and added back to it.

        An empty array leaves out the bias, or the norms of q and k. scratch has room for what is between the ops, the
        MLP's where attention's was. c_packed and so on: the types in which activations of those widths are packed.
        """
        (T, C), N, I = x.shape, len(qkv_w), len(gate_up_w) // 2  # noqa: E741
        H, no_bias, no_norm = N // D - 2 * keys.shape[2], qkv_bias[:0], mlp_norm[:0]
        between, scratch = scratch[: T * C].reshape(T, C), scratch[T * C :]
        attention, hidden = scratch[: T * H * D].reshape(T, H * D), scratch[: T * I].reshape(T, I)
        q, scratch = scratch[T * H * D : 2 * T * H * D].reshape(T, H, D), scratch[2 * T * H * D :]
        qkv = scratch[: T * N].reshape(T, N)
        linear_of(team, qkv, x, qkv_w, qkv_bias, x[:0], attention_norm, eps, c_packed, C_PAIRS, C_LANES)
        rope_of(team, q, qkv, table, positions, slots, keys, values, q_norm, k_norm, eps, LANES)
        attention_of(
            team, attention, q, keys, values, query_starts, context_lens, page_tables, window,
            D, KEY_PAIRS, VECTORS, LANES,
        )  # fmt: skip
        linear_of(team, between, attention, o_w, no_bias, x, no_norm, eps, q_packed, Q_PAIRS, Q_LANES)
        gate_up_of(team, hidden, between, gate_up_w, mlp_norm, eps, c_packed, C_PAIRS, C_LANES)
        linear_of(team, out, hidden, down_w, no_bias, between, no_norm, eps, i_packed, I_PAIRS, I_LANES)

    return decoder_layer
