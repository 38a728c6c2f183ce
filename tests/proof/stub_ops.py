"""Ops that cost next to nothing: an engine over them runs thousands of steps a second."""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.ops.reference import ReferenceOps

VOCAB = 16


class StubOps(ReferenceOps):
    """Touches neither weights nor cache. A row's logits are made from its token and its position alone."""

    name = "stub"

    def __init__(self) -> None:
        self._logits = np.random.default_rng(0).standard_normal((256, VOCAB)).astype(np.float32)
        self._logits[:, -2:] -= 3  # end tokens are rare

    def linear(self, x: Any, weight: Any, bias: Any = None, *, norm: Any = None, residual: Any = None) -> Any:
        return x

    def gate_up_silu_mul(self, x: Any, weight: Any, *, norm: Any) -> Any:
        return x

    def embedding(self, token_ids: Any, table: Any) -> Any:
        return table[token_ids]

    def rope_and_kv_write(self, qkv: Any, rope_table: Any, batch: Any, *arrays: Any, **norms: Any) -> Any:
        return batch.token_ids * 31 + batch.positions * 7  # (T,)

    def paged_attention(self, q: Any, keys: Any, values: Any, batch: Any, *, window: int | None = None) -> Any:
        return q

    def copy_pages(self, keys: Any, values: Any, sources: Any, copies: Any) -> None:
        pass

    def logits(self, x: Any, head: Any, *, rows: Any, norm: Any) -> Any:
        return self._logits[x[rows] % 256]
