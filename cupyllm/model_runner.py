"""Runs what was planned on the device: pages are copied, arrays uploaded, layers run, prompts read, tokens sampled.

Everything here is queued on the device's stream in order; nothing waits for a result but what prompts are read for. The
tokens of the step before may still be unknown to the host: then they are taken over where they lie, on the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cupyllm.batch import Batch, BatchBuilder
from cupyllm.device import Array, Device
from cupyllm.kv_cache import KVCache
from cupyllm.model import Model, forward, logits
from cupyllm.ops.reference import ReferenceOps
from cupyllm.plan import Plan
from cupyllm.prompt_reader import PromptReader
from cupyllm.sampling_batch import SampleResult, SamplingBatchBuilder
from cupyllm.sequence import Sequence


@dataclass(frozen=True)
class Unread:
    """Tokens that have been sampled and not yet been read by the host: one for each sequence, in order."""

    sequences: list[Sequence]
    sampled: SampleResult | None  # arrays of the device; None where there are no sequences


class ModelRunner:
    """A model, its cache and the ops that run it."""

    def __init__(self, model: Model, cache: KVCache, ops: ReferenceOps, device: Device, *, vocab_limit: int) -> None:
        self.model = model
        self.cache = cache
        self.ops = ops
        self.device = device
        self._vocab_limit = vocab_limit
        self._batches = BatchBuilder(cache.page_size)
        self._sampling = SamplingBatchBuilder(vocab_limit)

    @property
    def must_know_tokens(self) -> bool:
        """Whether some row that was sampled last needs to know its token before the next one can be sampled."""
        return self._sampling.changes_by_step

    def run(self, plan: Plan, unread: Unread | None) -> tuple[Array, Batch]:
        """Write the keys and values of the planned tokens, read the prompts among them; returns the hidden states of
        all tokens, (T, C), and the batch on the device.
        """
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
        return hidden, batch

    def sample(self, hidden: Array, batch: Batch, sequences: list[Sequence], rows: list[int] | None) -> SampleResult:
        """One token for each sequence, on the device. `rows` says which of the batch's rows of logits are theirs; None
        where they are the same, in order.
        """
        scores = logits(self.ops, self.model, hidden, batch.logit_rows)
        if rows is not None:
            scores = self.ops.embedding(self.device.upload(np.array(rows, np.int32)), scores)
        return self.ops.sample(scores, self._sampling.build(sequences))

    def download(self, sampled: SampleResult) -> SampleResult:
        """The arrays on the host; waits for them."""
        return SampleResult(**{name: self.device.download(array) for name, array in vars(sampled).items()})

    def _take_over(self, decodes: list[Sequence], token_ids: Array, unread: Unread, sampled: SampleResult) -> Array:
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
