"""Every reference op against plain Python loops over float64, on shapes that are ragged and small."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cupyllm.batch import Batch
from cupyllm.ops.reference import Norm, ReferenceOps, hidden_keys

OPS = ReferenceOps()
CLOSE = {"rtol": 2e-5, "atol": 2e-5}


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def loop_norm(x: np.ndarray, norm: Norm) -> np.ndarray:
    out = np.empty(x.shape)
    for index in np.ndindex(x.shape[:-1]):
        row = x[index].astype(np.float64)
        root = math.sqrt(sum(value * value for value in row) / len(row) + norm.eps)
        out[index] = [value / root * weight for value, weight in zip(row, norm.weight, strict=True)]
    return out


def loop_matmul(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return np.array([[sum(float(a) * float(b) for a, b in zip(row, w, strict=True)) for w in weight] for row in x])


def make_batch(chunks: list[tuple[int, int]], page_tables: list[list[int]], page_size: int) -> Batch:
    """A batch of (start, length) chunks over the given pages; token ids are not used here."""
    widest = max(map(len, page_tables))
    positions = np.concatenate([np.arange(start, start + length) for start, length in chunks]).astype(np.int32)
    rows = np.repeat(np.arange(len(chunks)), [length for _, length in chunks])
    tables = np.array([table + [-1] * (widest - len(table)) for table in page_tables], np.int32)
    return Batch(
        token_ids=np.zeros(len(positions), np.int32),
        positions=positions,
        slots=(tables[rows, positions // page_size] * page_size + positions % page_size).astype(np.int32),
        query_starts=np.cumsum([0] + [length for _, length in chunks], dtype=np.int32),
        context_lens=np.array([start + length for start, length in chunks], np.int32),
        page_tables=tables,
        logit_rows=np.zeros(0, np.int32),
        num_decodes=sum(length == 1 for _, length in chunks),
        max_query_len=max(length for _, length in chunks),
        max_context_len=max(start + length for start, length in chunks),
    )


def test_embedding_takes_rows() -> None:
    table = random(5, 3)
    np.testing.assert_array_equal(OPS.embedding(np.array([4, 0, 4], np.int32), table), [table[4], table[0], table[4]])


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 8)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    x, norm = random(*shape), Norm(random(shape[-1], seed=1), 1e-6)
    np.testing.assert_allclose(OPS.rms_norm(x, norm), loop_norm(x, norm), **CLOSE)


def test_rms_norm_of_zeros_and_of_large_values_is_finite() -> None:
    norm = Norm(np.ones(4, np.float32), 1e-6)
    np.testing.assert_array_equal(OPS.rms_norm(np.zeros((1, 4), np.float32), norm), np.zeros((1, 4)))
    np.testing.assert_allclose(OPS.rms_norm(np.full((1, 4), 1e8, np.float32), norm), np.ones((1, 4)), rtol=1e-6)


@pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 40])
@pytest.mark.parametrize("extras", ["plain", "bias", "residual", "norm", "all"])
def test_linear(num_rows: int, extras: str) -> None:
    x, weight = random(num_rows, 6), random(9, 6, seed=1)
    norm = Norm(random(6, seed=2), 1e-6) if extras in ("norm", "all") else None
    bias = random(9, seed=3) if extras in ("bias", "all") else None
    residual = random(num_rows, 9, seed=4) if extras in ("residual", "all") else None
    expected = loop_matmul(loop_norm(x, norm) if norm else x, weight)
    expected = expected + (0 if bias is None else bias) + (0 if residual is None else residual)
    kept = None if residual is None else residual.copy()
    y = OPS.linear(x, weight, bias, norm=norm, residual=residual)
    np.testing.assert_allclose(y, expected, **CLOSE)
    assert y.dtype == np.float32
    if residual is not None:
        np.testing.assert_array_equal(residual, kept, err_msg="an op changes no argument")


@pytest.mark.parametrize("tile", [2**18, 5])
def test_silu_mul_and_its_extremes(tile: int, monkeypatch) -> None:
    monkeypatch.setattr("cupyllm.ops.reference._NUMBERS_PER_TILE", tile)
    gate_up = random(3, 10) * 4
    expected = [[g / (1 + math.exp(-g)) * u for g, u in zip(row[:5], row[5:], strict=True)] for row in gate_up.tolist()]
    np.testing.assert_allclose(OPS.silu_mul(gate_up), expected, **CLOSE)
    extreme = np.array([[-1e4, 1e4, 2.0, 3.0]], np.float32)
    np.testing.assert_array_equal(OPS.silu_mul(extreme), [[0.0, 3e4]])


def test_gate_up_silu_mul_is_norm_then_product_then_silu() -> None:
    x, weight, norm = random(3, 6), random(8, 6, seed=1), Norm(random(6, seed=2), 1e-6)
    expected = OPS.silu_mul(loop_matmul(loop_norm(x, norm), weight).astype(np.float32))
    np.testing.assert_allclose(OPS.gate_up_silu_mul(x, weight, norm=norm), expected, **CLOSE)


@pytest.mark.parametrize("head_norms", [False, True], ids=["qwen2", "qwen3"])
def test_rope_rotates_by_position_and_writes_to_the_slots(head_norms: bool) -> None:
    heads, kv_heads, head_size, page_size = 4, 2, 6, 4
    batch = make_batch([(6, 1), (0, 5)], [[3, 1], [0, 2]], page_size)
    table = random(16, head_size, seed=9)
    qkv = random(6, (heads + 2 * kv_heads) * head_size)
    q_norm = Norm(random(head_size, seed=5), 1e-6) if head_norms else None
    k_norm = Norm(random(head_size, seed=6), 1e-6) if head_norms else None
    keys = np.full((4, page_size, kv_heads, head_size), np.nan, np.float32)
    values = keys.copy()
    q = OPS.rope_and_kv_write(qkv, table, batch, keys, values, q_norm=q_norm, k_norm=k_norm)

    def rotate(head: np.ndarray, position: int, norm: Norm | None) -> list[float]:
        head = loop_norm(head[None], norm)[0] if norm else head
        half, cos, sin = head_size // 2, table[position, : head_size // 2], table[position, head_size // 2 :]
        low = [head[i] * cos[i] - head[i + half] * sin[i] for i in range(half)]
        return low + [head[i + half] * cos[i] + head[i] * sin[i] for i in range(half)]

    split = qkv.reshape(6, -1, head_size)
    for t, (position, slot) in enumerate(zip(batch.positions, batch.slots, strict=True)):
        for h in range(heads):
            np.testing.assert_allclose(q[t, h], rotate(split[t, h], position, q_norm), **CLOSE)
        for h in range(kv_heads):
            written = keys[slot // page_size, slot % page_size, h]
            np.testing.assert_allclose(written, rotate(split[t, heads + h], position, k_norm), **CLOSE)
            np.testing.assert_array_equal(
                values[slot // page_size, slot % page_size, h], split[t, heads + kv_heads + h]
            )
    assert np.isnan(keys).sum() == (16 - 6) * kv_heads * head_size, "only the step's slots are written"


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 1), (6, 2)])
@pytest.mark.parametrize("tile", [2**18, 150, 1], ids=["one tile", "two rows a tile", "a row a tile"])
def test_paged_attention(window: int | None, heads: int, kv_heads: int, tile: int, monkeypatch) -> None:
    monkeypatch.setattr("cupyllm.ops.reference._NUMBERS_PER_TILE", tile)
    head_size, page_size = 5, 4
    # Decode rows at the page's edges, a prompt from its start, a chunk with a prefix; pages shuffled, the rest poison.
    chunks = [(3, 1), (4, 1), (0, 1), (0, 6), (5, 4)]
    page_tables = [[7], [2, 9], [4], [0, 8], [6, 1, 3]]
    batch = make_batch(chunks, page_tables, page_size)
    keys = np.full((10, page_size, kv_heads, head_size), np.nan, np.float32)
    values = keys.copy()
    for s, (start, length) in enumerate(chunks):
        for position in range(start + length):
            place = page_tables[s][position // page_size], position % page_size
            keys[place] = random(kv_heads, head_size, seed=100 * s + position)
            values[place] = random(kv_heads, head_size, seed=100 * s + position + 50)
    q = random(len(batch.positions), heads, head_size, seed=1)
    out = OPS.paged_attention(q, keys, values, batch, window=window)

    row = 0
    for s, (start, length) in enumerate(chunks):
        for position in range(start, start + length):
            for h in range(heads):
                shared = h // (heads // kv_heads)
                seen = range(0 if window is None else max(0, position - window + 1), position + 1)
                places = [(page_tables[s][p // page_size], p % page_size, shared) for p in seen]
                scores = [float(q[row, h] @ keys[place]) / math.sqrt(head_size) for place in places]
                weights = [math.exp(score - max(scores)) for score in scores]
                mixed = sum(w * values[place] for w, place in zip(weights, places, strict=True)) / sum(weights)
                np.testing.assert_allclose(out[row, h * head_size : (h + 1) * head_size], mixed, **CLOSE)
            row += 1


def test_logits_are_the_head_over_the_normed_rows() -> None:
    x, head, norm = random(5, 6), random(11, 6, seed=1), Norm(random(6, seed=2), 1e-6)
    rows = np.array([4, 1], np.int32)
    expected = loop_matmul(loop_norm(x, norm)[rows], head)
    np.testing.assert_allclose(OPS.logits(x, head, rows=rows, norm=norm), expected, **CLOSE)


def test_hidden_keys() -> None:
    np.testing.assert_array_equal(hidden_keys(1, 2, None), [[0, 0, 1], [0, 0, 0]])
    np.testing.assert_array_equal(hidden_keys(1, 2, 1), [[1, 0, 1], [1, 1, 0]])
    np.testing.assert_array_equal(hidden_keys(2, 1, 2), [[1, 0, 0]])


def test_rows_in_use_move_on_and_the_others_stay() -> None:
    page_tables = np.array([[7, 5, -1], [3, 2, 9], [-1, -1, -1], [6, -1, -1]], np.int32)
    batch = make_batch([(0, 1)] * 4, [[0]] * 4, page_size=4)._replace(
        token_ids=np.full(4, 99, np.int32),
        positions=np.full(4, 50, np.int32),
        slots=np.full(4, -1, np.int32),
        context_lens=np.array([4, 11, 0, 1], np.int32),
        page_tables=page_tables,
    )
    table = np.arange(200, dtype=np.float32).reshape(100, 2)
    x = OPS.advance_rows(batch, np.array([21, 22, 23, 24], np.int32), table, counts=None, page_size=4)
    np.testing.assert_array_equal(batch.token_ids, [21, 22, 99, 24])
    np.testing.assert_array_equal(x, [[42, 43], [44, 45], [198, 199], [48, 49]])
    np.testing.assert_array_equal(batch.positions, [4, 11, 50, 1])
    np.testing.assert_array_equal(batch.slots, [5 * 4, 9 * 4 + 3, -1, 6 * 4 + 1])
    np.testing.assert_array_equal(batch.context_lens, [5, 12, 0, 2])


def test_tokens_of_rows_that_move_on_are_counted_where_they_have_a_count() -> None:
    batch = make_batch([(0, 1)] * 4, [[0]] * 4, page_size=4)._replace(
        context_lens=np.array([1, 2, 0, 3], np.int32), token_ids=np.zeros(4, np.int32), slots=np.zeros(4, np.int32)
    )
    counts = np.full((4, 8), 5, np.uint32)
    OPS.advance_rows(batch, np.array([6, -1, 6, 8], np.int32), np.zeros((9, 2)), counts=counts, page_size=4)
    expected = np.full((4, 8), 5)
    expected[0, 6] = 7  # the others: a failed row, one that is not in use, an id past the counts
    np.testing.assert_array_equal(counts, expected)


def test_tokens_are_counted_as_prompt_and_as_output() -> None:
    counts = np.full((3, 8), 9, np.uint32)
    tokens = np.array([4, 4, 7, 6, 4, 4, 5, 5, 0], np.int32)
    # Row 2 is cleared and gets a prompt of 4, 4, 7, 6 and an output of 4, 4; row 0 gets an output of 5, 5, 0.
    OPS.count_tokens(counts, np.array([(2, 1, 0, 4, 6), (0, 0, 6, 6, 9)], np.int32), tokens, vocab_limit=7)
    np.testing.assert_array_equal(counts, [[11, 9, 9, 9, 9, 13, 9, 9], [9] * 8, [0, 0, 0, 0, 5, 0, 1, 0]])


def test_words_of_rows_are_changed_in_place() -> None:
    words = np.arange(5, dtype=np.int32)
    OPS.update_rows(words, np.array([4, 1], np.int32), np.array([-7, 9], np.int32))
    np.testing.assert_array_equal(words, [0, 9, 2, 3, -7])
