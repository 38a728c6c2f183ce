"""The ops as CUDA kernels: each method chooses a kernel of cupyllm/cuda/ by the number of rows and launches it.

The same class serves a GPU and the emulator; the loader decides which. An op is supported or raises DeviceError naming
what is not; nothing falls back to NumPy. Activations are float32, weights and cache fp16 or bf16 (cuda/README.md).
"""

from __future__ import annotations

import numpy as np

from cupyllm.batch import Batch
from cupyllm.cuda import (
    advance_rows,
    copy_pages,
    count_tokens,
    embedding,
    fill_tokens,
    gemv,
    paged_attention_decode,
    paged_attention_prefill,
    rms_norm,
    rope_and_kv_write,
    sample,
    silu_mul,
    skinny_gemm,
    tile_gemm,
    update_rows,
)
from cupyllm.cuda.attention_arguments import HEAD_SIZES, MOST_HEADS_PER_KV_HEAD, PAGE_SIZES, AttentionCall
from cupyllm.cuda.linear_arguments import LinearCall
from cupyllm.cuda.loader import KernelLoader
from cupyllm.device import Array, Device
from cupyllm.errors import DeviceError
from cupyllm.model_config import ModelConfig
from cupyllm.ops.reference import Norm, ReferenceOps
from cupyllm.row_sampling import RowSampling
from cupyllm.sampling_batch import SampleResult, SamplingBatch, TopLogprobs


def check_model(config: ModelConfig, page_size: int) -> None:
    """Raise DeviceError naming the size of a model or a cache for which there is no kernel, and what there is."""
    ratio = config.num_heads // config.num_kv_heads
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_heads * config.head_size,
    }
    wrong = [f"{name} {width} (multiples of 8)" for name, width in widths.items() if width % 8]
    if config.head_size not in HEAD_SIZES:
        wrong.append(f"head size {config.head_size} ({' and '.join(map(str, HEAD_SIZES))})")
    if page_size not in PAGE_SIZES:
        wrong.append(f"page_size {page_size} ({' and '.join(map(str, PAGE_SIZES))})")
    if ratio > MOST_HEADS_PER_KV_HEAD:
        wrong.append(f"{ratio} query heads for each KV head (up to {MOST_HEADS_PER_KV_HEAD})")
    if wrong:
        raise DeviceError(f"the CUDA kernels do not support {', '.join(wrong)}; in brackets is what they do support")


class CudaOps(ReferenceOps):
    """The ops over the arrays of `device`, as kernels of `loader`."""

    name = "cuda"

    def __init__(self, loader: KernelLoader, device: Device) -> None:
        self.loader = loader
        self._device = device

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """embedding.cu"""
        return embedding.launch(self.loader, token_ids, table)

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        """rms_norm.cu"""
        return rms_norm.launch(self.loader, x, norm)

    def linear(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        norm: Norm | None = None,
        residual: Array | None = None,
    ) -> Array:
        """gemv.cu for one row, skinny_gemm.cu for up to 64, tile_gemm.cu for more"""
        return self._linear(LinearCall(x, weight, bias=bias, norm=norm, residual=residual))

    def gate_up_silu_mul(self, x: Array, weight: Array, *, norm: Norm) -> Array:
        """The kernels of `linear`, with SiLU(gate) * up at their end"""
        return self._linear(LinearCall(x, weight, norm=norm, gate_up=True))

    def silu_mul(self, gate_up: Array) -> Array:
        """silu_mul.cu"""
        return silu_mul.launch(self.loader, gate_up)

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
        """rope_and_kv_write.cu"""
        arrays = (qkv, rope_table, batch.positions, batch.slots, keys, values)
        return rope_and_kv_write.launch(self.loader, *arrays, q_norm=q_norm, k_norm=k_norm)

    def paged_attention(
        self, q: Array, keys: Array, values: Array, batch: Batch, *, window: int | None = None
    ) -> Array:
        """paged_attention_decode.cu for the decode rows, paged_attention_prefill.cu for the chunks behind them"""
        count, num_sequences = batch.num_decodes, len(batch.context_lens)
        out = self.loader.empty((q.shape[0], q.shape[1] * q.shape[2]), np.float32)

        def call(first: int, last: int, queries: Array) -> AttentionCall:
            lens, tables = batch.context_lens[first:last], batch.page_tables[first:last]
            return AttentionCall(queries, keys, values, lens, tables, batch.max_context_len, window)

        if count:
            tickets = paged_attention_decode.make_tickets(self.loader, count, keys.shape[2])
            paged_attention_decode.launch(self.loader, call(0, count, q[:count]), tickets, out=out[:count])
        if num_sequences > count:
            chunks, starts = call(count, num_sequences, q), batch.query_starts[count:]
            paged_attention_prefill.launch(self.loader, chunks, starts, max_query_len=batch.max_query_len, out=out)
        return out

    def copy_pages(self, keys: Array, values: Array, sources: Array, copies: Array) -> None:
        """copy_pages.cu"""
        copy_pages.launch(self.loader, keys, values, sources, copies)

    def logits(self, x: Array, head: Array, *, rows: Array, norm: Norm) -> Array:
        """embedding.cu to pick the rows, then the kernels of `linear`"""
        if len(rows) == 0:
            return self.loader.empty((0, head.shape[0]), np.float32)
        return self.linear(embedding.launch(self.loader, rows, x), head, norm=norm)

    def fill_tokens(self, token_ids: Array, sampled: Array, rows: Array) -> Array:
        """fill_tokens.cu"""
        return fill_tokens.launch(self.loader, token_ids, sampled, rows)

    def advance_rows(
        self, batch: Batch, sampled: Array, table: Array, *, counts: Array | None, page_size: int
    ) -> Array:
        """advance_rows.cu"""
        moved = {"token_ids": batch.token_ids, "positions": batch.positions, "slots": batch.slots}
        arrays = {**moved, "context_lens": batch.context_lens, "counts": counts}
        return advance_rows.launch(self.loader, sampled, batch.page_tables, table, **arrays, page_size=page_size)

    def update_rows(self, words: Array, places: Array, values: Array) -> None:
        """update_rows.cu"""
        update_rows.launch(self.loader, words, places, values)

    def count_tokens(self, counts: Array, jobs: Array, tokens: Array, *, vocab_limit: int) -> None:
        """count_tokens.cu"""
        count_tokens.launch(self.loader, counts, jobs, tokens, vocab_limit=vocab_limit)

    def sample_rows(self, logits: Array, rows: RowSampling, *, all_plain: bool, out: Array) -> None:
        """argmax.cu, or group_maxima.cu and draw.cu (cuda/sample.py)"""
        sample.choose_of_rows(self.loader, logits, rows, all_plain=all_plain, out=out)

    def sample(self, logits: Array, sampling: SamplingBatch) -> SampleResult:
        """The sampling kernels (cuda/sample.py); the result stays on the device"""
        return sample.sample(self.loader, logits, sample.upload_sampling(sampling, self._device.upload))

    def token_logprobs(self, logits: Array, token_ids: Array, count: int, *, vocab_limit: int) -> TopLogprobs:
        """group_maxima.cu and top_logprobs.cu; the result stays on the device"""
        return sample.token_logprobs(self.loader, logits, token_ids, count, vocab_limit=vocab_limit)

    def _linear(self, call: LinearCall) -> Array:
        if call.tokens == 1:
            return gemv.launch(self.loader, call)
        if call.tokens <= skinny_gemm.MAX_ROWS:
            return skinny_gemm.launch(self.loader, call)
        return tile_gemm.launch(self.loader, call)
