"""The simulated engine: the real scheduler, page allocator, prefix cache and sequences, a model that computes nothing,
and a clock.

A step goes as in `Engine.step`: plan, run, sample, commit. Running moves the clock on by what the cost model says, and
sampling answers with a fresh token id. Requests are received between steps, as the server does it, and refused by the
engine's two rules: what can never fit the context, and what finds the waiting queue full.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from cupyllm.config import EngineConfig
from cupyllm.plan import Plan
from cupyllm.prefix_cache import PrefixCache
from cupyllm.sampling import SamplingParams
from cupyllm.scheduler import Scheduler
from cupyllm.sequence import Sequence
from cupyllm.simulator.cost_model import CostModel, StepCost
from cupyllm.simulator.page_map import MappedAllocator, PageRun
from cupyllm.simulator.workload import PromptWriter, Request, Workload
from cupyllm.startup import CacheSize


@dataclass(frozen=True)
class Span:
    """A time in which a request was in one state: "queue", "prefill" or "decode"."""

    state: str
    start_s: float
    end_s: float


@dataclass
class RequestRecord:
    """What happened to one request. Times are seconds of the simulated clock."""

    id: int
    request: Request
    arrival_s: float
    refused: str = ""  # why, if it was
    first_run_s: float | None = None  # start of the first step with any of its tokens
    token_times: list[float] = field(default_factory=list)  # ends of the steps that gave a token
    spans: list[Span] = field(default_factory=list)
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_preemptions: int = 0
    _state: str = field(default="queue", init=False)
    _since_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._since_s = self.arrival_s

    def enter(self, state: str, now: float) -> None:
        """Note that the request is in `state` from `now` on; "finished" ends its last span."""
        if state == self._state:
            return
        if now > self._since_s:
            self.spans.append(Span(self._state, self._since_s, now))
        self._state, self._since_s = state, now


@dataclass(frozen=True)
class StepRecord:
    """One step: what ran, what it cost, and the cache while it ran."""

    start_s: float
    cost: StepCost
    decode_ids: tuple[int, ...]
    chunks: tuple[tuple[int, int, int], ...]  # pieces of prompts: request, first token, length
    preempted_ids: tuple[int, ...]
    num_waiting: int
    num_live_pages: int
    num_cached_pages: int
    num_free_pages: int
    pages: tuple[PageRun, ...]  # empty unless asked for

    @property
    def end_s(self) -> float:
        return self.start_s + self.cost.seconds

    @property
    def num_sequences(self) -> int:
        return len(self.decode_ids) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return len(self.decode_ids) + sum(length for _, _, length in self.chunks)


class Simulation:
    """Serves a workload. `run` does it all; `receive` and `step` are its two halves. Pages are recorded on demand."""

    def __init__(
        self, config: EngineConfig, size: CacheSize, cost: CostModel, workload: Workload, *, record_pages: bool = False
    ) -> None:
        self.config = config
        self.size = size
        self.cost = cost
        self.now = 0.0
        self.requests: list[RequestRecord] = []
        self.steps: list[StepRecord] = []
        self._coming = deque(workload.requests)
        self._concurrency = workload.concurrency
        self._record_pages = record_pages
        self._writer = PromptWriter()
        self._allocator = allocator = MappedAllocator(size.num_pages)
        self.scheduler = Scheduler(
            allocator,
            prefix_cache=PrefixCache(allocator, page_size=config.page_size) if config.prefix_cache else None,
            page_size=config.page_size,
            max_decode_batch_size=config.max_decode_batch_size,
            max_prefill_batch_size=config.max_prefill_batch_size,
            max_step_tokens=config.max_step_tokens,
        )

    @property
    def has_work(self) -> bool:
        return self._num_unfinished > 0

    @property
    def _num_unfinished(self) -> int:
        return self.scheduler.num_running + len(self.scheduler.waiting)

    def run(self) -> None:
        """Serve every request."""
        while self._coming or self.has_work:
            self.receive()
            if self.has_work:
                self.step()
            elif self._coming:
                self.now = self._coming[0].arrival_s  # nothing to do until then

    def receive(self) -> None:
        """Queue or refuse what has arrived by now."""
        while self._coming and self._is_due(self._coming[0]):
            request = self._coming.popleft()
            arrival_s = self.now if self._concurrency else request.arrival_s
            record = RequestRecord(len(self.requests), request, arrival_s, self._reason_to_refuse(request))
            self.requests.append(record)
            if not record.refused:
                self.scheduler.add(self._make_sequence(record))

    def step(self) -> StepRecord:
        """Plan, run, sample and commit one step."""
        plan, preempted_ids = self._plan()
        chunks = plan.chunks
        record = self._record_step(plan, self.cost.step(chunks), preempted_ids)
        self._note_states(plan)
        sampled = [chunk.sequence for chunk in chunks if chunk.reaches_end]
        self.now += record.cost.seconds
        self.scheduler.commit(plan)
        for sequence in sampled:
            self._commit_token(sequence)
        self.steps.append(record)
        return record

    def _is_due(self, request: Request) -> bool:
        if self._concurrency is None:
            return request.arrival_s <= self.now
        return self._num_unfinished < self._concurrency

    def _reason_to_refuse(self, request: Request) -> str:
        if request.prompt_tokens + request.output_tokens > self.size.max_model_len:
            return "too long"
        return "queue full" if len(self.scheduler.waiting) >= self.config.max_waiting else ""

    def _make_sequence(self, record: RequestRecord) -> Sequence:
        return Sequence(
            id=record.id,
            token_ids=self._writer.prompt(record.request),
            num_prompt_tokens=record.request.prompt_tokens,
            params=SamplingParams(),
            seed=0,
            max_tokens=record.request.output_tokens,
            end_token_ids=frozenset(),
            priority=record.request.priority,
        )

    def _plan(self) -> tuple[Plan, tuple[int, ...]]:
        """The scheduler's plan, and the requests that it preempted."""
        before = self.scheduler.num_preemptions
        plan = self.scheduler.plan()
        assert plan, "there is work and the plan is empty"
        if self.scheduler.num_preemptions == before:
            return plan, ()
        preempted = []
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            record = self.requests[sequence.id]
            if sequence.num_preemptions > record.num_preemptions:
                record.num_preemptions = sequence.num_preemptions
                record.enter("queue", self.now)
                preempted.append(sequence.id)
        return plan, tuple(preempted)

    def _record_step(self, plan: Plan, cost: StepCost, preempted_ids: tuple[int, ...]) -> StepRecord:
        allocator = self._allocator
        return StepRecord(
            start_s=self.now,
            cost=cost,
            decode_ids=tuple(sequence.id for sequence in plan.decodes),
            chunks=tuple((chunk.sequence.id, chunk.start, chunk.length) for chunk in plan.prompts),
            preempted_ids=preempted_ids,
            num_waiting=len(self.scheduler.waiting),
            num_live_pages=allocator.num_live,
            num_cached_pages=allocator.num_cached,
            num_free_pages=allocator.num_free,
            pages=allocator.page_map(self.scheduler.running) if self._record_pages else (),
        )

    def _note_states(self, plan: Plan) -> None:
        for sequence in plan.decodes:
            self.requests[sequence.id].enter("decode", self.now)
        for chunk in plan.prompts:
            record = self.requests[chunk.sequence.id]
            record.enter("prefill", self.now)
            if record.first_run_s is None:
                record.first_run_s = self.now
                record.num_cached_tokens = chunk.sequence.num_cached_tokens or 0

    def _commit_token(self, sequence: Sequence) -> None:
        record = self.requests[sequence.id]
        record.token_times.append(self.now)
        if sequence.append(self._writer.next_id()) is None:
            record.enter("decode", self.now)
        else:
            record.enter("finished", self.now)
            self.scheduler.remove(sequence)
