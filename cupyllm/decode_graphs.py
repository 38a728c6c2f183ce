"""The whole decode step as one captured graph: advance, embedding, layers, head and sampling, replayed with one call.

A graph has its sizes baked in, so there is one for each bucket of rows, of context lengths, and of whether all rows are
greedy and without penalties; it is captured at the start or when it is first needed. Rows that only fill a bucket up
are not in use: they write no key and no value, and nobody reads what they sample. Everything that changes from step to
step lies in the decode rows on the device (decode_rows.py), which the graph itself moves on.
"""

from __future__ import annotations

import logging
import time
from itertools import product
from typing import NamedTuple

from cupyllm.batch import BatchBuilder
from cupyllm.decode_rows import DecodeRows, RowArrays, RowLayout
from cupyllm.device import Array, Capture, Device, Graph
from cupyllm.kv_cache import KVCache
from cupyllm.model import Model, all_layers, final_norm
from cupyllm.ops.reference import ReferenceOps
from cupyllm.plan import Plan
from cupyllm.sequence import Sequence
from cupyllm.unread import Unread

log = logging.getLogger(__name__)

# Contexts up to 1024, 4096, 16,384, ... tokens: the longest one decides over how many blocks attention is split.
SMALLEST_CONTEXT = 1024
CONTEXT_GROWTH = 4


class GraphKey(NamedTuple):
    """What is baked into a graph."""

    rows: int
    max_context_len: int
    all_plain: bool  # every row takes the most likely token of its logits as they are

    def __str__(self) -> str:
        return f"{self.rows} {'greedy' if self.all_plain else 'sampled'} rows, contexts up to {self.max_context_len}"


class DecodeGraphs:
    """Runs the decode steps that can be replayed."""

    def __init__(
        self,
        capture: Capture,
        model: Model,
        cache: KVCache,
        ops: ReferenceOps,
        device: Device,
        *,
        max_rows: int,
        max_model_len: int,
        vocab_limit: int,
    ) -> None:
        self._capture = capture
        self._model = model
        self._cache = cache
        self._ops = ops
        self._device = device
        self._vocab_limit = vocab_limit
        self._longest = max_model_len
        self._layout = RowLayout(max_rows, max_pages=-(-max_model_len // cache.page_size))
        self._rows = DecodeRows(ops, device, self._layout, page_size=cache.page_size, vocab_limit=vocab_limit)
        self._graphs: dict[GraphKey, Graph] = {}
        self._looked_at: list[Sequence] = []
        self._can_all = False  # whether all of these can be replayed
        self.num_replays = 0

    @property
    def graphs(self) -> dict[GraphKey, Graph]:
        """What has been captured."""
        return self._graphs

    def takes(self, plan: Plan) -> bool:
        """Whether the step can be replayed: decode rows alone, of which nothing is wanted that only the host can do."""
        if plan.prompts or plan.page_copies:
            return False
        if plan.decodes != self._looked_at:
            self._looked_at, self._can_all = plan.decodes, all(map(_can_be_replayed, plan.decodes))
        return self._can_all

    def leave(self) -> None:
        """A step ran in another way."""
        self._rows.leave()

    def run(self, plan: Plan, batches: BatchBuilder, unread: Unread | None) -> Array:
        """Run a step that `takes` took; returns the sampled tokens on the device, (S,) int32, until the next step."""
        self._rows.follow(plan, batches, unread)
        key = GraphKey(
            bucket_of(len(plan.decodes), self._layout.max_rows),
            context_bucket(batches.max_context_len),
            self._rows.all_plain,
        )
        graph = self._graphs.get(key) or self._capture_late(key)
        try:
            graph.replay()
        except Exception:
            self._rows.lose_track()
            raise
        self.num_replays += 1
        self._rows.moved_on()
        return self._rows.sampled

    @property
    def keys(self) -> list[GraphKey]:
        """Every graph that a step can need. Large ones first, so that the small ones find room in their memory."""
        most = self._layout.max_rows
        rows = sorted({bucket_of(count, most) for count in range(1, most + 1)}, reverse=True)
        contexts = [SMALLEST_CONTEXT]
        while contexts[-1] < self._longest:
            contexts.append(contexts[-1] * CONTEXT_GROWTH)
        return [GraphKey(*sizes) for sizes in product(rows, reversed(contexts), (False, True))]

    def capture(self, key: GraphKey) -> Graph:
        """Capture a graph before a step needs it."""

        def warm_up() -> None:
            counts = self._rows.arrays.counts  # which rows that are not in use leave alone
            self._step(RowArrays(self._layout, self._device, counts=counts, vocab_limit=self._vocab_limit), key)

        graph = self._graphs[key] = self._capture(lambda: self._step(self._rows.arrays, key), warm_up)
        return graph

    def _capture_late(self, key: GraphKey) -> Graph:
        start = time.perf_counter()
        graph = self.capture(key)
        milliseconds = (time.perf_counter() - start) * 1e3
        size = f"{graph.num_launches} launches, {graph.num_bytes / 2**20:.1f} MiB"
        log.info("captured a decode step (%s): %s, %.0f ms", key, size, milliseconds)
        return graph

    def _step(self, rows: RowArrays, key: GraphKey) -> None:
        """What is captured: nothing here may depend on the values of a step."""
        batch, sampled = rows.batch(key.rows, key.max_context_len), rows.fields.sampled[: key.rows]
        table, page_size = self._model.weights.embedding, self._cache.page_size
        counts = None if key.all_plain else rows.counts[: key.rows]
        x = self._ops.advance_rows(batch, sampled, table, counts=counts, page_size=page_size)
        hidden = all_layers(self._ops, self._model, x, self._cache, batch)
        scores = self._ops.linear(hidden, self._model.weights.lm_head, norm=final_norm(self._model))
        self._ops.sample_rows(scores, rows.sampling(key.rows), all_plain=key.all_plain, out=sampled)


def bucket_of(rows: int, max_rows: int) -> int:
    """The power of two for so many rows, or all there are.

    >>> bucket_of(5, 48), bucket_of(33, 48)
    (8, 48)
    """
    return min(1 << (rows - 1).bit_length(), max_rows)


def context_bucket(longest: int) -> int:
    """The bucket of contexts up to `longest`."""
    bucket = SMALLEST_CONTEXT
    while bucket < longest:
        bucket *= CONTEXT_GROWTH
    return bucket


def _can_be_replayed(sequence: Sequence) -> bool:
    """Whether nothing but penalties changes the logits of the sequence, and nothing but a token is wanted."""
    params = sequence.params
    changed = params.logit_bias or params.bad_word_ids or params.min_tokens or sequence.guide is not None
    return not changed and params.logprobs is None
