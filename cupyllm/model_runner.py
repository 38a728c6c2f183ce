"""Runs what was planned on the device: pages are copied, arrays uploaded, layers run, prompts read, tokens sampled.

Everything here is queued on the device's stream in order; nothing waits for a result but what prompts are read for. The
tokens of the step before may still be unknown to the host: then they are taken over where they lie, on the device.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cupyllm.batch import Batch, BatchBuilder
from cupyllm.decode_graphs import DecodeGraphs
from cupyllm.device import Array, Device
from cupyllm.errors import DeadEndError
from cupyllm.kv_cache import KVCache
from cupyllm.model import Model, final_norm, forward, logits
from cupyllm.ops.reference import ReferenceOps
from cupyllm.plan import Plan
from cupyllm.prompt_reader import PromptReader
from cupyllm.sampling_batch import SamplingBatchBuilder, find_dead_end
from cupyllm.sequence import PENDING, Sequence
from cupyllm.unread import Sampled, Unread


class Computed(NamedTuple):
    """What a step has computed: the hidden states of all tokens, (T, C), and their batch on the device, to sample from.

    A replayed step has sampled already, or gives the hidden states of its rows alone, and no batch.
    """

    hidden: Array | None
    batch: Batch | None
    sampled: Sampled | None


class ModelRunner:
    """A model, its cache and the ops that run it."""

    def __init__(
        self,
        model: Model,
        cache: KVCache,
        ops: ReferenceOps,
        device: Device,
        *,
        vocab_limit: int,
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """With `graphs`, over the same cache and device, decode steps are replayed where they can be."""
        self.model = model
        self.cache = cache
        self.ops = ops
        self.device = device
        self._vocab_limit = vocab_limit
        self._batches = BatchBuilder(cache.page_size)
        self._sampling = SamplingBatchBuilder(vocab_limit)
        self.graphs = graphs

    @property
    def must_know_tokens(self) -> bool:
        """Whether some row that was sampled last needs to know its token before the next one can be sampled."""
        return self._sampling.changes_by_step

    def must_be_told(self, plan: Plan) -> bool:
        """Whether the host must read tokens before the step can be launched: where it penalises them one by one."""
        if self.graphs is None or self.graphs.samples(plan):
            return False
        return any(sequence.params.penalises and sequence.token_ids[-1] == PENDING for sequence in plan.decodes)

    def run(self, plan: Plan, unread: Unread | None) -> Computed:
        """Write the keys and values of the planned tokens, and read the prompts among them."""
        if self.graphs is not None:
            if self.graphs.takes(plan):
                return self._replay(self.graphs, plan, unread)
            self.graphs.leave()
        self._copy_pages(plan)
        batch = self._batches.build(plan)
        first_rows = batch.query_starts[plan.num_decodes : -1].tolist() if plan.prompts else []
        batch = self._upload(batch)
        if plan.decodes and unread is not None and unread.sampled is not None:
            batch = batch._replace(token_ids=self._take_over(plan.decodes, batch.token_ids, unread, unread.sampled))
        hidden = forward(self.ops, self.model, self.cache, batch)
        reader = PromptReader(self.ops, self.model, self.device, self._vocab_limit)
        for chunk, first_row in zip(plan.prompts, first_rows, strict=True):
            reader.read(chunk, hidden, first_row)
        return Computed(hidden, batch, None)

    def sample(self, computed: Computed, sequences: list[Sequence], rows: list[int] | None) -> Sampled:
        """One token for each sequence, on the device. `rows` says which of the batch's rows of logits are theirs; None
        where they are the same, in order.
        """
        hidden, batch, sampled = computed
        if sampled is not None:
            return sampled
        assert hidden is not None
        if batch is None:
            scores = self.ops.linear(hidden, self.model.weights.lm_head, norm=final_norm(self.model))
        else:
            scores = logits(self.ops, self.model, hidden, batch.logit_rows)
        if rows is not None:
            scores = self.ops.embedding(self.device.upload(np.array(rows, np.int32)), scores)
        result = self.ops.sample(scores, self._sampling.build(sequences))
        if batch is None and self.graphs is not None:
            self.graphs.put_tokens(result.token_ids)
        return Sampled(result.token_ids, self.device, result if len(result.logprobs) else None)

    def dead_end(self, sequence: Sequence) -> DeadEndError | None:
        """Why no token could be chosen for `sequence`, where its request left none; None where that is not why."""
        return find_dead_end(sequence, self._vocab_limit)

    def _replay(self, graphs: DecodeGraphs, plan: Plan, unread: Unread | None) -> Computed:
        """Run a captured step, over rows that stay on the device."""
        self._batches.follow(plan)
        result = graphs.run(plan, self._batches, unread)
        if not graphs.samples(plan):
            return Computed(result, None, None)
        self._sampling.forget()
        return Computed(None, None, Sampled(result, self.device))

    def _take_over(self, decodes: list[Sequence], token_ids: Array, unread: Unread, sampled: Sampled) -> Array:
        """The token ids of a batch whose decode rows got a token that is still unread, all but those that were computed
        again.
        """
        places = {sequence.id: place for place, sequence in enumerate(unread.sequences)}
        rows = np.full(len(token_ids), -1, np.int32)
        rows[: len(decodes)] = [places.get(sequence.id, -1) for sequence in decodes]
        return self.ops.fill_tokens(token_ids, sampled.token_ids, self.device.upload(rows))

    def _copy_pages(self, plan: Plan) -> None:
        if not plan.page_copies:
            return
        sources, copies = (
            self.device.upload(np.array(pages, np.int32)) for pages in zip(*plan.page_copies, strict=True)
        )
        for keys, values in zip(self.cache.keys, self.cache.values, strict=True):
            self.ops.copy_pages(keys, values, sources, copies)

    def _upload(self, batch: Batch) -> Batch:
        arrays = {k: self.device.upload(v) for k, v in batch._asdict().items() if isinstance(v, np.ndarray)}
        return batch._replace(**arrays)
