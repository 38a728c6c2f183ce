"""One small launch of every kernel beside the answer of its twin in ReferenceOps.

`python -m cupyllm kernels run NAME` shows one under the emulator, and tests/cuda/test_planted_faults.py holds broken
versions of the kernels against them. An example takes a loader and the place where its arrays live, such as a device,
so the same examples run on a GPU. Keyword arguments, which differ from example to example, choose other sizes and
variants.
"""

from __future__ import annotations

from collections.abc import Mapping

from .attention import paged_attention_decode_example, paged_attention_prefill_example
from .case import Example, ExampleRun, GuardedHost, Output
from .linear import gemv_example, round_rows_example, skinny_gemm_example, tile_gemm_example
from .rows import (
    advance_rows_example,
    copy_pages_example,
    count_tokens_example,
    embedding_example,
    fill_tokens_example,
    rms_norm_example,
    rope_and_kv_write_example,
    silu_mul_example,
    update_rows_example,
)
from .sampling import (
    adjust_logits_example,
    argmax_example,
    draw_example,
    group_maxima_example,
    top_logprobs_example,
)

__all__ = ["EXAMPLES", "Example", "ExampleRun", "GuardedHost", "Output"]

EXAMPLES: Mapping[str, Example] = {
    "adjust_logits": adjust_logits_example,
    "advance_rows": advance_rows_example,
    "argmax": argmax_example,
    "copy_pages": copy_pages_example,
    "count_tokens": count_tokens_example,
    "draw": draw_example,
    "embedding": embedding_example,
    "fill_tokens": fill_tokens_example,
    "gemv": gemv_example,
    "group_maxima": group_maxima_example,
    "paged_attention_decode": paged_attention_decode_example,
    "paged_attention_prefill": paged_attention_prefill_example,
    "rms_norm": rms_norm_example,
    "rope_and_kv_write": rope_and_kv_write_example,
    "round_rows": round_rows_example,
    "silu_mul": silu_mul_example,
    "skinny_gemm": skinny_gemm_example,
    "tile_gemm": tile_gemm_example,
    "top_logprobs": top_logprobs_example,
    "update_rows": update_rows_example,
}
