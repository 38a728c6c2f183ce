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

import secrets
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np

from cupyllm.batch import Batch, BatchBuilder
from cupyllm.beam_rows import BeamRows
from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.config import EngineConfig
from cupyllm.device import Array, Device
from cupyllm.errors import ContextLengthError, QueueFullError, RequestError
from cupyllm.kv_cache import KVCache
from cupyllm.model import Model, forward
from cupyllm.model_config import GenerationDefaults
from cupyllm.ops.reference import ReferenceOps
from cupyllm.page_allocator import PageAllocator
from cupyllm.plan import Plan
from cupyllm.prefix_cache import PrefixCache
from cupyllm.sampling import MAX_LOGPROBS, SampleResult, SamplingBatchBuilder, SamplingParams
from cupyllm.scheduler import Scheduler
from cupyllm.sequence import FinishReason, Sequence

NO_IDS: frozenset[int] = frozenset()


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of a chosen token and of the most likely ones, (id, logprob), most likely first."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class TokenEvent:
    """What a step gave one sequence: a token (None if it failed), and the reason if that was its last."""

    sequence: Sequence
    token_id: int | None
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class StepResult:
    """What a step gave: one token for each of `sequences`, -1 for one that failed, and searches that have ended.

    Iterating gives TokenEvents; the tokens of beams are only known when their search has ended.
    """

    sequences: list[Sequence] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    sampled: SampleResult | None = None
    beams: frozenset[int] = frozenset()  # ids of the sequences among them that belong to a search
    ended_searches: list[BeamSearch] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[TokenEvent]:
        for row, (sequence, token_id) in enumerate(zip(self.sequences, self.token_ids, strict=True)):
            if sequence.id in self.beams:
                continue
            if token_id < 0:
                yield TokenEvent(sequence, None, None, FinishReason.ERROR)
            else:
                logprobs = _logprobs(sequence, self.sampled, row)
                yield TokenEvent(sequence, token_id, logprobs, sequence.finish_reason)


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
            raise QueueFullError(
                f"{self.num_waiting} sequences are waiting and at most {self.config.max_waiting} may (max_waiting); "
                "try again later"
            )
        first, *others = [self._make_sequence(prompt_ids, one, priority, cache_salt) for one in params]
        if others:
            self._unforked[first.id] = others
        self.scheduler.add(first)
        return [first, *others]

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
            beam.max_tokens or self.max_model_len - len(prompt_ids),
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
        self._copy_pages(plan)
        batch = self._upload(self._batches.build(plan))
        logits = forward(self.ops, self.model, self.cache, batch)
        self.scheduler.commit(plan)
        sequences = self._fork(plan)
        if not sequences:
            return StepResult()
        if len(sequences) > len(batch.logit_rows):
            logits = self._repeat_rows(logits, plan, sequences)
        sampled = self.ops.sample(logits, self._sampling.build(sequences))
        return self._commit(sequences, sampled)

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
            max_tokens=params.max_tokens or self.max_model_len - len(prompt_ids),
            end_token_ids=frozenset((*end_ids, *params.stop_token_ids)),
            priority=priority,
            cache_salt=cache_salt,
        )
        return sequence

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

    def _fork(self, plan: Plan) -> list[Sequence]:
        """The sequences that get a token in this step: the decode rows, then those whose prompt has been computed.

        A prompt that was computed for several answers is forked here: each of them gets a token of its own.
        """
        sequences = plan.decodes
        ended = [chunk.sequence for chunk in plan.prompts if chunk.reaches_end]
        for sequence in ended:
            others = self._unforked.pop(sequence.id, [])
            for other in others:
                self.scheduler.fork(sequence, other)
            sequences = [*sequences, sequence, *others]
        return sequences

    def _repeat_rows(self, logits: Array, plan: Plan, sequences: list[Sequence]) -> Array:
        """One row of logits for each of `sequences`: those that were forked share their prompt's row."""
        rows, row = [], -1
        ended = {chunk.sequence.id for chunk in plan.prompts if chunk.reaches_end}
        for place, sequence in enumerate(sequences):
            row += place < len(plan.decodes) or sequence.id in ended
            rows.append(row)
        return self.ops.embedding(self.device.upload(np.array(rows, np.int32)), logits)

    def _commit(self, sequences: list[Sequence], sampled: SampleResult) -> StepResult:
        sampled = SampleResult(*(self.device.download(array) for array in vars(sampled).values()))
        token_ids = sampled.token_ids.tolist()
        beams = frozenset(sequence.id for sequence in sequences if sequence in self._beams) if self._beams else NO_IDS
        for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            if sequence.id in beams:
                self._beams.offer(sequence, sampled, row)
            elif token_id < 0:
                self.abort(sequence, FinishReason.ERROR)
            elif sequence.append(token_id) is not None:
                self.scheduler.remove(sequence)
        return StepResult(sequences, token_ids, sampled, beams, self._beams.advance() if beams else [])

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> None:
        """Refuse what can never be served: raises RequestError naming the field. Any thread may call it."""
        if len(prompt_ids) == 0:
            raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
        self._check_ids(prompt_ids, "prompt", "prompt token {place}")
        self._check_ids(params.stop_token_ids, "stop_token_ids", "stop_token_ids entry {place}")
        asked = len(prompt_ids) + (params.max_tokens or 1)
        if asked > self.max_model_len:
            raise ContextLengthError(
                f"the context holds {self.max_model_len} tokens, but {asked} were asked for: "
                f"{len(prompt_ids)} in the prompt and {params.max_tokens or 'at least 1'} to generate; "
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


def _logprobs(sequence: Sequence, sampled: SampleResult | None, row: int) -> TokenLogprobs | None:
    count = sequence.params.logprobs
    if count is None or sampled is None:
        return None
    ids, values = sampled.top_ids[row, :count].tolist(), sampled.top_logprobs[row, :count].tolist()
    return TokenLogprobs(float(sampled.logprobs[row]), tuple(zip(ids, values, strict=True)))
