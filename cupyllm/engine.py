"""The engine: sequences in, tokens out, one step at a time. Knows token ids only; text lives in tokenizer.py and api/.

A step is four things, and the whole of serving:

    plan     the scheduler chooses which tokens run and reserves their pages
    run      the model computes them and leaves their keys and values in the cache
    sample   one next token for every sequence whose last known token ran
    commit   append the tokens, end what is finished, free its pages

The batch is chosen anew in every step (Orca, Yu et al., 2022): a sequence joins as soon as there is room and leaves
as soon as it ends, and its cache grows page by page (PagedAttention, Kwon et al., 2023). An engine belongs to one
thread.

With overlap a step commits the tokens of the step before, while its own are still being computed: the device never
waits for the host. A sequence that turns out to have ended then runs one token in vain, which is thrown away. Where the
next choice depends on the last token (grammars, beams, penalties but for those of captured steps), it is read first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cupyllm.admission import Admission
from cupyllm.beam_rows import BeamRows
from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.config import EngineConfig
from cupyllm.decode_graphs import DecodeGraphs
from cupyllm.device import Capture, Device
from cupyllm.engine_stats import EngineStats
from cupyllm.errors import QueueFullError
from cupyllm.kv_cache import KVCache
from cupyllm.model import Model
from cupyllm.model_config import GenerationDefaults
from cupyllm.model_runner import ModelRunner
from cupyllm.ops.reference import ReferenceOps
from cupyllm.page_allocator import PageAllocator
from cupyllm.plan import Plan
from cupyllm.prefix_cache import PrefixCache
from cupyllm.prompt_readout import Pooling, PromptReadout
from cupyllm.sampling import SamplingParams
from cupyllm.scheduler import Scheduler
from cupyllm.sequence import FinishReason, Sequence
from cupyllm.step_result import PASSED_OVER, SampledTokens, StepResult
from cupyllm.unread import Unread

log = logging.getLogger(__name__)

NO_IDS: frozenset[int] = frozenset()
Observer = Callable[[Plan, StepResult, float], None]  # the plan, what it gave, seconds of time.monotonic at its start


@dataclass(frozen=True)
class _Launched(Unread):
    """A step whose tokens have not been read yet.

    read_prompts    sequences that only had their prompt to be read
    must_be_read    nothing more can be planned, or sampled, before these tokens are known
    """

    read_prompts: list[Sequence]
    must_be_read: bool


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
        capture: Capture | None = None,
    ) -> None:
        """With `capture`, what captures launches of `ops`, decode steps are replayed as graphs."""
        assert max_model_len <= cache.num_pages * cache.page_size
        self.config = config
        limits = {"max_rows": config.max_decode_batch_size, "max_model_len": max_model_len, "vocab_limit": vocab_limit}
        graphs = DecodeGraphs(capture, model, cache, ops, device, **limits) if capture else None
        self.runner = ModelRunner(model, cache, ops, device, vocab_limit=vocab_limit, graphs=graphs)
        self.admission = Admission(
            model.config,
            defaults,
            max_model_len=max_model_len,
            max_decode_batch_size=config.max_decode_batch_size,
            vocab_limit=vocab_limit,
            has_head=model.weights.lm_head is not None,
            seed=config.seed,
        )
        allocator = PageAllocator(cache.num_pages)
        self.scheduler = Scheduler(
            allocator,
            prefix_cache=PrefixCache(allocator, page_size=cache.page_size) if config.prefix_cache else None,
            page_size=cache.page_size,
            max_decode_batch_size=config.max_decode_batch_size,
            max_prefill_batch_size=config.max_prefill_batch_size,
            max_step_tokens=config.max_step_tokens,
        )
        self.observer: Observer | None = None  # is told of every step, once it has ended
        self._overlap = device.is_async if config.overlap == "auto" else config.overlap
        self._beams = BeamRows(self.scheduler, self.admission.new_id)
        self._unforked: dict[int, list[Sequence]] = {}  # sequence id -> those that will share its prompt
        self._launched: _Launched | None = None  # the step before, where its tokens have not been read
        self._left: list[Sequence] = []  # gone from the scheduler, since they end when the step on its way is read

    @property
    def ops(self) -> ReferenceOps:
        """What the model runs on. Tests and benchmarks put others in its place."""
        return self.runner.ops

    @ops.setter
    def ops(self, ops: ReferenceOps) -> None:
        self.runner.ops = ops

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.admission.max_model_len

    @property
    def has_work(self) -> bool:
        return self.scheduler.num_running > 0 or bool(self.scheduler.waiting) or self._launched is not None

    @property
    def num_waiting(self) -> int:
        """Sequences that wait, those counted that wait for another's prompt."""
        return len(self.scheduler.waiting) + sum(map(len, self._unforked.values()))

    @property
    def stats(self) -> EngineStats:
        replays = 0 if self.runner.graphs is None else self.runner.graphs.num_replays
        return EngineStats.of(self.scheduler, num_waiting=self.num_waiting, num_graph_replays=replays)

    def check(self, prompt_ids: Seq[int], params: SamplingParams) -> None:
        """Refuse what can never be served: raises RequestError naming the field. Any thread may call it."""
        self.admission.check(prompt_ids, params)

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
        wanted = params[0].prompt_logprobs
        readout = None if wanted is None else PromptReadout(wanted)
        return self._add(prompt_ids, params, readout, priority, cache_salt)

    def add_embedding(self, prompt_ids: Seq[int], pooling: Pooling, *, priority: int = 0) -> Sequence:
        """Queue a prompt to be read into one vector; it is `readout.embedding` when the sequence has ended.

        Raises what `add` raises.
        """
        (sequence,) = self._add(prompt_ids, [SamplingParams(max_tokens=0)], PromptReadout(pooling=pooling), priority)
        return sequence

    def add_beams(
        self, prompt_ids: Seq[int], beam: BeamParams, *, priority: int = 0, cache_salt: str = ""
    ) -> BeamSearch:
        """Queue a prompt for a beam search; its answers are in `finished` of the search that `step` returns as ended.

        Raises what `add` raises.
        """
        search, params = self.admission.make_search(prompt_ids, beam)
        self._beams.start(search, self.add(prompt_ids, params, priority=priority, cache_salt=cache_salt))
        return search

    def _add(
        self,
        prompt_ids: Seq[int],
        params: Seq[SamplingParams],
        readout: PromptReadout | None,
        priority: int,
        cache_salt: str = "",
    ) -> list[Sequence]:
        """Everything is checked and made before anything is queued, so that what fails leaves nothing behind."""
        for one in params:
            self.check(prompt_ids, one)
        if self.num_waiting + len(params) > self.config.max_waiting:
            raise QueueFullError(self.num_waiting, self.config.max_waiting)
        sequences = [self.admission.make_sequence(prompt_ids, one, priority, cache_salt) for one in params]
        for sequence in sequences:
            sequence.readout = readout
            sequence.queued_at = time.monotonic()
        first, *others = sequences
        self.scheduler.add(first)
        if others:
            self._unforked[first.id] = others
        return sequences

    def step(self) -> StepResult:
        """Plan, run, sample, commit. Returns what every sequence whose token became known got."""
        started = time.monotonic()
        plan = self.scheduler.plan()
        result = self._run(plan)
        if self.observer is not None:
            self.observer(plan, result, started)
        return result

    def _run(self, plan: Plan) -> StepResult:
        before, self._launched = self._launched, None
        result = StepResult()
        if before is not None and self.runner.must_be_told(plan):
            result, before = self._commit(before), None
            plan.decodes = list(self.scheduler.decoding)  # without those that turn out to have ended
        launched = self._launch(plan, before) if plan else None
        if before is not None:
            result = self._commit(before)
        if launched is None:
            return result
        if launched.must_be_read:
            return result + self._commit(launched)
        self._let_last_ones_leave(launched.sequences)
        self._launched = launched
        return result

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
        self._remove(sequence)

    def abort_all(self) -> list[Sequence]:
        """End everything that runs or waits, after a fault; returns what was ended.

        An abort that failed half-way may have left a sequence that is ended already and still here.
        """
        self._beams.drop_all()
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        others = [*self._left, *(sequence for forks in self._unforked.values() for sequence in forks)]
        for sequence in (*queued, *others):
            sequence.finish_reason = FinishReason.ERROR
        for sequence in queued:
            self.scheduler.remove(sequence)
        self._unforked.clear()
        self._left.clear()
        self._launched = None
        return [*queued, *others]

    def check_idle(self) -> None:
        """Assert that nothing runs or waits and no page is held; raises AssertionError naming what does not hold."""
        self.scheduler.check_integrity()
        assert not self.has_work, "sequences run or wait"
        assert self.scheduler.allocator.num_live == 0, "pages are held"
        assert not self._beams, "beams live"

    def abort_search(self, search: BeamSearch) -> None:
        """End a beam search now. Aborting one that has ended does nothing."""
        self._beams.drop(search)

    def _launch(self, plan: Plan, before: _Launched | None) -> _Launched:
        """Run what was planned, and sample; the tokens stay on the device."""
        _note_starts(plan)
        computed = self.runner.run(plan, before)
        self.scheduler.commit(plan)
        sequences, rows, read = self._next_of(plan)
        sampled = self.runner.sample(computed, sequences, rows) if sequences else None
        fork_waits = any(not sequence.page_table for sequence in sequences[plan.num_decodes :])  # it found no row
        must_be_read = not self._overlap or bool(self._beams) or self.runner.must_know_tokens or fork_waits
        if not must_be_read:
            for sequence in sequences:
                sequence.expect_token()
        return _Launched(sequences, sampled, read, must_be_read)

    def _next_of(self, plan: Plan) -> tuple[list[Sequence], list[int] | None, list[Sequence]]:
        """The sequences that get a token in this step, the row of logits of each, and those that will end without one.

        Those are the decode rows, then the prompts that have been computed. A prompt that was computed for several
        answers is forked here, and they share its row. The rows are None where each sequence has its own, in order.
        """
        if not any(chunk.reaches_end for chunk in plan.prompts):
            return plan.decodes, None, []
        sequences, rows = list(plan.decodes), list(range(plan.num_decodes))
        read: list[Sequence] = []
        computed = [chunk.sequence for chunk in plan.prompts if chunk.reaches_end]
        for row, sequence in enumerate(computed, start=plan.num_decodes):
            others = self._unforked.pop(sequence.id, [])
            if sequence.max_tokens == 0:
                self.scheduler.remove(sequence)
                read += [sequence, *others]
                continue
            for other in others:
                self.scheduler.fork(sequence, other)
            sequences += [sequence, *others]
            rows += [row] * (1 + len(others))
        self._left += read
        return sequences, None if rows == list(range(plan.num_decodes + len(computed))) else rows, read

    def _commit(self, launched: _Launched) -> StepResult:
        """Read the tokens of a step and give each to its sequence."""
        sequences = launched.sequences
        ended_prompts = [sequence for sequence in launched.read_prompts if sequence.finish_reason is None]
        for sequence in ended_prompts:
            sequence.finish_reason = FinishReason.LENGTH
            self._left.remove(sequence)
        if launched.sampled is None:
            return StepResult(ended_prompts=ended_prompts)
        sampled = launched.sampled.read()
        token_ids = sampled.token_ids.tolist()
        beams = frozenset(sequence.id for sequence in sequences if sequence in self._beams) if self._beams else NO_IDS
        ended: dict[int, FinishReason] = {}
        for row, (sequence, token_id) in enumerate(zip(sequences, token_ids, strict=True)):
            if sequence.finish_reason is not None:  # it ended while this token was on its way
                token_ids[row] = PASSED_OVER
            elif sequence.id in beams:
                self._beams.offer(sequence, sampled, row)
            elif token_id < 0:
                sequence.dead_end = self.runner.dead_end(sequence)
                self.abort(sequence, FinishReason.ERROR)
            elif sequence.append(token_id) is not None:
                self._remove(sequence)
            elif sequence.guide is not None:
                self._advance_guide(sequence, token_id)
            if sequence.finish_reason is not None:
                ended[row] = sequence.finish_reason
        searches = self._beams.advance() if beams else []
        return StepResult((SampledTokens(sequences, token_ids, ended, sampled, beams),), searches, ended_prompts)

    def _advance_guide(self, sequence: Sequence, token_id: int) -> None:
        assert sequence.guide is not None
        try:
            sequence.guide.advance(token_id)
        except Exception:
            log.exception("a guide failed; its sequence ends with an error")
            self.abort(sequence, FinishReason.ERROR)

    def _let_last_ones_leave(self, sequences: list[Sequence]) -> None:
        """Take out the sequences whose last token is on its way: they need no row in the next step."""
        for sequence in sequences:
            if len(sequence.token_ids) >= sequence.most_tokens and sequence.finish_reason is None:
                self.scheduler.remove(sequence)
                self._left.append(sequence)

    def _remove(self, sequence: Sequence) -> None:
        """Take an ended sequence out of the scheduler, if it has not left before."""
        if sequence in self._left:
            self._left.remove(sequence)
        else:
            self.scheduler.remove(sequence)


def _note_starts(plan: Plan) -> None:
    if plan.prompts:
        now = time.monotonic()
        for chunk in plan.prompts:
            chunk.sequence.started_at = chunk.sequence.started_at or now
