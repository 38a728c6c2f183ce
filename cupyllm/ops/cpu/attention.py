"""Attention over pages, for prompt chunks and decode rows alike.

A unit of work is one KV head and a few neighbouring tokens of one sequence (one, for a decode row): their query heads
share every key and value that is read. The keys are walked in blocks of 64 positions, with a running maximum and sum
(online softmax; Milakov and Gimelshein, 2018; Dao et al., "FlashAttention", 2022). Blocks begin at multiples of 64,
whoever asks, so that a query's result does not depend on the tokens that it shares a unit with.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from cupyllm.ops.cpu.compile import kernel, part, part_in_any_order
from cupyllm.ops.cpu.dot_tile import dot_tile
from cupyllm.ops.cpu.mix_tile import mix_tile
from cupyllm.ops.cpu.numerics import ask_for, exp, load_number, store_number
from cupyllm.ops.cpu.team import share_out

BLOCK = 64  # key positions
UNIT_TOKENS = 8
_HIDDEN, _ZERO = np.float32(-np.inf), np.float32(0)


def vectors_of(head_size: int, lanes: int) -> int:
    """How many vectors of an output row are held in registers together."""
    return 4 if head_size // lanes % 4 == 0 else 2


@cache
def paged_attention_kernel(lanes: int, head_size: int, bf16_cache: bool) -> Any:
    """For one head size, a multiple of 2 * lanes."""
    LANES, D, PAIRS, VECTORS = lanes, head_size, int(bf16_cache), vectors_of(head_size, lanes)

    @kernel()
    def paged_attention(
        team: Any, out: Any, q: Any, keys: Any, values: Any, query_starts: Any, context_lens: Any, page_tables: Any,
        window: int,
    ) -> None:  # fmt: skip
        """See attention_of."""
        attention_of(
            team, out, q, keys, values, query_starts, context_lens, page_tables, window, D, PAIRS, VECTORS, LANES
        )

    return paged_attention


@part
def attention_of(
    team: Any, out: Any, q: Any, keys: Any, values: Any, query_starts: Any, context_lens: Any, page_tables: Any,
    window: int, D: int, PAIRS: int, VECTORS: int, LANES: int,
) -> None:  # fmt: skip
    """out (T, H * D) from q (T, H, D) and the cache (P, page_size, KH, D) of S sequences; window 0 is none."""
    units = list_units(query_starts)
    arguments = (out, q, keys, values, query_starts, context_lens, page_tables, units, window)
    share_out(team, attention_chunk, len(units) * keys.shape[2], arguments, (D, PAIRS, VECTORS, LANES))


@part
def attention_chunk(
    chunk: int, out: Any, q: Any, keys: Any, values: Any, query_starts: Any, context_lens: Any, page_tables: Any,
    units: Any, window: int, D: int, PAIRS: int, VECTORS: int, LANES: int,
) -> None:  # fmt: skip
    """One unit: the last ones first, since a prompt's late tokens see most keys."""
    KH = keys.shape[2]
    s, first, num_tokens = units[len(units) - 1 - chunk // KH]
    position = context_lens[s] - query_starts[s + 1] + first
    unit = Unit(first, num_tokens, position, chunk % KH)
    attend(out, q, keys, values, page_tables[s], unit, window, D, PAIRS, VECTORS, LANES)


class Unit(NamedTuple):
    """A unit of work: neighbouring tokens of one sequence, and the query heads that share one KV head."""

    first: int  # its place in the batch
    num_tokens: int
    position: int  # of the first token in its sequence
    kv_head: int


@part
def list_units(query_starts: Any) -> Any:
    """(sequence, first token, number of tokens) of every unit: (units, 3)."""
    S = len(query_starts) - 1
    count = 0
    for s in range(S):
        count += (query_starts[s + 1] - query_starts[s] + UNIT_TOKENS - 1) // UNIT_TOKENS
    units = np.empty((count, 3), np.int64)
    unit = 0
    for s in range(S):
        for first in range(query_starts[s], query_starts[s + 1], UNIT_TOKENS):
            units[unit, 0], units[unit, 1] = s, first
            units[unit, 2] = min(UNIT_TOKENS, query_starts[s + 1] - first)
            unit += 1
    return units


@part
def attend(
    out: Any, q: Any, keys: Any, values: Any, page_table: Any, unit: Any, window: int,
    D: int, PAIRS: int, VECTORS: int, LANES: int,
) -> None:  # fmt: skip
    """The rows of one unit, token by token and head by head: scores, weights and sum for every block of keys."""
    page_size, KH = keys.shape[1], keys.shape[2]
    G = q.shape[1] // KH
    R = unit.num_tokens * G
    queries, total = np.empty((R, D), np.float32), np.zeros((R, D), np.float32)
    scores = np.empty((R, BLOCK), np.float32)
    largest, weight_sum = np.full(R, _HIDDEN, np.float32), np.zeros(R, np.float32)
    load_queries(queries, q, unit, G, D, PAIRS, LANES)
    begin = max(unit.position - window + 1, 0) if window else 0  # positions that some token sees
    end = unit.position + unit.num_tokens
    for start in range(begin // BLOCK * BLOCK, end, BLOCK):
        stop = min(start + BLOCK, end)
        if unit.num_tokens == 1:  # the values of this block, and the keys of the next: else the cache has them
            ask(values, page_table, max(start, begin), stop, unit.kv_head, D)
            ask(keys, page_table, stop, min(stop + BLOCK, end), unit.kv_head, D)
        for p, run, offset in page_runs(page_table, page_size, max(start, begin), stop):
            score(scores, p - start, queries, keys, (offset * KH + unit.kv_head) * D, run, D, LANES)
        for row in range(R):
            position = unit.position + row // G
            hide(scores, row, position - window + 1 - start if window else 0, position + 1 - start)
        soften(scores, largest, weight_sum, total)
        for p, run, offset in page_runs(page_table, page_size, max(start, begin), stop):
            mix(total, scores, p - start, values, (offset * KH + unit.kv_head) * D, run, D, VECTORS, LANES)
    for row in range(R):
        token, head = unit.first + row // G, unit.kv_head * G + row % G
        place = (token * q.shape[1] + head) * D
        for d in range(D):
            store_number(out, place + d, load_number(total, row * D + d) / weight_sum[row])


@part
def page_runs(page_table: Any, page_size: int, start: int, stop: int) -> Any:
    """The positions from start to stop, page by page: (first position, how many, slot of the first)."""
    p = start
    while p < stop:
        offset = p % page_size
        run = min(page_size - offset, stop - p)
        yield p, run, page_table[p // page_size] * page_size + offset
        p += run


@part
def ask(memory: Any, page_table: Any, start: int, stop: int, kv_head: int, D: int) -> None:
    """Have the keys or values of the positions from start to stop brought closer, while others are worked on."""
    KH = memory.shape[2]
    for _, run, offset in page_runs(page_table, memory.shape[1], start, stop):
        for slot in range(offset, offset + run):
            ask_for(memory, (slot * KH + kv_head) * D, D)


@part
def load_queries(queries: Any, q: Any, unit: Any, G: int, D: int, PAIRS: int, LANES: int) -> None:
    """queries[token * G + head] = q / sqrt(D), in the order in which dot_tile meets the keys (pack.py)."""
    scale = np.float32(1) / np.sqrt(np.float32(D))
    for row in range(len(queries)):
        token, head = unit.first + row // G, unit.kv_head * G + row % G
        place = (token * q.shape[1] + head) * D
        for d in range(0, D, 2 * LANES):
            for lane in range(LANES):
                even, odd = (d + 2 * lane, d + 2 * lane + 1) if PAIRS else (d + lane, d + LANES + lane)
                store_number(queries, row * D + d + lane, load_number(q, place + even) * scale)
                store_number(queries, row * D + d + LANES + lane, load_number(q, place + odd) * scale)


@part
def score(scores: Any, column: int, queries: Any, keys: Any, offset: int, count: int, D: int, LANES: int) -> None:
    """scores[row, column + j] = queries[row] . key j, for `count` keys of one page from `offset` of the memory."""
    R, stride = len(queries), keys.shape[2] * D
    j = 0
    while j + 4 <= count:
        key = offset + j * stride
        for row in range(0, R, 4):
            place, end = row * BLOCK + column + j, R - 1 - row
            dot_tile(
                scores, place, BLOCK, keys, key, stride, queries, row * D, D, end, scores, 0, 0, D, D, 0, 4, 4, LANES, 0
            )
        j += 4
    while j < count:
        key = offset + j * stride
        for row in range(0, R, 4):
            place, end = row * BLOCK + column + j, R - 1 - row
            dot_tile(
                scores, place, BLOCK, keys, key, stride, queries, row * D, D, end, scores, 0, 0, D, D, 0, 1, 4, LANES, 0
            )
        j += 1


@part
def hide(scores: Any, row: int, seen_from: int, seen_to: int) -> None:
    """Of one block, leave a row the scores of the keys that its token sees."""
    if seen_from > 0 or seen_to < BLOCK:
        for j in range(BLOCK):
            is_seen = seen_from <= j < seen_to
            store_number(scores, row * BLOCK + j, load_number(scores, row * BLOCK + j) if is_seen else _HIDDEN)


@part
def soften(scores: Any, largest: Any, weight_sum: Any, total: Any) -> None:
    """Turn one block's scores into weights, and scale what was summed before to each row's new maximum.

    All rows are taken from one step to the next together: a row alone would wait for each of its steps to end.
    """
    R, D = total.shape
    shrink = np.empty(R, np.float32)
    for row in range(R):
        shrink[row], largest[row] = largest[row], max(largest[row], largest_of(scores, row * BLOCK))
    for row in range(R):
        shrink[row] = exp(shrink[row] - base_of(largest[row]))
    for row in range(R):
        base = base_of(largest[row])
        for place in range(row * BLOCK, (row + 1) * BLOCK):
            store_number(scores, place, exp(load_number(scores, place) - base))
    for row in range(R):
        weight_sum[row] = weight_sum[row] * shrink[row] + sum_of(scores, row * BLOCK)
        for place in range(row * D, (row + 1) * D):
            store_number(total, place, load_number(total, place) * shrink[row])


@part
def base_of(largest: Any) -> Any:
    """What is taken off the scores: where all are hidden, any number makes all weights 0."""
    return _ZERO if largest == _HIDDEN else largest


@part
def mix(
    total: Any, weights: Any, column: int, values: Any, offset: int, count: int, D: int, VECTORS: int, LANES: int
) -> None:
    """total[row] += the sum of weights[row, column + j] * value j, for `count` values of one page from `offset`."""
    stride = values.shape[2] * D
    for d in range(0, D, VECTORS * LANES):
        for row in range(0, len(total), 4):
            out, weight, end = row * D + d, row * BLOCK + column, len(total) - 1 - row
            mix_tile(total, out, D, weights, weight, BLOCK, end, values, offset + d, stride, count, 4, VECTORS, LANES)


@part_in_any_order
def largest_of(scores: Any, offset: int) -> Any:
    """The largest of one row's scores of a block."""
    largest = load_number(scores, offset)
    for j in range(1, BLOCK):
        largest = max(largest, load_number(scores, offset + j))
    return largest


@part_in_any_order
def sum_of(scores: Any, offset: int) -> Any:
    """The sum of one row's weights of a block, those of hidden keys (0) included."""
    total = _ZERO
    for j in range(BLOCK):
        total += load_number(scores, offset + j)
    return total
