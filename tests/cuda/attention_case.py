"""Sequences in a paged cache for the attention kernels: shuffled pages, and poison wherever nothing may be read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from kernel_case import elements, random_floats, widen

from cupyllm.batch import Batch
from cupyllm.cuda.attention_arguments import AttentionCall
from cupyllm.cuda.emulator import guarded_copy
from cupyllm.ops.reference import ReferenceOps


@dataclass
class AttentionCase:
    """A call of the op, in the form that the kernels take and in the form that the reference op takes."""

    call: AttentionCall
    batch: Batch

    def expected(self) -> np.ndarray:
        """What the reference op makes of the same elements, in float32."""
        call = self.call
        keys, values = widen(call.keys), widen(call.values)
        return ReferenceOps().paged_attention(call.q, keys, values, self.batch, window=call.window)

    def with_window(self, window: int) -> AttentionCase:
        return replace(self, call=replace(self.call, window=window))


def make_case(
    context_lens: list[int],
    query_lens: list[int] | None = None,
    *,
    H: int = 4,
    KH: int = 2,
    D: int = 64,
    page_size: int = 16,
    dtype: str = "fp16",
    scale: float = 1.0,
) -> AttentionCase:
    """Random queries, keys and values. query_lens: None is one query a sequence, its last token.

    Unused slots and pages hold NaN, unused entries of a page table -1.
    """
    rng = np.random.default_rng(sum(context_lens) + H)
    query_lens = query_lens or [1] * len(context_lens)
    used = [-(-length // page_size) for length in context_lens]
    num_pages = sum(used) + 3
    free = rng.permutation(num_pages)
    page_tables = np.full((len(used), max(used) + 2), -1, np.int32)
    keys, values = (np.full((num_pages, page_size, KH, D), np.nan, np.float32) for _ in range(2))
    for s, (length, count) in enumerate(zip(context_lens, used, strict=True)):
        page_tables[s, :count], free = free[:count], free[count:]
        slots = (page_tables[s, :count, None] * page_size + np.arange(page_size)).reshape(-1)[:length]
        for cache in (keys, values):
            cache.reshape(-1, KH, D)[slots] = rng.standard_normal((length, KH, D))
    nothing = np.zeros(0, np.int32)
    batch = Batch(
        token_ids=nothing,
        positions=nothing,
        slots=nothing,
        query_starts=guarded_copy(np.cumsum([0, *query_lens]).astype(np.int32)),
        context_lens=guarded_copy(np.array(context_lens, np.int32)),
        page_tables=guarded_copy(page_tables),
        logit_rows=nothing,
        num_decodes=0,
        max_query_len=max(query_lens),
        max_context_len=max(context_lens),
    )
    q = random_floats(rng, sum(query_lens), H, D, scale=scale)
    call = AttentionCall(
        q, elements(keys, dtype), elements(values, dtype), batch.context_lens, batch.page_tables, max(context_lens)
    )
    return AttentionCase(call, batch)
