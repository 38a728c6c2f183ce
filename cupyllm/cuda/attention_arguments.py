"""What paged_attention_decode and paged_attention_prefill are called with, and what they check of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cupyllm.cuda.arguments import check_array, element_bf16
from cupyllm.cuda.loader import KernelLoader
from cupyllm.device import Array
from cupyllm.errors import DeviceError

HEAD_SIZES = (64, 128)
PAGE_SIZES = (16, 32)
MOST_HEADS_PER_KV_HEAD = 16


@dataclass(frozen=True)
class AttentionCall:
    """Attention of some sequences' newest tokens over their pages.

    q is (T, H, D) float32, keys and values (P, page_size, KH, D); context_lens (S,) and page_tables (S, max_pages) are
    int32. `window` is the number of tokens a query sees, itself included; None: all before it.
    """

    q: Array
    keys: Array
    values: Array
    context_lens: Array
    page_tables: Array
    max_context_len: int
    window: int | None = None

    @property
    def T(self) -> int:  # noqa: N802
        return int(self.q.shape[0])

    @property
    def S(self) -> int:  # noqa: N802
        return int(self.context_lens.shape[0])

    @property
    def H(self) -> int:  # noqa: N802
        return int(self.q.shape[1])

    @property
    def KH(self) -> int:  # noqa: N802
        return int(self.keys.shape[2])

    @property
    def D(self) -> int:  # noqa: N802
        return int(self.keys.shape[3])

    def check(self, kernel: str) -> dict[str, int]:
        """The constants of the call. Raises DeviceError naming the array or size that `kernel` does not support."""
        bf16 = element_bf16(kernel, "keys", self.keys)
        check_array(kernel, "keys", self.keys, self.keys.dtype, (None, None, None, None))
        check_array(kernel, "values", self.values, self.keys.dtype, self.keys.shape)
        if self.D not in HEAD_SIZES:
            raise DeviceError(f"{kernel}: the head size is {self.D}; supported are 64 and 128")
        if self.keys.shape[1] not in PAGE_SIZES:
            raise DeviceError(f"{kernel}: page_size is {self.keys.shape[1]}; supported are 16 and 32")
        check_array(kernel, "q", self.q, np.float32, (None, None, self.D))
        if self.H % self.KH or self.H // self.KH > MOST_HEADS_PER_KV_HEAD:
            raise DeviceError(
                f"{kernel}: {self.H} query heads share {self.KH} KV heads; supported are up to "
                f"{MOST_HEADS_PER_KV_HEAD} query heads for each, the same number for all"
            )
        check_array(kernel, "context_lens", self.context_lens, np.int32, (None,))
        check_array(kernel, "page_tables", self.page_tables, np.int32, (self.S, None))
        if self.window is not None and self.window < 1:
            raise DeviceError(f"{kernel}: window is {self.window}; supported are 1 and more, and None")
        return {"ELEMENT_BF16": bf16, "HEAD_SIZE": self.D}

    def output(self, kernel: str, loader: KernelLoader, out: Array | None) -> Array:
        """Where the result goes: `out` if it is (T, H * D) float32, a new array if it is None."""
        if out is None:
            return loader.empty((self.T, self.H * self.D), np.float32)
        check_array(kernel, "out", out, np.float32, (self.T, self.H * self.D))
        return out

    def sizes(self) -> tuple[np.generic, ...]:
        """The scalars that both kernels take: H, KH, page_size, max_pages, window (0: none), scale of the scores."""
        # 2^x is faster than e^x on a GPU: scores are multiplied by log2(e) beforehand.
        score_scale = math.log2(math.e) / math.sqrt(self.D)
        numbers = (self.H, self.KH, self.keys.shape[1], self.page_tables.shape[1], self.window or 0)
        return (*(np.int32(number) for number in numbers), np.float32(score_scale))
