"""The whole decode step as one captured graph: advance, embedding, layers, head and sampling, replayed with one call.

A graph has its sizes baked in, so there is one for each bucket of rows, of context lengths, and of whether all rows are
greedy; it is captured when it is first needed. Rows that only fill a bucket up are not in use: they write no key and
no value, and nobody reads what they sample. Everything that changes from step to step lies in the decode rows on the
device (decode_rows.py), which the graph itself moves on.
"""

from __future__ import annotations

import logging
import time
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
    all_greedy: bool

    def __str__(self) -> str:
        return f"{self.rows} {'greedy' if self.all_greedy else 'sampled'} rows, contexts up to {self.max_context_len}"


class DecodeGraphs:
    """Runs the decode steps that can be replayed: plain rows, and nothing beside them."""

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
        self._layout = RowLayout(max_rows, max_pages=-(-max_model_len // cache.page_size))
        self._rows = DecodeRows(ops, device, self._layout, page_size=cache.page_size, vocab_limit=vocab_limit)
        self._graphs: dict[GraphKey, Graph] = {}
        self._looked_at: list[Sequence] = []
        self._are_plain = False
        self.num_replays = 0

    @property
    def graphs(self) -> dict[GraphKey, Graph]:
        """What has been captured."""
        return self._graphs

    def takes(self, plan: Plan) -> bool:
        """Whether the step can be replayed: decode rows alone, which all sample from the logits as they are."""
        if plan.prompts or plan.page_copies:
            return False
        if plan.decodes != self._looked_at:
            self._looked_at, self._are_plain = plan.decodes, all(map(_is_plain, plan.decodes))
        return self._are_plain

    def leave(self) -> None:
        """A step ran in another way."""
        self._rows.leave()

    def run(self, plan: Plan, batches: BatchBuilder, unread: Unread | None) -> Array:
        """Run a step that `takes` took; returns the sampled tokens on the device, (S,) int32, until the next step."""
        self._rows.follow(plan, batches, unread)
        key = GraphKey(
            bucket_of(len(plan.decodes), self._layout.max_rows),
            context_bucket(batches.max_context_len),
            self._rows.all_greedy,
        )
        graph = self._graphs.get(key) or self._add(key)
        try:
            graph.replay()
        except Exception:
            self._rows.lose_track()
            raise
        self.num_replays += 1
        self._rows.moved_on()
        return self._rows.sampled

    def _add(self, key: GraphKey) -> Graph:
        start = time.perf_counter()

        def warm_up() -> None:
            self._step(RowArrays(self._layout, self._device, vocab_limit=self._vocab_limit), key)

        graph = self._capture(lambda: self._step(self._rows.arrays, key), warm_up)
        milliseconds = (time.perf_counter() - start) * 1e3
        size = f"{graph.num_launches} launches, {graph.num_bytes / 2**20:.1f} MiB"
        log.info("captured a decode step (%s): %s, %.0f ms", key, size, milliseconds)
        self._graphs[key] = graph
        return graph

    def _step(self, rows: RowArrays, key: GraphKey) -> None:
        """What is captured: nothing here may depend on the values of a step."""
        batch, sampled = rows.batch(key.rows, key.max_context_len), rows.fields.sampled[: key.rows]
        table = self._model.weights.embedding
        x = self._ops.advance_rows(batch, sampled, table, page_size=self._cache.page_size)
        hidden = all_layers(self._ops, self._model, x, self._cache, batch)
        scores = self._ops.linear(hidden, self._model.weights.lm_head, norm=final_norm(self._model))
        self._ops.sample_rows(scores, rows.sampling(key.rows), all_greedy=key.all_greedy, out=sampled)


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


def _is_plain(sequence: Sequence) -> bool:
    """Whether the sequence samples from the logits as they are, and wants nothing but a token."""
    params = sequence.params
    changed = params.repetition_penalty != 1.0 or params.changes_logits or sequence.guide is not None
    return not changed and params.logprobs is None
