"""Examples of the kernels that work on rows or pages one by one."""

from __future__ import annotations

import numpy as np

from cupyllm.batch import Batch
from cupyllm.cuda import (
    advance_rows,
    copy_pages,
    count_tokens,
    embedding,
    fill_tokens,
    rms_norm,
    rope_and_kv_write,
    silu_mul,
    update_rows,
)
from cupyllm.cuda.examples.case import EPSILON, ExampleRun, Output, Place, random_floats, to_elements, to_floats
from cupyllm.cuda.loader import KernelLoader
from cupyllm.ops.reference import Norm, ReferenceOps
from cupyllm.rope import RopeConfig, cos_sin_table
from cupyllm.row_sampling import count_width

_REFERENCE = ReferenceOps()


def silu_mul_example(loader: KernelLoader, place: Place, *, T: int = 3, I: int = 512) -> ExampleRun:  # noqa: E741
    """SiLU(gate) * up of T rows."""
    gate_up = random_floats(np.random.default_rng(0), T, 2 * I, scale=4.0)
    hidden = place.download(silu_mul.launch(loader, place.upload(gate_up)))
    output = Output("hidden", hidden, _REFERENCE.silu_mul(gate_up), 8 * EPSILON["float32"])
    return ExampleRun("silu_mul", {"T": T, "I": I}, silu_mul.least_bytes(T, I), (output,))


def rms_norm_example(
    loader: KernelLoader, place: Place, *, T: int = 3, C: int = 1024, scale: float = 1.0
) -> ExampleRun:
    """RMSNorm of T rows of size `scale`."""
    rng = np.random.default_rng(0)
    x, weight = random_floats(rng, T, C, scale=scale), random_floats(rng, C)
    y = place.download(rms_norm.launch(loader, place.upload(x), Norm(place.upload(weight), 1e-6)))
    output = Output("y", y, _REFERENCE.rms_norm(x, Norm(weight, 1e-6)), 16 * EPSILON["float32"])
    return ExampleRun("rms_norm", {"T": T, "C": C}, rms_norm.least_bytes(T, C), (output,))


def embedding_example(
    loader: KernelLoader,
    place: Place,
    *,
    C: int = 1024,
    dtype: str = "bfloat16",
    row_ids: tuple[int, ...] = (6, 0, 3, 3),
) -> ExampleRun:
    """Rows of a table with 7 of them; an id outside gives a row of NaN."""
    table = random_floats(np.random.default_rng(0), 7, C)
    if dtype != "float32":
        table = to_elements(table, dtype)
    ids = np.array(row_ids, np.int32)
    x = place.download(embedding.launch(loader, place.upload(ids), place.upload(table)))
    expected = np.full((len(ids), C), np.nan, np.float32)
    inside = (ids >= 0) & (ids < len(table))
    expected[inside] = to_floats(table)[ids[inside]]
    sizes = {"T": len(ids), "V": len(table), "C": C}
    least = embedding.least_bytes(len(ids), C, table_float32=int(dtype == "float32"))
    return ExampleRun("embedding", sizes, least, (Output("x", x, expected, 0.0),))


def fill_tokens_example(loader: KernelLoader, place: Place, *, T: int = 300) -> ExampleRun:
    """Every third token is known, the others are taken from five sampled ones, of which one failed."""
    t = np.arange(T, dtype=np.int32)
    rows = np.where(t % 3 == 0, np.int32(-1), t % 5)
    token_ids, sampled = np.where(rows < 0, 1000 + t, np.int32(-1)), np.array([7, 9, -1, 5, 3], np.int32)
    arrays = (token_ids, sampled, rows)
    out = place.download(fill_tokens.launch(loader, *map(place.upload, arrays)))
    least = fill_tokens.least_bytes(T, num_known=int((rows < 0).sum()))
    return ExampleRun("fill_tokens", {"T": T}, least, (Output("out", out, _REFERENCE.fill_tokens(*arrays), 0.0),))


def advance_rows_example(
    loader: KernelLoader,
    place: Place,
    *,
    R: int = 60,
    C: int = 264,
    page_size: int = 16,
    dtype: str = "bfloat16",
    counted: bool = True,
) -> ExampleRun:
    """Rows with shuffled pages; every fourth is not in use, and its pages are nowhere. Some enter their last page, and
    the sampling of one failed. Tokens are `counted` up to id 479.
    """
    rng, max_pages = np.random.default_rng(0), 5
    context_lens = rng.integers(1, max_pages * page_size, R).astype(np.int32)
    context_lens[1::7] = (max_pages - 1) * page_size
    context_lens[::4] = 0
    page_tables = rng.permutation(R * max_pages).reshape(R, max_pages).astype(np.int32)
    page_tables[::4] = -1
    sampled = rng.integers(0, 500, R).astype(np.int32)
    sampled[-1] = -1
    table = to_elements(random_floats(rng, 500, C), dtype)
    rows = {"token_ids": rng.integers(0, 500, R).astype(np.int32), "positions": np.zeros(R, np.int32)}
    rows |= {"slots": np.full(R, -1, np.int32), "context_lens": context_lens}
    own = {name: place.upload(array) for name, array in rows.items()}
    wanted = {name: array.copy() for name, array in rows.items()}
    constant = (place.upload(array) for array in (sampled, page_tables, table))
    counts = rng.integers(0, 9, (R, 480), np.uint32) if counted else None
    there = None if counts is None else place.upload(counts.copy())
    x = place.download(advance_rows.launch(loader, *constant, **own, counts=there, page_size=page_size))
    batch = _batch(wanted["positions"], wanted["slots"])._replace(page_tables=page_tables, **wanted)
    expected = _REFERENCE.advance_rows(batch, sampled, to_floats(table), counts=counts, page_size=page_size)
    expected[wanted["token_ids"] < 0] = np.nan
    outputs = [Output(name, place.download(own[name]), wanted[name], 0.0) for name in rows]
    outputs.append(Output("x", x, expected, 0.0))
    if counts is not None:
        outputs.append(Output("counts", place.download(there), counts, 0.0))
    least = advance_rows.least_bytes(R, C, counted=int(counted))
    return ExampleRun("advance_rows", {"R": R, "C": C}, least, tuple(outputs))


def count_tokens_example(loader: KernelLoader, place: Place, *, N: int = 5003, M: int = 900) -> ExampleRun:
    """A row with M new tokens of prompt and output, one that is not counted, and one with a few tokens more.

    Ids come several times, and some have no token.
    """
    rng, width = np.random.default_rng(0), count_width(N)
    counts = rng.integers(0, 9, (3, width), np.uint32)
    counts[:, N:] = 0
    tokens = rng.integers(0, width, M + 30).astype(np.int32)
    tokens[M // 2 :: 3] = tokens[M // 2]
    tokens[[0, M - 1]] = N
    jobs = np.array([(2, 1, 0, M // 2, M), (0, 0, M, M + 10, M + 30)], np.int32)
    own = place.upload(counts.copy())
    count_tokens.launch(loader, own, place.upload(jobs), place.upload(tokens), vocab_limit=N)
    _REFERENCE.count_tokens(counts, jobs, tokens, vocab_limit=N)
    least = count_tokens.least_bytes(2, N, len(tokens), cleared=1)
    return ExampleRun("count_tokens", {"N": N, "M": M}, least, (Output("counts", place.download(own), counts, 0.0),))


def update_rows_example(loader: KernelLoader, place: Place, *, N: int = 300) -> ExampleRun:
    """N of twice as many words changed, in no order."""
    rng = np.random.default_rng(0)
    words, places = rng.integers(0, 100, 2 * N).astype(np.int32), rng.permutation(2 * N)[:N].astype(np.int32)
    values = rng.integers(100, 200, N).astype(np.int32)
    own = place.upload(words.copy())
    update_rows.launch(loader, own, place.upload(places), place.upload(values))
    _REFERENCE.update_rows(words, places, values)
    output = Output("words", place.download(own), words, 0.0)
    return ExampleRun("update_rows", {"N": N}, update_rows.least_bytes(N), (output,))


def rope_and_kv_write_example(
    loader: KernelLoader,
    place: Place,
    *,
    T: int = 3,
    H: int = 4,
    KH: int = 2,
    D: int = 64,
    dtype: str = "bfloat16",
    norm: bool = True,
    unused_rows: int = 0,
    scale: float = 1.0,
) -> ExampleRun:
    """T tokens at shuffled slots of a cache full of NaN; the first `unused_rows` of them write nothing there."""
    rng = np.random.default_rng(0)
    qkv = random_floats(rng, T, (H + 2 * KH) * D, scale=scale)
    table = cos_sin_table(RopeConfig(theta=1e6), D, 100)
    positions, slots = rng.integers(1, 100, T).astype(np.int32), rng.permutation(64)[:T].astype(np.int32)
    slots[:unused_rows] = -1
    empty = to_elements(np.full((4, 16, KH, D), np.nan), dtype)
    keys, values = place.upload(empty), place.upload(empty)
    weights = (random_floats(rng, D), random_floats(rng, D))
    norms = [Norm(weight, 1e-6) if norm else None for weight in weights]
    q_norm, k_norm = (Norm(place.upload(weight), 1e-6) if norm else None for weight in weights)
    where = place.upload(positions), place.upload(slots)
    q = rope_and_kv_write.launch(
        loader, place.upload(qkv), place.upload(table), *where, keys, values, q_norm=q_norm, k_norm=k_norm
    )
    wanted = _rope_reference(qkv, table, positions, slots, to_floats(empty), norms)
    if dtype == "float16":  # what its range cannot hold becomes its largest number
        wanted = (wanted[0], *(np.clip(cache, -65504, 65504) for cache in wanted[1:]))
    cache_limit = 0.51 * EPSILON[dtype]  # rounding to the cache's type comes last
    outputs = (
        Output("q", place.download(q), wanted[0], 16 * EPSILON["float32"]),
        Output("keys", to_floats(place.download(keys)), wanted[1], cache_limit),
        Output("values", to_floats(place.download(values)), wanted[2], cache_limit),
    )
    sizes = {"T": T, "H": H, "KH": KH, "D": D}
    return ExampleRun("rope_and_kv_write", sizes, rope_and_kv_write.least_bytes(**sizes, norm=int(norm)), outputs)


def copy_pages_example(
    loader: KernelLoader, place: Place, *, page_size: int = 16, KH: int = 2, D: int = 64
) -> ExampleRun:
    """Two of six pages copied to two others."""
    rng = np.random.default_rng(0)
    keys, values = (to_elements(random_floats(rng, 6, page_size, KH, D), "bfloat16") for _ in range(2))
    sources, copies = np.array([3, 0], np.int32), np.array([1, 5], np.int32)
    own_keys, own_values = place.upload(keys), place.upload(values)
    copy_pages.launch(loader, own_keys, own_values, place.upload(sources), place.upload(copies))
    _REFERENCE.copy_pages(keys, values, sources, copies)
    outputs = (
        Output("keys", to_floats(place.download(own_keys)), to_floats(keys), 0.0),
        Output("values", to_floats(place.download(own_values)), to_floats(values), 0.0),
    )
    sizes = {"N": 2, "page_size": page_size, "KH": KH, "D": D}
    return ExampleRun("copy_pages", sizes, copy_pages.least_bytes(**sizes), outputs)


def _rope_reference(
    qkv: np.ndarray,
    table: np.ndarray,
    positions: np.ndarray,
    slots: np.ndarray,
    empty: np.ndarray,
    norms: list[Norm | None],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Queries, keys and values of the reference op, which is asked again without the rows that have no slot."""
    keys, values = empty.copy(), empty.copy()
    ops = {"q_norm": norms[0], "k_norm": norms[1]}
    used = slots >= 0
    _REFERENCE.rope_and_kv_write(qkv[used], table, _batch(positions[used], slots[used]), keys, values, **ops)
    q = _REFERENCE.rope_and_kv_write(qkv, table, _batch(positions, slots), empty.copy(), empty.copy(), **ops)
    return q, keys, values


def _batch(positions: np.ndarray, slots: np.ndarray) -> Batch:
    """The part of a step's batch that the op reads."""
    nothing = np.zeros(0, np.int32)
    return Batch(nothing, positions, slots, nothing, nothing, nothing, nothing, 0, 0, 0)
