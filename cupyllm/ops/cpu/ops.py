"""The ops as kernels compiled for this processor: weights and cache stay in their own type, arithmetic is float32."""

from __future__ import annotations

import numpy as np

from cupyllm.batch import Batch
from cupyllm.device import Array
from cupyllm.ops.cpu import rows as row_kernels
from cupyllm.ops.cpu import sampling as sampling_kernels
from cupyllm.ops.cpu.attention import paged_attention_kernel
from cupyllm.ops.cpu.dot_tile import LANES_INT8
from cupyllm.ops.cpu.int8 import Int8Matrix, embedding_int8, empty_int8, quantise_rows
from cupyllm.ops.cpu.isa import Isa
from cupyllm.ops.cpu.layer import Operand, layer_kernel
from cupyllm.ops.cpu.linear import linear_kernels
from cupyllm.ops.cpu.rope import rope_kernel
from cupyllm.ops.cpu.team import Team
from cupyllm.ops.reference import Norm, ReferenceOps
from cupyllm.sampling_batch import SampleResult, SamplingBatch, TopLogprobs
from cupyllm.weights import LayerWeights

_NO_VECTOR = np.empty(0, np.float32)
_NO_BF16, _NO_BYTES = np.empty(0, np.uint16), np.empty(0, np.uint8)
_NO_MATRIX = np.empty((0, 0), np.float32)
_BF16 = np.dtype(np.uint16)


def _bits(array: Array) -> Array:
    """The array as kernels take it: numba has no float16 on the CPU, so its bits pass as int16."""
    return array.view(np.int16) if array.dtype == np.float16 else array


class CpuOps(ReferenceOps):
    """The ops over NumPy arrays: weights and cache float32, float16, or uint16 meaning bf16; activations float32."""

    name = "cpu"

    def __init__(self, isa: Isa, threads: int) -> None:
        self.isa = isa
        self.threads = threads
        self._team = Team(threads)

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """rows.py"""
        out = np.empty((len(token_ids), table.shape[1]), np.float32)
        if isinstance(table, Int8Matrix):
            self._team.run(embedding_int8, out, token_ids, table.rows)
        else:
            self._team.run(row_kernels.embedding, out, token_ids, _bits(table))
        return out

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        """rows.py"""
        flat = np.ascontiguousarray(x).reshape(-1, x.shape[-1])
        out = np.empty_like(flat)
        self._team.run(row_kernels.rms_norm_kernel(self.isa.lanes_for(x.shape[-1])), out, flat, norm.weight, norm.eps)
        return out.reshape(x.shape)

    def linear(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        norm: Norm | None = None,
        residual: Array | None = None,
    ) -> Array:
        """linear.py"""
        y = np.empty((len(x), len(weight)), np.float32)
        w, packed_like, lanes, pairs = self._operand(weight)
        norm_weight, eps = norm or (_NO_VECTOR, 0.0)
        bias = w[0, :0] if bias is None else _bits(bias)  # none: an empty array, of the type that one would have
        residual = _NO_MATRIX if residual is None else residual
        self._team.run(linear_kernels(lanes, pairs).linear, y, x, w, bias, residual, norm_weight, eps, packed_like)
        return y

    def gate_up_silu_mul(self, x: Array, weight: Array, *, norm: Norm) -> Array:
        """linear.py"""
        y = np.empty((len(x), len(weight) // 2), np.float32)
        w, packed_like, lanes, pairs = self._operand(weight)
        kernel = linear_kernels(lanes, pairs).gate_up_silu_mul
        self._team.run(kernel, y, x, w, norm.weight, norm.eps, packed_like)
        return y

    def silu_mul(self, gate_up: Array) -> Array:
        """rows.py"""
        out = np.empty((len(gate_up), gate_up.shape[1] // 2), np.float32)
        self._team.run(row_kernels.silu_mul, out, gate_up)
        return out

    def rope_and_kv_write(
        self,
        qkv: Array,
        rope_table: Array,
        batch: Batch,
        keys: Array,
        values: Array,
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Array:
        """rope.py"""
        num_kv_heads, head_size = keys.shape[2:]
        num_heads = qkv.shape[1] // head_size - 2 * num_kv_heads
        q = np.empty((len(qkv), num_heads, head_size), np.float32)
        q_weight, eps = q_norm or (_NO_VECTOR, 0.0)
        k_weight, _ = k_norm or (_NO_VECTOR, 0.0)
        kernel = rope_kernel(self.isa.lanes_for(head_size))
        places = (batch.positions, batch.slots, _bits(keys), _bits(values))
        self._team.run(kernel, q, qkv, rope_table, *places, q_weight, k_weight, eps)
        return q

    def paged_attention(
        self, q: Array, keys: Array, values: Array, batch: Batch, *, window: int | None = None
    ) -> Array:
        """attention.py"""
        num_tokens, num_heads, head_size = q.shape
        out = np.empty((num_tokens, num_heads * head_size), np.float32)
        kernel = paged_attention_kernel(self.isa.lanes_for(head_size), head_size, bool(keys.dtype == _BF16))
        ragged = (batch.query_starts, batch.context_lens, batch.page_tables)
        self._team.run(kernel, out, q, _bits(keys), _bits(values), *ragged, window or 0)
        return out

    def logits(self, x: Array, head: Array, *, rows: Array, norm: Norm) -> Array:
        """linear.py, over the chosen rows"""
        return self.linear(x[rows], head, norm=norm)

    def sample(self, logits: Array, sampling: SamplingBatch) -> SampleResult:
        """sampling.py"""
        token_ids = sampling_kernels.choose(self._team, logits, sampling)
        tops = self.token_logprobs(logits, token_ids, sampling.num_logprobs, vocab_limit=sampling.vocab_limit)
        return SampleResult(token_ids=token_ids, **vars(tops))

    def token_logprobs(self, logits: Array, token_ids: Array, count: int, *, vocab_limit: int) -> TopLogprobs:
        """top_logprobs.py"""
        num_ids = min(logits.shape[1], vocab_limit)
        return sampling_kernels.token_logprobs(self._team, logits, token_ids, count, num_ids)

    def quantise(self, matrix: np.ndarray) -> Int8Matrix:
        """The matrix (N, K), in a type of weights, in one byte for each number and a scale for every 64."""
        quantised = empty_int8(*matrix.shape)
        quantise_rows(quantised.rows, _bits(matrix))
        return quantised

    def whole_layer(
        self,
        x: Array,
        w: LayerWeights,
        rope_table: Array,
        keys: Array,
        values: Array,
        batch: Batch,
        *,
        eps: float,
        window: int | None,
    ) -> Array:
        """layer.py"""
        qkv, o, gate_up, down = (self._operand(weight) for weight in (w.qkv, w.o, w.gate_up, w.down))
        head_size = keys.shape[3]
        lanes = (qkv.lanes, o.lanes, down.lanes, self.isa.lanes_for(head_size))
        kernel = layer_kernel(lanes, (qkv.pairs, o.pairs, down.pairs), head_size, bool(keys.dtype == _BF16))
        bias = qkv.w[0, :0] if w.qkv_bias is None else _bits(w.qkv_bias)
        q_norm, k_norm = (_NO_VECTOR if norm is None else norm for norm in (w.q_norm, w.k_norm))
        num_between = x.shape[1] + max(len(w.qkv) + 2 * w.o.shape[1], w.down.shape[1])  # of a token
        out, scratch = np.empty_like(x), np.empty(len(x) * num_between, np.float32)
        self._team.run(
            kernel, out, scratch, x, rope_table, _bits(keys), _bits(values),
            batch.positions, batch.slots, batch.query_starts, batch.context_lens, batch.page_tables, window or 0,
            eps, w.attention_norm, qkv.w, bias, q_norm, k_norm, o.w,
            w.mlp_norm, gate_up.w, down.w, qkv.packed_like, o.packed_like, down.packed_like,
        )  # fmt: skip
        return out

    def _operand(self, weight: Array) -> Operand:
        """The weights as the kernels take them."""
        if isinstance(weight, Int8Matrix):
            return Operand(weight.rows, _NO_BYTES, LANES_INT8, False)
        lanes = self.isa.lanes_for(weight.shape[1])
        if weight.dtype != _BF16:
            return Operand(_bits(weight), _NO_VECTOR, lanes, False)
        if self.isa.bf16_dot and lanes == self.isa.lanes:
            return Operand(weight, _NO_BF16, lanes, False)
        return Operand(weight, _NO_VECTOR, lanes, True)
