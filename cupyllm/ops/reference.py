"""Every op of the model in NumPy, written to be read: one name, one signature, in float32.

This text has two readers. A person learns here what an op computes before opening its CUDA twin in cupyllm/cuda/,
and the tests hold every kernel against it. It is itself tested against plain loops and, as a whole model, against
transformers.

An op takes the arrays of one step, T tokens of S sequences (see batch.py), and returns new arrays. Only the cache is
changed in place: by `rope_and_kv_write`, which writes the step's keys and values, and by `copy_pages`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cupyllm.batch import Batch
from cupyllm.device import Array
from cupyllm.ops.sample_reference import sample_row, top_logprobs
from cupyllm.row_sampling import IN_OUTPUT, IN_PROMPT, RowSampling, sampling_batch
from cupyllm.sampling_batch import GREEDY_BELOW, SampleResult, SamplingBatch, TopLogprobs

# What is larger than a CPU's cache is worked on in tiles of rows of about this many numbers (2 MiB).
_NUMBERS_PER_TILE = 2**19


class Norm(NamedTuple):
    """The parameters of an RMSNorm: weight (C,) and the epsilon under the root."""

    weight: Array
    eps: float


class ReferenceOps:
    """The ops over NumPy arrays in float32."""

    name = "reference"
    # Where a device has all of `decoder_layer` (model.py) as one call: (x, weights, rope_table, keys, values, batch, *,
    # eps, window) -> (T, C).
    whole_layer: Callable[..., Array] | None = None

    def embedding(self, token_ids: Array, table: Array) -> Array:
        """Row token_ids[t] of the table for every token: (T,), (V, C) -> (T, C)."""
        return table[token_ids]

    def rms_norm(self, x: Array, norm: Norm) -> Array:
        """Divide each row by its root mean square, then weight it: (..., C) -> (..., C).

        Source: Zhang and Sennrich, "Root mean square layer normalization", 2019.
        """
        squares = np.einsum("...c,...c->...", x, x)[..., None]
        squares += x.shape[-1] * norm.eps
        y = x * np.sqrt(x.shape[-1] / squares)
        y *= norm.weight
        return y

    def linear(
        self,
        x: Array,
        weight: Array,
        bias: Array | None = None,
        *,
        norm: Norm | None = None,
        residual: Array | None = None,
    ) -> Array:
        """norm(x) @ weight.T + bias + residual: (T, K), (N, K) -> (T, N). What is None is left out."""
        if norm is not None:
            x = self.rms_norm(x, norm)
        y = _matmul(x, weight)
        if bias is not None:
            y += bias
        if residual is not None:
            y += residual
        return y

    def gate_up_silu_mul(self, x: Array, weight: Array, *, norm: Norm) -> Array:
        """The first half of the MLP: gate and up in one product, then SiLU(gate) * up: (T, C), (2 * I, C) -> (T, I)."""
        return _silu_mul_in_place(self.linear(x, weight, norm=norm))

    def silu_mul(self, gate_up: Array) -> Array:
        """SiLU(gate) * up with SiLU(z) = z / (1 + exp(-z)): (T, 2 * I) -> (T, I). Source: Shazeer, 2020 (SwiGLU)."""
        return _silu_mul_in_place(gate_up.copy())

    def rope_and_kv_write(
        self,
        qkv: Array,
        rope_table: Array,
        batch: Batch,
        keys: Array,
        values: Array,
        *,
        q_norm: Norm | None = None,
        k_norm: Norm | None = None,
    ) -> Array:
        """Rotate queries and keys by their positions, write keys and values to their slots, return the queries.

        qkv is (T, (H + 2 * KH) * D): the heads of q, then k, then v. keys and values are (P, page_size, KH, D).
        Qwen3 norms every head of q and k first (q_norm, k_norm over D). Returns (T, H, D).
        Source: Su et al., "RoFormer", 2021; halves are rotated, as Hugging Face's Qwen2 does.
        """
        num_tokens, (_, _, num_kv_heads, head_size) = len(qkv), keys.shape
        heads = qkv.reshape(num_tokens, -1, head_size)  # (T, H + 2 * KH, D)
        num_heads = heads.shape[1] - 2 * num_kv_heads
        rotated = heads[:, : num_heads + num_kv_heads]  # the heads of q and k
        if q_norm is not None and k_norm is not None:
            q = self.rms_norm(rotated[:, :num_heads], q_norm)
            k = self.rms_norm(rotated[:, num_heads:], k_norm)
            rotated = np.concatenate([q, k], axis=1)
        half = head_size // 2
        angles = rope_table.take(batch.positions, axis=0)[:, None, :]
        cos, sin = angles[..., :half], angles[..., half:]  # (T, 1, D / 2)
        first, second = rotated[..., :half], rotated[..., half:]
        rotated = np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)
        keys.reshape(-1, num_kv_heads, head_size)[batch.slots] = rotated[:, num_heads:]
        values.reshape(-1, num_kv_heads, head_size)[batch.slots] = heads[:, num_heads + num_kv_heads :]
        return rotated[:, :num_heads]

    def paged_attention(
        self, q: Array, keys: Array, values: Array, batch: Batch, *, window: int | None = None
    ) -> Array:
        """Causal attention of every query over its own sequence's pages: (T, H, D) -> (T, H * D).

        One definition serves prompt chunks and decode rows: a sequence's queries are its last positions, and the
        query at position p sees keys 0 to p (with a window, only the last `window` of them). The H query heads
        share KH key heads in groups (GQA). Source: Vaswani et al., 2017; Kwon et al., "PagedAttention", 2023.
        """
        num_kv_heads, head_size = keys.shape[2:]
        output = np.empty((len(q), q.shape[1] * head_size), np.float32)
        for s, context_len in enumerate(batch.context_lens.tolist()):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            pages = batch.page_tables[s, : -(-context_len // keys.shape[1])]
            k = keys.take(pages, axis=0).reshape(-1, num_kv_heads, head_size)[:context_len]
            v = values.take(pages, axis=0).reshape(-1, num_kv_heads, head_size)[:context_len]
            output[rows] = _attend(q[rows], k, v, window)
        return output

    def copy_pages(self, keys: Array, values: Array, sources: Array, copies: Array) -> None:
        """Copy whole pages within one layer's cache: page sources[i] to page copies[i]. No page is both."""
        keys[copies] = keys[sources]
        values[copies] = values[sources]

    def logits(self, x: Array, head: Array, *, rows: Array, norm: Norm) -> Array:
        """The scores of all V tokens to come after the chosen rows: (T, C), (V, C) -> (R, V)."""
        return self.linear(x[rows], head, norm=norm)

    def fill_tokens(self, token_ids: Array, sampled: Array, rows: Array) -> Array:
        """Put tokens in that the host does not know yet: sampled[rows[t]] where rows[t] >= 0, else token_ids[t].

        (T,), (R,), (T,) int32 -> (T,) int32
        """
        return np.where(rows >= 0, sampled[rows], token_ids)

    def advance_rows(
        self, batch: Batch, sampled: Array, table: Array, *, counts: Array | None, page_size: int
    ) -> Array:
        """Move the decode rows of `batch` on in place: each takes its sampled token (R,), one position further on.

        Its context_lens are those before the step. A row where it is 0 is not in use and stays as it is. The tokens are
        counted in `counts`, those of a RowSampling, as output. Returns the embeddings of all rows' tokens, from the
        table (V, C): (R, C).
        """
        rows = np.flatnonzero(batch.context_lens)
        positions = batch.context_lens[rows]
        batch.token_ids[rows] = sampled[rows]
        batch.positions[rows] = positions
        batch.slots[rows] = batch.page_tables[rows, positions // page_size] * page_size + positions % page_size
        batch.context_lens[rows] += 1
        if counts is not None:
            counted = rows[(sampled[rows] >= 0) & (sampled[rows] < counts.shape[1])]
            counts[counted, sampled[counted]] += IN_OUTPUT
        return self.embedding(batch.token_ids, table)

    def update_rows(self, words: Array, places: Array, values: Array) -> None:
        """Change decode rows in place: words[places[i]] = values[i]. (W,), (N,), (N,) int32"""
        words[places] = values

    def count_tokens(self, counts: Array, jobs: Array, tokens: Array, *, vocab_limit: int) -> None:
        """Count tokens of rows in place: (R, W) uint32, as a RowSampling has them. jobs is (J, 5), tokens (M,) int32.

        A job is a row, whether it is cleared first, and where in `tokens` those of its prompt begin, where those of its
        output begin, and where they end. Ids from vocab_limit on are not counted.
        """
        for row, clears, first, output, end in jobs.tolist():
            if clears:
                counts[row] = 0
            of_prompt, of_output = tokens[first:output], tokens[output:end]
            counts[row, of_prompt[of_prompt < vocab_limit]] |= np.uint32(IN_PROMPT)
            np.add.at(counts[row], of_output[of_output < vocab_limit], IN_OUTPUT)

    def sample_rows(self, logits: Array, rows: RowSampling, *, all_plain: bool, out: Array) -> None:
        """What `sample` chooses, written to `out` (R,) int32, by parameters that lie where the logits do.

        `all_plain` says that every row in use takes the most likely token of its logits as they are. The logits may be
        changed.
        """
        out[:] = self.sample(logits, sampling_batch(rows)).token_ids

    def sample(self, logits: Array, sampling: SamplingBatch) -> SampleResult:
        """Choose the next token of every row: (R, V) -> (R,) ids, with logprobs where they are wanted.

        Ids from sampling.vocab_limit on have no token and are never chosen. A row without one finite value, or with a
        NaN, gets token -1. The row's steps are in sample_reference.py.
        """
        logits = logits[:, : sampling.vocab_limit]
        token_ids = np.full(len(logits), -1, np.int32)
        for r, row in enumerate(logits):
            if np.isfinite(row.max()):  # max is NaN when any value is
                plain = sampling.temperature[r] < GREEDY_BELOW and not sampling.changes_logits
                token_ids[r] = row.argmax() if plain else sample_row(row, sampling, r)
        tops = self.token_logprobs(logits, token_ids, sampling.num_logprobs, vocab_limit=sampling.vocab_limit)
        return SampleResult(token_ids=token_ids, **vars(tops))

    def token_logprobs(self, logits: Array, token_ids: Array, count: int, *, vocab_limit: int) -> TopLogprobs:
        """Log-probability of one token of each row, and of the `count` most likely: (R, V), (R,) -> see TopLogprobs.

        By the model's own distribution over the ids below vocab_limit. Where the token is -1 they are 0; a count of -1
        asks for nothing.
        """
        logits = logits[:, :vocab_limit]
        num_rows, num_top = len(logits), min(max(count, 0), logits.shape[1])
        logprobs = np.zeros(num_rows if count >= 0 else 0, np.float32)
        top_ids = np.zeros((num_rows, num_top), np.int32)
        top_values = np.zeros((num_rows, num_top), np.float32)
        for r in range(len(logprobs)):
            if token_ids[r] >= 0:
                logprobs[r], top_ids[r], top_values[r] = top_logprobs(logits[r], int(token_ids[r]), num_top)
        return TopLogprobs(logprobs, top_ids, top_values)


def _matmul(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """x @ weight.T, in the form that reads the weights fastest for this number of rows.

    With OpenBLAS a few rows are faster as weight @ x.T, which walks the weights row by row.
    """
    if len(x) == 1:
        y: np.ndarray = (weight @ x[0])[None]
    elif len(x) <= 16:
        y = np.ascontiguousarray((weight @ np.ascontiguousarray(x.T)).T)
    else:
        y = x @ weight.T
    return y


def _silu_mul_in_place(gate_up: np.ndarray) -> np.ndarray:
    """SiLU(gate) * up, written over gate: (T, 2 * I) -> a view of (T, I)."""
    half = gate_up.shape[1] // 2
    rows = max(1, _NUMBERS_PER_TILE // half)
    with np.errstate(over="ignore"):  # exp(-z) of a very negative gate is inf, and z / inf the right zero
        for start in range(0, len(gate_up), rows):
            gate, up = gate_up[start : start + rows, :half], gate_up[start : start + rows, half:]
            denominator = np.exp(-gate)
            denominator += 1.0
            gate /= denominator
            gate *= up
    return gate_up[:, :half]


def _attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None) -> np.ndarray:
    """Attention of one sequence: q (N, H, D) at its last N positions, k and v (L, KH, D) -> (N, H * D)."""
    (num_queries, num_heads, head_size), (context_len, num_kv_heads, _) = q.shape, k.shape
    q = q * np.float32(1.0 / np.sqrt(head_size))
    k = k.transpose(1, 2, 0)  # (KH, D, L)
    v = v.transpose(1, 0, 2)  # (KH, L, D)
    output = np.empty((num_queries, num_heads, head_size), np.float32)
    rows = max(1, _NUMBERS_PER_TILE // (num_heads * context_len))
    for start in range(0, num_queries, rows):
        block = q[start : start + rows]
        n = len(block)
        first = context_len - num_queries + start  # the position of the tile's first query
        seen = first + n  # no query of the tile sees a later key
        # The heads of one group stand below each other, so that they share one product per key head.
        grouped = block.reshape(n, num_kv_heads, -1, head_size).transpose(1, 2, 0, 3)  # (KH, G, n, D)
        scores = grouped.reshape(num_kv_heads, -1, head_size) @ k[:, :, :seen]  # (KH, G * n, seen)
        if n > 1 or window is not None:
            scores.reshape(num_kv_heads, -1, n, seen)[:, :, hidden_keys(first, n, window)] = -np.inf
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        weighted = scores @ v[:, :seen]  # (KH, G * n, D)
        weighted /= scores.sum(axis=2, keepdims=True)
        heads_of_rows = weighted.reshape(num_kv_heads, -1, n, head_size).transpose(2, 0, 1, 3)  # (n, KH, G, D)
        output[start : start + n] = heads_of_rows.reshape(n, num_heads, head_size)
    return output.reshape(num_queries, -1)


def hidden_keys(first_position: int, num_queries: int, window: int | None) -> np.ndarray:
    """Which keys, up to the last query's own, the queries at first_position and after may not see.

    Returns (num_queries, first_position + num_queries) bool.
    """
    positions = np.arange(first_position, first_position + num_queries)[:, None]
    key_positions = np.arange(first_position + num_queries)
    hidden: np.ndarray = key_positions > positions
    if window is not None:
        hidden |= key_positions <= positions - window
    return hidden
