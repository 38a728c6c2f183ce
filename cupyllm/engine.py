"""The engine: sequences in, tokens out, one step at a time. Knows token ids only; text lives in tokenizer.py and api/.

A step is four things, and the whole of serving:

    plan     the scheduler chooses which tokens run and reserves their pages
    run      the model computes them and leaves their keys and values in the cache
    sample   one next token for every sequence whose last known token ran
    commit   append the tokens, end what is finished, free its pages

The batch is chosen anew in every step (Orca, Yu et al., 2022): a sequence joins as soon as there is room and leaves
as soon as it ends, and its cache grows page by page (PagedAttention, Kwon et al., 2023). An engine belongs to one
thread.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from cupyllm.batch import Batch, BatchBuilder
from cupyllm.beam_rows import BeamRows
from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.config import EngineConfig
from cupyllm.device import Array, Device
from cupyllm.errors import ContextLengthError, QueueFullError, RequestError
from cupyllm.kv_cache import KVCache
from cupyllm.model import Model, forward, logits
from cupyllm.model_config import GenerationDefaults
from cupyllm.ops.reference import ReferenceOps
from cupyllm.page_allocator import PageAllocator
from cupyllm.plan import Plan
from cupyllm.prefix_cache import PrefixCache
from cupyllm.prompt_reader import PromptReader
from cupyllm.prompt_readout import Pooling, PromptReadout
from cupyllm.sampling import MAX_LOGPROBS, SamplingParams
from cupyllm.sampling_batch import SampleResult, SamplingBatchBuilder
from cupyllm.scheduler import Scheduler
from cupyllm.sequence import FinishReason, Sequence
from cupyllm.step_result import StepResult
from cupyllm.token_guide import AllowedIds

log = logging.getLogger(__name__)

NO_IDS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class EngineStats:
    """How full the engine is."""

    num_running: int
    num_waiting: int
    num_live_pages: int
    num_cached_pages: int
    num_free_pages: int
    num_preemptions: int


class Engine:
    """Runs a model over a paged cache. `add` a prompt, call `step` until `has_work` is false."""

    def __init__(
        self,
        config: EngineConfig,
        model: Model,
        cache: KVCache,
        ops: ReferenceOps,
        device: Device,
        *,
        max_model_len: int,
        vocab_limit: int,
        defaults: GenerationDefaults,
    ) -> None:
        assert max_model_len <= cache.num_pages * cache.page_size
        self.config = config
        self.model = model
        self.max_model_len = max_model_len
        self.defaults = defaults
        self.cache = cache
        self.ops = ops
        self.device = device
        self._next_id = 0
        self._seeds = np.random.default_rng(config.seed)
        self._unforked: dict[int, list[Sequence]] = {}  # sequence id -> those that will share its prompt
        allocator = PageAllocator(cache.num_pages)
        self.scheduler = Scheduler(
            allocator,
            prefix_cache=PrefixCache(allocator, page_size=cache.page_size) if config.prefix_cache else None,
            page_size=cache.page_size,
            max_decode_batch_size=config.max_decode_batch_size,
            max_prefill_batch_size=config.max_prefill_batch_size,
            max_step_tokens=config.max_step_tokens,
        )
        self._beams = BeamRows(self.scheduler, self._new_id)
        self._batches = BatchBuilder(cache.page_size)
        self._sampling = SamplingBatchBuilder(vocab_limit)
        self._prompts = PromptReader(ops, model, device, vocab_limit)
        self._vocab_limit = vocab_limit

    @property
    def has_work(self) -> bool:
        return self.scheduler.num_running > 0 or bool(self.scheduler.waiting)

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, those counted that wait for another's prompt."""
        return len(self.scheduler.waiting) + sum(map(len, self._unforked.values()))

    @property
    def stats(self) -> EngineStats:
        scheduler, allocator = self.scheduler, self.scheduler.allocator
        return EngineStats(
            scheduler.num_running,
            self.num_waiting,
            allocator.num_live,
            allocator.num_cached,
            allocator.num_free,
            scheduler.num_preemptions,
        )

    def add(self, prompt_ids: Seq[int], params: SamplingParams, *, priority: int = 0, cache_salt: str = "") -> Sequence:
        """Queue a prompt. Raises RequestError for what can never be served, QueueFullError when too many wait."""
        (sequence,) = self.add_parallel(prompt_ids, [params], priority=priority, cache_salt=cache_salt)
        return sequence

    def add_parallel(
        self, prompt_ids: Seq[int], params: Seq[SamplingParams], *, priority: int = 0, cache_salt: str = ""
    ) -> list[Sequence]:
        """Queue one prompt for several answers. It is computed once; the answers share its pages and then part.

        Raises what `add` raises; then none has been queued.
        """
        for one in params:
            self.check(prompt_ids, one)
        if self.num_waiting + len(params) > self.config.max_waiting:
            raise QueueFullError(self.num_waiting, self.config.max_waiting)
        first, *others = [self._make_sequence(prompt_ids, one, priority, cache_salt) for one in params]
        if params[0].prompt_logprobs is not None:
            first.readout = PromptReadout(params[0].prompt_logprobs)
            for other in others:
                other.readout = first.readout
        if others:
            self._unforked[first.id] = others
        self.scheduler.add(first)
        return [first, *others]

    def add_embedding(self, prompt_ids: Seq[int], pooling: Pooling, *, priority: int = 0) -> Sequence:
        """Queue a prompt to be read into one vector; it is `readout.embedding` when the sequence has ended.

        Raises what `add` raises.
        """
        sequence = self.add(prompt_ids, SamplingParams(max_tokens=0), priority=priority)
        sequence.readout = PromptReadout(pooling=pooling)
        return sequence

    def add_beams(
        self, prompt_ids: Seq[int], beam: BeamParams, *, priority: int = 0, cache_salt: str = ""
    ) -> BeamSearch:
        """Queue a prompt for a beam search; its answers are in `finished` of the search that `step` returns as ended.

        Raises what `add` raises.
        """
        if beam.beam_width > self.config.max_decode_batch_size:
            raise RequestError(
                f"beam_width {beam.beam_width} needs as many rows, and max_decode_batch_size is "
                f"{self.config.max_decode_batch_size}",
                param="beam_width",
            )
        params = SamplingParams(
            temperature=0.0,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repetition_penalty=1.0,
            max_tokens=beam.max_tokens,
            stop_token_ids=beam.stop_token_ids,
            ignore_eos=beam.ignore_eos,
        )
        end_ids = () if beam.ignore_eos else self.model.config.end_token_ids
        search = BeamSearch(
            beam,
            frozenset((*end_ids, *beam.stop_token_ids)),
            self._max_tokens(beam.max_tokens, prompt_ids),
            len(prompt_ids),
        )
        if search.num_offers > MAX_LOGPROBS:
            raise RequestError(
                f"beam_width {beam.beam_width} with {len(search.end_token_ids)} end tokens needs {search.num_offers} "
                f"candidates a beam; at most {MAX_LOGPROBS} are supported",
                param="beam_width",
            )
        self._beams.start(search, self.add(prompt_ids, params, priority=priority, cache_salt=cache_salt))
        return search

    def step(self) -> StepResult:
        """Plan, run, sample, commit. Returns what every sequence that got a token, or failed, got."""
        plan = self.scheduler.plan()
        if not plan:
            return StepResult()
        if plan.prompts:
            self._note_starts(plan)
        self._copy_pages(plan)
        host_batch = self._batches.build(plan)
        batch = self._upload(host_batch)
        hidden = forward(self.ops, self.model, self.cache, batch)
        self._read_prompts(plan, host_batch, hidden)
        self.scheduler.commit(plan)
        sequences, rows, ended = self._next_of(plan)
        if not sequences:
            return StepResult(ended_prompts=ended)
        scores = logits(self.ops, self.model, hidden, batch.logit_rows)
        if rows is not None:
            scores = self.ops.embedding(self.device.upload(np.array(rows, np.int32)), scores)
        sampled = self.ops.sample(scores, self._sampling.build(sequences))
        return self._commit(sequences, sampled, ended)

    def abort(self, sequence: Sequence, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a sequence now and let its pages go. Aborting a finished one does nothing."""
        if sequence.finish_reason is not None:
            return
        sequence.finish_reason = reason
        for others in self._unforked.values():
            if sequence in others:
                others.remove(sequence)
                return
        for other in self._unforked.pop(sequence.id, []):
            self.scheduler.add(other)  # its prompt was to be shared: now it computes its own
        self.scheduler.remove(sequence)

    def abort_all(self) -> list[Sequence]:
        """End everything that runs or waits, after a step failed; returns what was ended."""
        self._beams.drop_all()
        unforked = [sequence for others in self._unforked.values() for sequence in others]
        sequences = [*self.scheduler.running, *self.scheduler.waiting, *unforked]
        for sequence in sorted(sequences, key=lambda sequence: -sequence.id):
            self.abort(sequence, FinishReason.ERROR)
        return sequences

    def abort_search(self, search: BeamSearch) -> None:
        """End a beam search now. Aborting one that has ended does nothing."""
        self._beams.drop(search)

    def _make_sequence(self, prompt_ids: Seq[int], params: SamplingParams, priority: int, cache_salt: str) -> Sequence:
        params = params.filled(self.defaults)
        end_ids = () if params.ignore_eos else self.model.config.end_token_ids
        sequence = Sequence(
            id=self._new_id(),
            token_ids=list(prompt_ids),
            num_prompt_tokens=len(prompt_ids),
            params=params,
            seed=self._fresh_seed() if params.seed is None else params.seed % 2**64,
            max_tokens=self._max_tokens(params.max_tokens, prompt_ids),
            end_token_ids=frozenset((*end_ids, *params.stop_token_ids)),
            priority=priority,
            cache_salt=cache_salt,
        )
        if params.guide is not None:
            sequence.guide = params.guide.start()
        elif params.allowed_token_ids is not None:
            sequence.guide = AllowedIds(params.allowed_token_ids)
        return sequence

    def _max_tokens(self, asked: int | None, prompt_ids: Seq[int]) -> int:
        return self.max_model_len - len(prompt_ids) if asked is None else asked

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id - 1

    def _copy_pages(self, plan: Plan) -> None:
        if not plan.page_copies:
            return
        sources, copies = (
            self.device.upload(np.array(pages, np.int32)) for pages in zip(*plan.page_copies, strict=True)
        )
        for keys, values in zip(self.cache.keys, self.cache.values, strict=True):
            self.ops.copy_pages(keys, values, sources, copies)

    def _read_prompts(self, plan: Plan, batch: Batch, hidden: Array) -> None:
        """Read what requests want of the prompts in this step. The first rows are decodes."""
        for chunk, first_row in zip(plan.prompts, batch.query_starts[plan.num_decodes : -1].tolist(), strict=True):
            self._prompts.read(chunk, hidden, first_row)

    def _note_starts(self, plan: Plan) -> None:
        now = time.monotonic()
        for chunk in plan.prompts:
            chunk.sequence.started_at = chunk.sequence.started_at or now

    def _next_of(self, plan: Plan) -> tuple[list[Sequence], list[int] | None, list[Sequence]]:
        """The sequences that get a token in this step, the row of logits of each, and those that end without one.

        Those are the decode rows, then the prompts that have been computed. A prompt that was computed for several
        answers is forked here, and they share its row. The rows are None where each sequence has its own, in order.
        """
        if not any(chunk.reaches_end for chunk in plan.prompts):
            return plan.decodes, None, []
        sequences, rows = list(plan.decodes), list(range(plan.num_decodes))
        ended: list[Sequence] = []
        computed = [chunk.sequence for chunk in plan.prompts if chunk.reaches_end]
        for row, sequence in enumerate(computed, start=plan.num_decodes):
            others = self._unforked.pop(sequence.id, [])
            if sequence.max_tokens == 0:
                ended += self._end_unanswered(sequence, others)
                continue
            for other in others:
                self.scheduler.fork(sequence, other)
            sequences += [sequence, *others]
            rows += [row] * (1 + len(others))
        return sequences, None if rows == list(range(plan.num_decodes + len(computed))) else rows, ended

    def _end_unanswered(self, sequence: Sequence, others: list[Sequence]) -> list[Sequence]:
        """End a sequence that only had its prompt to be read, and those that waited to share it."""
        for one in (sequence, *others):
            one.finish_reason = FinishReason.LENGTH
        self.scheduler.remove(sequence)
        return [sequence, *others]

    def _commit(self, sequences: list[Sequence], sampled: SampleResult, ended: list[Sequence]) -> StepResult:
        sampled = SampleResult(**{name: self.device.download(array) for name, array in vars(sampled).items()})
        token_ids = sampled.token_ids.tolist()
        beams = frozenset(sequence.id for sequence in sequences if sequence in self._beams) if self._beams else NO_IDS
        for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            if sequence.id in beams:
                self._beams.offer(sequence, sampled, row)
            elif token_id < 0:
                self.abort(sequence, FinishReason.ERROR)
            elif sequence.append(token_id) is not None:
                self.scheduler.remove(sequence)
            elif sequence.guide is not None:
                self._advance_guide(sequence, token_id)
        searches = self._beams.advance() if beams else []
        return StepResult(sequences, token_ids, sampled, beams, searches, ended)

    def _advance_guide(self, sequence: Sequence, token_id: int) -> None:
        assert sequence.guide is not None
        try:
            sequence.guide.advance(token_id)
        except Exception:
            log.exception("a guide failed; its sequence ends with an error")
            self.abort(sequence, FinishReason.ERROR)

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> None:
        """Refuse what can never be served: raises RequestError naming the field. Any thread may call it."""
        if len(prompt_ids) == 0:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        if self.model.weights.lm_head is None and (params.max_tokens != 0 or params.prompt_logprobs is not None):
            raise RequestError("this model was saved without its output head: it can only embed", param="model")
        self._check_ids(prompt_ids, "prompt", "prompt token {place}")
        self._check_ids(params.stop_token_ids, "stop_token_ids", "stop_token_ids entry {place}")
        self._check_ids(tuple(params.logit_bias or ()), "logit_bias", "logit_bias key {place}")
        allowed = params.allowed_token_ids
        self._check_ids(allowed or (), "allowed_token_ids", "allowed_token_ids entry {place}")
        if allowed is not None and min(allowed) >= self._vocab_limit:
            raise RequestError("allowed_token_ids holds no id that has a token", param="allowed_token_ids")
        if params.max_tokens is None and params.min_tokens > self.max_model_len - len(prompt_ids) > 0:
            raise ContextLengthError(
                f"min_tokens is {params.min_tokens}, but after {len(prompt_ids)} tokens of prompt the context of "
                f"{self.max_model_len} holds {self.max_model_len - len(prompt_ids)} more",
                param="min_tokens",
            )
        output = 1 if params.max_tokens is None else params.max_tokens
        asked = len(prompt_ids) + output
        if asked > self.max_model_len:
            raise ContextLengthError(
                f"the context holds {self.max_model_len} tokens, but {asked} were asked for: {len(prompt_ids)} in the "
                f"prompt and {'at least 1' if params.max_tokens is None else output} to generate; "
                "shorten the prompt or lower max_tokens",
                param="prompt",
            )

    def _check_ids(self, token_ids: Seq[int], param: str, what: str) -> None:
        vocab_size = self.model.config.vocab_size
        if len(token_ids) == 0 or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return
        place, wrong = next((p, t) for p, t in enumerate(token_ids) if not 0 <= t < vocab_size)
        raise RequestError(
            f"{what.format(place=place)} is {wrong}; token ids go from 0 to {vocab_size - 1}", param=param
        )

    def _upload(self, batch: Batch) -> Batch:
        arrays = {k: self.device.upload(v) for k, v in batch._asdict().items() if isinstance(v, np.ndarray)}
        return batch._replace(**arrays)

    def _fresh_seed(self) -> int:
        """A seed for a request that gave none: reproducible when the config has a seed, else from the system."""
        if self.config.seed is None:
            return secrets.randbits(64)
        return int(self._seeds.integers(2**64, dtype=np.uint64))
