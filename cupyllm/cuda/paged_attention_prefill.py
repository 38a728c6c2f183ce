"""Launches paged_attention_prefill.cu: attention of prompt chunks."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.attention_arguments import HEAD_SIZES, AttentionCall
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS = tuple({"ELEMENT_BF16": bf16, "HEAD_SIZE": head_size} for bf16 in (0, 1) for head_size in HEAD_SIZES)
MAX_REGISTERS = 216
MARKERS = ("HMMA",)
BLOCK = 128
ROWS = 64  # rows of a block: a query with one of the heads that share a KV head


def geometry(S: int, H: int, KH: int, max_query_len: int, constants: dict[str, int]) -> Geometry:
    """A block for every 64 rows of every sequence's KV heads, as many as the longest chunk has."""
    return Geometry((-(-max_query_len * (H // KH) // ROWS), KH, S), (BLOCK,), constants=constants)


def least_bytes(
    S: int, H: int, KH: int, D: int, query_len: int, context_len: int, page_size: int = 16
) -> dict[str, int]:
    """The fewest bytes each array can cost when all chunks and contexts have these lengths."""
    return {
        "q": 4 * S * query_len * H * D,
        "keys": 2 * S * KH * D * context_len,
        "values": 2 * S * KH * D * context_len,
        "query_starts": 4 * (S + 1),
        "context_lens": 4 * S,
        "page_tables": 4 * S * -(-context_len // page_size),
        "out": 4 * S * query_len * H * D,
    }


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(S=1, H=28, KH=4, max_query_len=2048, constants=constants)


def launch(
    loader: KernelLoader, call: AttentionCall, query_starts: Array, *, max_query_len: int, out: Array | None = None
) -> Array:
    """Attention of every sequence's chunk, rows query_starts[s]:query_starts[s + 1]: (T, H, D) -> (T, H * D).

    The result goes into `out` if it is given; rows that belong to no chunk are left alone there. Raises DeviceError for
    what is not supported.
    """
    name = "paged_attention_prefill"
    constants = call.check(name)
    check_array(name, "query_starts", query_starts, np.int32, (call.S + 1,))
    out = call.output(name, loader, out)
    arrays = (call.q, call.keys, call.values, query_starts, call.context_lens, call.page_tables, out)
    loader.launch(name, geometry(call.S, call.H, call.KH, max_query_len, constants), (*arrays, *call.sizes()))
    return out
