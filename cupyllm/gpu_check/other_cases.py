"""Cases of all kernels but the linear layers: attention, what works on rows, and sampling."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cupyllm.cuda import (
    adjust_logits,
    advance_rows,
    argmax,
    copy_pages,
    count_tokens,
    draw,
    embedding,
    fill_tokens,
    group_maxima,
    paged_attention_decode,
    paged_attention_prefill,
    rms_norm,
    rope_and_kv_write,
    round_rows,
    silu_mul,
    top_logprobs,
    update_rows,
)
from cupyllm.cuda.attention_arguments import AttentionCall
from cupyllm.device import Array
from cupyllm.gpu_check.gpu import Launch
from cupyllm.gpu_check.kernels import KernelCase, Make
from cupyllm.gpu_check.measure import Arrays
from cupyllm.model_config import ModelConfig
from cupyllm.ops.reference import Norm
from cupyllm.row_sampling import count_width
from cupyllm.simulator.cost_model import pairs_up_to

PAGE_SIZE = 16
ROWS = 64  # of the kernels that work on rows, and of sampling
LOGPROBS = 5


def attention_cases(
    model: str, config: ModelConfig, *, decodes: tuple[tuple[int, int], ...], prefills: tuple[tuple[int, int], ...]
) -> Iterator[KernelCase]:
    """Decode attention of (sequences, context), and a prompt chunk of (queries, context)."""
    sizes = {"H": config.num_heads, "KH": config.num_kv_heads, "D": config.head_size}
    for S, context in decodes:
        least = paged_attention_decode.least_bytes(S=S, context_len=context, **sizes)
        shape = f"{model}.S{S}.context{context}"
        make = _decode_attention(S, context, config)
        yield KernelCase("paged_attention_decode", shape, sum(least.values()), make)
    for queries, context in prefills:
        least = paged_attention_prefill.least_bytes(S=1, query_len=queries, context_len=context, **sizes)
        operations = 4 * config.num_heads * config.head_size * (
            pairs_up_to(context, None) - pairs_up_to(context - queries, None)
        )  # fmt: skip
        shape = f"{model}.T{queries}.context{context}"
        make = _prefill_attention(queries, context, config)
        yield KernelCase("paged_attention_prefill", shape, sum(least.values()), make, operations)


def row_cases(model: str, config: ModelConfig) -> Iterator[KernelCase]:
    """Kernels that work on rows or pages one by one."""
    C, I = config.hidden_size, config.intermediate_size  # noqa: E741
    H, KH, D, V = config.num_heads, config.num_kv_heads, config.head_size, config.vocab_size
    pages = {"N": ROWS, "page_size": PAGE_SIZE, "KH": KH, "D": D}

    def case(kernel: str, least: dict[str, int], make: Make) -> KernelCase:
        return KernelCase(kernel, f"{model}.T{ROWS}", sum(least.values()), make)

    def advance(arrays: Arrays) -> Launch:
        sampled, tables = _indices(arrays, range(ROWS)), _indices(arrays, np.zeros((ROWS, 1)))
        page_size = 2**20  # the rows move on with every launch and must not come to the end of their pages
        moved = {name: _indices(arrays, [1] * ROWS) for name in ("token_ids", "positions", "slots", "context_lens")}
        table = arrays.elements.take(V, C)
        return lambda: advance_rows.launch(
            arrays.gpu.loader, sampled, tables, table, **moved, counts=None, page_size=page_size
        )

    def copy(arrays: Arrays) -> Launch:
        keys, values = (arrays.elements.take(2 * ROWS, PAGE_SIZE, KH, D) for _ in range(2))
        sources, copies = _indices(arrays, range(ROWS)), _indices(arrays, range(ROWS, 2 * ROWS))
        return lambda: copy_pages.launch(arrays.gpu.loader, keys, values, sources, copies)

    def embed(arrays: Arrays) -> Launch:
        ids = _indices(arrays, arrays.rng.integers(0, V, ROWS))
        table = arrays.elements.take(V, C)
        return lambda: embedding.launch(arrays.gpu.loader, ids, table)

    def fill(arrays: Arrays) -> Launch:
        token_ids, sampled = _indices(arrays, [-1] * ROWS), _indices(arrays, range(ROWS))
        return lambda: fill_tokens.launch(arrays.gpu.loader, token_ids, sampled, sampled)

    def norm(arrays: Arrays) -> Launch:
        x, weight = arrays.floats.take(ROWS, C), Norm(arrays.floats.take(C), 1e-6)
        return lambda: rms_norm.launch(arrays.gpu.loader, x, weight)

    def silu(arrays: Arrays) -> Launch:
        gate_up = arrays.floats.take(ROWS, 2 * I)
        return lambda: silu_mul.launch(arrays.gpu.loader, gate_up)

    def rounded(arrays: Arrays) -> Launch:
        x, weight = arrays.floats.take(ROWS, C), Norm(arrays.floats.take(C), 1e-6)
        return lambda: round_rows.launch(arrays.gpu.loader, x, weight, bf16=0)

    def update(arrays: Arrays) -> Launch:
        words, places = _indices(arrays, range(ROWS)), _indices(arrays, range(ROWS))
        return lambda: update_rows.launch(arrays.gpu.loader, words, places, places)

    yield case("advance_rows", advance_rows.least_bytes(ROWS, C), advance)
    yield case("copy_pages", copy_pages.least_bytes(**pages), copy)
    yield case("embedding", embedding.least_bytes(ROWS, C), embed)
    yield case("fill_tokens", fill_tokens.least_bytes(ROWS), fill)
    yield case("rms_norm", rms_norm.least_bytes(ROWS, C), norm)
    rope = rope_and_kv_write.least_bytes(ROWS, H, KH, D, norm=int(config.qk_norm))
    yield case("rope_and_kv_write", rope, _rope(config))
    yield case("round_rows", round_rows.least_bytes(ROWS, C, norm=1), rounded)
    yield case("silu_mul", silu_mul.least_bytes(ROWS, I), silu)
    yield case("update_rows", update_rows.least_bytes(ROWS), update)


def sampling_cases(model: str, config: ModelConfig) -> Iterator[KernelCase]:
    """The sampling kernels over the whole vocabulary, each with what the kernels before it found."""
    R, N = ROWS, config.vocab_size

    def case(kernel: str, least: dict[str, int], launches: str) -> KernelCase:
        return KernelCase(
            kernel, f"{model}.R{R}", sum(least.values()), lambda arrays: _sampling(arrays, R, N)[launches]
        )

    yield case("adjust_logits", adjust_logits.least_bytes(R, N, 0, masked=R), "adjust_logits")
    yield case("argmax", argmax.least_bytes(R, N), "argmax")
    joined = count_tokens.least_bytes(J=1, N=N, M=1000, cleared=1)
    yield KernelCase("count_tokens", f"{model}.J1", sum(joined.values()), _counting(N))
    yield case("draw", draw.least_bytes(R, N), "draw")
    yield case("group_maxima", group_maxima.least_bytes(R, N), "group_maxima")
    yield case("top_logprobs", top_logprobs.least_bytes(R, N, LOGPROBS), "top_logprobs")


def _decode_attention(S: int, context: int, config: ModelConfig) -> Make:
    def make(arrays: Arrays) -> Launch:
        call = _attention_call(arrays, S, S, context, config)
        tickets = paged_attention_decode.make_tickets(arrays.gpu.loader, S, config.num_kv_heads)
        return lambda: paged_attention_decode.launch(arrays.gpu.loader, call, tickets)

    return make


def _prefill_attention(queries: int, context: int, config: ModelConfig) -> Make:
    def make(arrays: Arrays) -> Launch:
        call, starts = _attention_call(arrays, 1, queries, context, config), _indices(arrays, (0, queries))
        return lambda: paged_attention_prefill.launch(arrays.gpu.loader, call, starts, max_query_len=queries)

    return make


def _attention_call(arrays: Arrays, S: int, T: int, context: int, config: ModelConfig) -> AttentionCall:
    """S sequences of one length in shuffled pages."""
    pages = -(-context // PAGE_SIZE)
    shape = (S * pages, PAGE_SIZE, config.num_kv_heads, config.head_size)
    tables = arrays.rng.permutation(S * pages).reshape(S, pages)
    return AttentionCall(
        q=arrays.floats.take(T, config.num_heads, config.head_size),
        keys=arrays.elements.take(*shape),
        values=arrays.elements.take(*shape),
        context_lens=_indices(arrays, [context] * S),
        page_tables=_indices(arrays, tables),
        max_context_len=context,
    )


def _rope(config: ModelConfig) -> Make:
    H, KH, D = config.num_heads, config.num_kv_heads, config.head_size

    def make(arrays: Arrays) -> Launch:
        qkv, table = arrays.floats.take(ROWS, (H + 2 * KH) * D), arrays.floats.take(ROWS, D)
        keys, values = (arrays.elements.take(ROWS, PAGE_SIZE, KH, D) for _ in range(2))
        where = _indices(arrays, range(ROWS)), _indices(arrays, np.arange(ROWS) * PAGE_SIZE)
        q_norm, k_norm = (Norm(arrays.floats.take(D), 1e-6) if config.qk_norm else None for _ in range(2))
        return lambda: rope_and_kv_write.launch(
            arrays.gpu.loader, qkv, table, *where, keys, values, q_norm=q_norm, k_norm=k_norm
        )

    return make


def _sampling(arrays: Arrays, R: int, N: int) -> dict[str, Launch]:
    """A launch of every sampling kernel on the same logits, with temperature 0.8, top-k 20 and top-p 0.8."""
    loader, logits, upload = arrays.gpu.loader, arrays.floats.take(R, N), arrays.gpu.device.upload
    temperature, top_p, min_p = (upload(np.full(R, value, np.float32)) for value in (0.8, 0.8, 0.0))
    top_k, seeds = upload(np.full(R, 20, np.int32)), upload(np.arange(R, dtype=np.uint64))
    positions = _indices(arrays, range(R))
    index, plain_index = group_maxima.launch(loader, logits, N, temperature), group_maxima.launch(loader, logits, N)
    filters = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return {
        "adjust_logits": _adjusting(arrays, logits),
        "argmax": lambda: argmax.launch(loader, logits, N),
        "draw": lambda: draw.launch(loader, logits, N, index, **filters, seeds=seeds, positions=positions),
        "group_maxima": lambda: group_maxima.launch(loader, logits, N, temperature),
        "top_logprobs": lambda: top_logprobs.launch(loader, logits, N, plain_index, positions, LOGPROBS),
    }


def _counting(N: int) -> Make:
    """A row that joins with 1000 tokens."""

    def make(arrays: Arrays) -> Launch:
        counts = arrays.floats.take(1, count_width(N)).view(np.uint32)
        jobs, tokens = _indices(arrays, [(0, 1, 0, 500, 1000)]), _indices(arrays, arrays.rng.integers(0, N, 1000))
        return lambda: count_tokens.launch(arrays.gpu.loader, counts, jobs, tokens, vocab_limit=N)

    return make


def _adjusting(arrays: Arrays, logits: Array) -> Launch:
    """Every row under a mask of its own, as with a grammar for each."""
    (R, N), upload = logits.shape, arrays.gpu.device.upload
    starts, no_ids = _indices(arrays, [0] * (R + 1)), _indices(arrays, [])
    changes = {
        "repetition_penalty": upload(np.ones(R, np.float32)),
        "penalty_starts": starts,
        "penalty_ids": no_ids,
        "offset_starts": starts,
        "offset_ids": no_ids,
        "offsets": upload(np.zeros(0, np.float32)),
        "mask_rows": _indices(arrays, range(R)),
        "masks": upload(np.full((R, adjust_logits.mask_words(N)), 2**32 - 1, np.uint32)),
    }
    return lambda: adjust_logits.launch(arrays.gpu.loader, logits, N, **changes)


def _indices(arrays: Arrays, values: object) -> Array:
    """Whole numbers as int32 on the GPU."""
    return arrays.gpu.device.upload(np.ascontiguousarray(values, np.int32))
