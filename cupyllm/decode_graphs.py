"""The whole decode step as one captured graph: advance, embedding, layers, head and sampling, replayed with one call.

A graph has its sizes baked in, so there is one for each bucket of rows, of context lengths, and of how the rows are
sampled; it is captured at the start or when it is first needed. Rows that only fill a bucket up are not in use: they
write no key and no value, and nobody reads what they sample. Everything that changes from step to step lies in the
decode rows on the device (decode_rows.py), which the graph itself moves on.

Where the host has to know more of a row than its last token, or to make something for it (a mask, a bias), the graph
ends behind the last layer. Head and sampling are launched by themselves then, and the tokens put back into the rows.
"""

from __future__ import annotations

import logging
import time
from itertools import product
from typing import Literal, NamedTuple, get_args

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


# How the rows get their tokens: "greedy", all take the most likely one of the logits as they are; "sampled", by all
# that RowSampling has; "unsampled", the graph gives hidden states, and the rest is launched by itself.
SamplingKind = Literal["greedy", "sampled", "unsampled"]


class GraphKey(NamedTuple):
    """What is baked into a graph."""

    rows: int
    max_context_len: int
    kind: SamplingKind

    def __str__(self) -> str:
        return f"{self.rows} {self.kind} rows, contexts up to {self.max_context_len}"


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
        self._hidden: dict[GraphKey, Array] = {}  # (R, C) float32: what the unsampled graphs give
        self._looked_at: list[Sequence] = []
        self._can_run = self._can_sample = False  # whether graphs can run and can sample all of these
        self.num_replays = 0

    @property
    def graphs(self) -> dict[GraphKey, Graph]:
        """What has been captured."""
        return self._graphs

    def takes(self, plan: Plan) -> bool:
        """Whether the step can be replayed: decode rows alone, and each runs the token that was sampled for it."""
        if plan.prompts or plan.page_copies:
            return False
        if plan.decodes != self._looked_at:
            self._looked_at = plan.decodes
            self._can_run = not any(sequence.is_beam for sequence in plan.decodes)
            self._can_sample = self._can_run and all(map(_can_be_sampled, plan.decodes))
        return self._can_run

    def samples(self, plan: Plan) -> bool:
        """Whether the step can be replayed with its sampling: nothing is wanted that only the host can do."""
        return self.takes(plan) and self._can_sample

    def leave(self) -> None:
        """A step ran in another way."""
        self._rows.leave()

    def run(self, plan: Plan, batches: BatchBuilder, unread: Unread | None) -> Array:
        """Run a step that `takes` took; returns an array on the device, there until the next step.

        That is the sampled tokens, (S,) int32, or, where it does not sample, the hidden states behind the last layer,
        (S, C) float32; `put_tokens` has to be called then.
        """
        self._rows.follow(plan, batches, unread)
        kind: SamplingKind = "greedy" if self._rows.all_plain else "sampled"
        key = GraphKey(
            bucket_of(len(plan.decodes), self._layout.max_rows),
            context_bucket(batches.max_context_len),
            kind if self._can_sample else "unsampled",
        )
        graph = self._graphs.get(key) or self._capture_late(key)
        try:
            graph.replay()
        except Exception:
            self._rows.lose_track()
            raise
        self.num_replays += 1
        self._rows.moved_on(has_sampled=self._can_sample)
        return self._rows.sampled if self._can_sample else self._hidden[key][: len(plan.decodes)]

    def put_tokens(self, token_ids: Array) -> None:
        """What was sampled from the hidden states of the step that `run` ran: (S,) int32 on the device."""
        self._rows.put_tokens(token_ids)

    @property
    def keys(self) -> list[GraphKey]:
        """Every graph that a step can need. Large ones first, so that the small ones find room in their memory."""
        most = self._layout.max_rows
        rows = sorted({bucket_of(count, most) for count in range(1, most + 1)}, reverse=True)
        contexts = [SMALLEST_CONTEXT]
        while contexts[-1] < self._longest:
            contexts.append(contexts[-1] * CONTEXT_GROWTH)
        return [GraphKey(*sizes) for sizes in product(rows, reversed(contexts), get_args(SamplingKind))]

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
        counts = None if key.kind == "greedy" else rows.counts[: key.rows]
        x = self._ops.advance_rows(batch, sampled, table, counts=counts, page_size=page_size)
        hidden = all_layers(self._ops, self._model, x, self._cache, batch)
        if key.kind == "unsampled":
            self._hidden[key] = hidden
            return
        scores = self._ops.linear(hidden, self._model.weights.lm_head, norm=final_norm(self._model))
        self._ops.sample_rows(scores, rows.sampling(key.rows), all_plain=key.kind == "greedy", out=sampled)


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


def _can_be_sampled(sequence: Sequence) -> bool:
    """Whether nothing but penalties changes the logits of the sequence, and nothing but a token is wanted."""
    params = sequence.params
    changed = params.logit_bias or params.bad_word_ids or params.min_tokens or sequence.guide is not None
    return not changed and params.logprobs is None
