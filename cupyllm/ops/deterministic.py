"""Ops whose results do not depend on the batch: config key `deterministic`.

Rounding depends on the order of a sum. Fast kernels choose the order by the number of rows, so the same prompt can give
logits that differ in their last bits alone, in a batch, in chunks, or after a preemption. The ops here sum in one order
whatever runs beside a row, so that all of these give the same bits. The kernels of ops/cpu do so by themselves.
Source: He, "Defeating nondeterminism in LLM inference", Thinking Machines Lab, 2025.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cupyllm.batch import Batch
from cupyllm.cuda import paged_attention_prefill, skinny_gemm
from cupyllm.cuda.attention_arguments import AttentionCall
from cupyllm.cuda.linear_arguments import LinearCall
from cupyllm.device import Array
from cupyllm.ops.cuda import CudaOps
from cupyllm.ops.reference import Norm, ReferenceOps


class DeterministicReferenceOps(ReferenceOps):
    """NumPy, one row at a time: BLAS chooses its order by the number of rows."""

    def linear(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        norm: Norm | None = None,
        residual: Array | None = None,
    ) -> Array:
        """`ReferenceOps.linear` of each row."""
        rows = [
            super(DeterministicReferenceOps, self).linear(
                x[t : t + 1], weight, bias, norm=norm, residual=None if residual is None else residual[t : t + 1]
            )
            for t in range(len(x))
        ]
        return np.concatenate(rows) if rows else super().linear(x, weight, bias, norm=norm, residual=residual)

    def gate_up_silu_mul(self, x: Array, weight: Array, *, norm: Norm) -> Array:
        """`ReferenceOps.gate_up_silu_mul` of each row."""
        rows = [
            super(DeterministicReferenceOps, self).gate_up_silu_mul(x[t : t + 1], weight, norm=norm)
            for t in range(len(x))
        ]
        return np.concatenate(rows) if rows else super().gate_up_silu_mul(x, weight, norm=norm)

    def paged_attention(
        self, q: Array, keys: Array, values: Array, batch: Batch, *, window: int | None = None
    ) -> Array:
        """`ReferenceOps.paged_attention` of each token, over its own context."""
        lengths = np.diff(batch.query_starts)
        sequence_of = np.repeat(np.arange(len(lengths)), lengths)
        rows = []
        for t, s in enumerate(sequence_of):
            context = batch.positions[t : t + 1] + np.int32(1)
            alone = batch._replace(
                query_starts=np.array([0, 1], np.int32),
                context_lens=context,
                page_tables=batch.page_tables[s : s + 1],
                num_decodes=1,
                max_query_len=1,
                max_context_len=int(context[0]),
            )
            rows.append(super().paged_attention(q[t : t + 1], keys, values, alone, window=window))
        return np.concatenate(rows) if rows else super().paged_attention(q, keys, values, batch, window=window)


class DeterministicCudaOps(CudaOps):
    """The kernels whose order of a sum does not depend on the number of rows, for any number of them.

    Products go through skinny_gemm.cu in its widest form, 64 rows at a time. Attention goes through
    paged_attention_prefill.cu, which takes a query's keys from first to last, for decode rows too.
    """

    def _linear(self, call: LinearCall) -> Array:
        width = skinny_gemm.MAX_ROWS
        if call.tokens <= width:
            return skinny_gemm.launch(self.loader, call, tokens=width)
        out = self.loader.empty((call.tokens, call.outputs), np.float32)
        for t in range(0, call.tokens, width):
            residual = None if call.residual is None else call.residual[t : t + width]
            part = replace(call, x=call.x[t : t + width], residual=residual)
            out[t : t + width] = skinny_gemm.launch(self.loader, part, tokens=width)
        return out

    def paged_attention(
        self, q: Array, keys: Array, values: Array, batch: Batch, *, window: int | None = None
    ) -> Array:
        """paged_attention_prefill.cu"""
        call = AttentionCall(q, keys, values, batch.context_lens, batch.page_tables, batch.max_context_len, window)
        longest = max(batch.max_query_len, 1)
        return paged_attention_prefill.launch(self.loader, call, batch.query_starts, max_query_len=longest)
