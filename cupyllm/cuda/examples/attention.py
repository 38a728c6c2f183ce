"""Examples of the attention kernels: sequences in shuffled pages of a cache, with NaN wherever nothing may be read."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cupyllm.batch import Batch
from cupyllm.cuda import paged_attention_decode, paged_attention_prefill
from cupyllm.cuda.attention_arguments import AttentionCall
from cupyllm.cuda.examples.case import EPSILON, ExampleRun, Output, Place, random_floats, to_elements, to_floats
from cupyllm.cuda.loader import KernelLoader
from cupyllm.ops.reference import ReferenceOps


def paged_attention_decode_example(
    loader: KernelLoader,
    place: Place,
    *,
    context_lens: tuple[int, ...] = (600, 600),
    H: int = 4,
    KH: int = 2,
    D: int = 64,
    dtype: str = "bfloat16",
    window: int | None = None,
) -> ExampleRun:
    """One query for each sequence; the longer contexts are split over several blocks."""
    call = _call(context_lens, (1,) * len(context_lens), H, KH, D, dtype, window)
    tickets = paged_attention_decode.make_tickets(loader, call.S, KH)
    out = place.download(paged_attention_decode.launch(loader, _upload(call, place), tickets))
    # Up to 8 heads for each KV head, operands are cut into a high and a low element.
    tolerance = 1e-4 if 8 * KH >= H else EPSILON[dtype]
    left = Output("tickets", place.download(tickets), np.zeros((call.S, KH), np.uint32), 0.0)
    sizes = {"S": call.S, "H": H, "KH": KH, "D": D, "context_len": max(context_lens)}
    least = paged_attention_decode.least_bytes(**sizes)
    return ExampleRun("paged_attention", sizes, least, (_output(call, (1,) * call.S, out, tolerance), left))


def paged_attention_prefill_example(
    loader: KernelLoader,
    place: Place,
    *,
    query_lens: tuple[int, ...] = (40, 7),
    context_lens: tuple[int, ...] = (40, 50),
    H: int = 4,
    KH: int = 2,
    D: int = 64,
    dtype: str = "bfloat16",
    window: int | None = None,
) -> ExampleRun:
    """A chunk of queries for each sequence, its last tokens; what stands before them is in the cache already."""
    call = _call(context_lens, query_lens, H, KH, D, dtype, window)
    starts = place.upload(np.cumsum([0, *query_lens]).astype(np.int32))
    longest = max(query_lens)
    out = paged_attention_prefill.launch(loader, _upload(call, place), starts, max_query_len=longest)
    output = _output(call, query_lens, place.download(out), 2 * EPSILON[dtype])
    sizes = {"S": call.S, "H": H, "KH": KH, "D": D, "query_len": longest, "context_len": max(context_lens)}
    return ExampleRun("paged_attention", sizes, paged_attention_prefill.least_bytes(**sizes), (output,))


def _call(
    context_lens: tuple[int, ...],
    query_lens: tuple[int, ...],
    H: int,
    KH: int,
    D: int,
    dtype: str,
    window: int | None,
    page_size: int = 16,
) -> AttentionCall:
    """Random queries, keys and values on the host; the queries are the sequences' last tokens."""
    rng = np.random.default_rng(0)
    used = [-(-length // page_size) for length in context_lens]
    num_pages = sum(used) + 2
    shuffled = rng.permutation(num_pages).astype(np.int32)
    tables = np.full((len(used), max(used) + 1), -1, np.int32)
    keys, values = (np.full((num_pages, page_size, KH, D), np.nan, np.float32) for _ in range(2))
    for s, (length, pages) in enumerate(zip(context_lens, used, strict=True)):
        tables[s, :pages], shuffled = shuffled[:pages], shuffled[pages:]
        slots = (tables[s, :pages, None] * page_size + np.arange(page_size)).reshape(-1)[:length]
        keys.reshape(-1, KH, D)[slots] = rng.standard_normal((length, KH, D))
        values.reshape(-1, KH, D)[slots] = rng.standard_normal((length, KH, D))
    return AttentionCall(
        q=random_floats(rng, sum(query_lens), H, D, scale=2.0),
        keys=to_elements(keys, dtype),
        values=to_elements(values, dtype),
        context_lens=np.array(context_lens, np.int32),
        page_tables=tables,
        max_context_len=max(context_lens),
        window=window,
    )


def _upload(call: AttentionCall, place: Place) -> AttentionCall:
    """The same call with its arrays uploaded."""
    return replace(
        call,
        q=place.upload(call.q),
        keys=place.upload(call.keys),
        values=place.upload(call.values),
        context_lens=place.upload(call.context_lens),
        page_tables=place.upload(call.page_tables),
    )


def _output(call: AttentionCall, query_lens: tuple[int, ...], out: np.ndarray, tolerance: float) -> Output:
    """The kernel's result beside the reference op's, each head a row."""
    nothing = np.zeros(0, np.int32)
    starts = np.cumsum([0, *query_lens]).astype(np.int32)
    batch = Batch(nothing, nothing, nothing, starts, call.context_lens, call.page_tables, nothing, 0, 0, 0)
    keys, values = to_floats(call.keys), to_floats(call.values)
    expected = ReferenceOps().paged_attention(call.q, keys, values, batch, window=call.window)
    return Output("out", out.reshape(call.q.shape), expected.reshape(call.q.shape), tolerance)
