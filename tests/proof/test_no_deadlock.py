"""A full cache never stands still: 100,000 steps at 100 to 200 % of the pool, with priorities, forks, beams and aborts.

What is asked: in every window of 1,000 steps somebody gets a token or ends; every sequence of the best priority ends
within a bounded number of steps; and when no more work comes, everything ends. A sequence of lower priority may wait
for as long as work of better priority keeps coming: that is what priority means, and the only wait without a bound.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.engine import Engine
from cupyllm.model import Model
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence
from tests.engine_case import make_engine
from tests.proof.driver import VOCAB, Driver, Limits
from tests.proof.scale import pick
from tests.proof.stub_ops import VOCAB as STUB_VOCAB
from tests.proof.stub_ops import StubOps

WINDOW = 1000
SCHEDULER_STEPS, ENGINE_STEPS = pick(80_000, 10_000_000), pick(40_000, 1_000_000)
CASES = 8


class Watch:
    """How long nothing has happened, and how long each sequence of the best priority has been there."""

    def __init__(self) -> None:
        self.step = self.last_progress = self.progress = 0
        self.since: dict[int, int] = {}

    def tick(self, progress: int, urgent: list[Sequence], longest_wait: int) -> None:
        """One step passed; `progress` counts all tokens and ends so far."""
        self.step += 1
        if progress != self.progress:
            self.progress, self.last_progress = progress, self.step
        assert self.step - self.last_progress < WINDOW, f"nothing happened for {WINDOW} steps"
        if self.step % 100 == 0:
            self.since = {sequence.id: self.since.get(sequence.id, self.step) for sequence in urgent}
            waited = self.step - min(self.since.values(), default=self.step)
            assert waited < longest_wait, f"a sequence of the best priority is there for {waited} steps"


@pytest.mark.parametrize("case", range(CASES))
def test_the_scheduler_never_stands_still(case: int) -> None:
    rng = random.Random(case)
    rows = rng.randint(3, 8)
    limits = Limits(rng.randint(6, 20), 4, rows, rng.randint(1, 4), rows + rng.choice([0, 2, 12, 60]), case % 4 > 0)
    driver, watch = Driver(limits, case, check=False), Watch()
    for step in range(SCHEDULER_STEPS // CASES):
        if driver.live and rng.random() < 0.01:
            driver.abort(rng.choice(driver.live))
        while driver.demand < 1 + (step // WINDOW % 5) / 4:
            add_work(driver, rng)
        assert driver.step(), "a step with work runs something"
        # The live ones were added when less than two pools were asked for: two pools of steps, at most 2 * rows of
        # them, each preempted and recomputed by rivals of its own kind, is far less than this.
        urgent = [sequence for sequence in driver.live if sequence.priority == 0]
        watch.tick(driver.num_tokens + driver.num_ended, urgent, longest_wait=20 * limits.longest)
    assert driver.scheduler.num_preemptions > 100, "a pool this full must preempt, or the case is void"
    assert driver.num_forks > 100
    for _ in range(40 * limits.longest):
        driver.step()
    assert not driver.live, "everything ends when no more comes"
    driver.scheduler.check_integrity()
    assert driver.allocator.num_live == 0


def add_work(driver: Driver, rng: random.Random) -> None:
    longest = driver.limits.longest
    length = rng.randint(1, longest - 1)
    prompt = [rng.randrange(VOCAB) for _ in range(length)]
    output = rng.randint(1, min(longest - length, longest // 2))
    priority = rng.choice([0, 0, 1, 2])
    if rng.random() < 0.2:
        driver.add_beams(prompt, output, rng.randint(2, driver.limits.rows), priority=priority)
    else:
        driver.add(prompt, output, answers=rng.choice([1, 1, 3]), priority=priority)


class Clients:
    """Requests of every kind for an engine, and how much of its pool they may take."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine, self.rng = engine, random.Random(seed)
        self.live: dict[int, tuple[int, int, Any]] = {}  # number -> (pages at most, priority, what was asked)
        self.num_asked = 0

    @property
    def demand(self) -> float:
        return sum(pages for pages, _, _ in self.live.values()) / self.engine.runner.cache.num_pages

    def ask(self) -> None:
        rng, longest = self.rng, self.engine.max_model_len
        length = rng.randint(1, longest - 1)
        prompt = [rng.randrange(STUB_VOCAB - 2) for _ in range(length)]
        output, priority = rng.randint(1, min(longest - length, longest // 2)), rng.choice([0, 0, 1, 2])
        pages = -(-(length + output) // self.engine.runner.cache.page_size)
        ends = (STUB_VOCAB - 2, STUB_VOCAB - 1)
        if rng.random() < 0.2:
            width = rng.randint(2, 3)
            beam = BeamParams(width, max_tokens=output, stop_token_ids=ends, ignore_eos=True)
            asked: Any = self.engine.add_beams(prompt, beam, priority=priority)
        else:
            width = rng.choice([1, 1, 3])
            heat = rng.choice([0.0, 1.0])
            params = SamplingParams(temperature=heat, max_tokens=output, stop_token_ids=ends, ignore_eos=True)
            asked = self.engine.add_parallel(prompt, [params] * width, priority=priority)
        self.live[self.num_asked] = (pages * width, priority, asked)
        self.num_asked += 1

    def abort_one(self) -> None:
        _, _, asked = self.live[self.rng.choice(list(self.live))]
        if isinstance(asked, BeamSearch):
            self.engine.abort_search(asked)
        else:
            self.engine.abort(self.rng.choice(asked))

    def forget_ended(self) -> int:
        """Forget what has ended; returns how many."""
        ended = [number for number, (_, _, asked) in self.live.items() if has_ended(asked)]
        for number in ended:
            del self.live[number]
        return len(ended)


def has_ended(asked: BeamSearch | list[Sequence]) -> bool:
    if isinstance(asked, BeamSearch):
        return asked.done
    return all(sequence.finish_reason is not None for sequence in asked)


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize("case", range(4))
def test_the_engine_never_stands_still(model: Model, case: int) -> None:
    rng = random.Random(case)
    engine = make_engine(
        model,
        ops=StubOps(),
        num_pages=rng.randint(8, 20),
        vocab_limit=STUB_VOCAB,
        max_decode_batch_size=rng.randint(3, 8),
        max_step_tokens=8 + rng.choice([0, 8, 60]),
        prefix_cache=case > 0,
    )
    clients, last_end = Clients(engine, case), 0
    for step in range(ENGINE_STEPS // 4):
        if clients.live and rng.random() < 0.01:
            clients.abort_one()
        while clients.demand < 1 + (step // WINDOW % 5) / 4:
            clients.ask()
        engine.step()
        if clients.forget_ended():
            last_end = step
        assert step - last_end < WINDOW, f"nothing ended for {WINDOW} steps"
        urgent = [number for number, (_, priority, _) in clients.live.items() if priority == 0]
        assert clients.num_asked - min(urgent, default=clients.num_asked) < 100, "overtaken by 100 others"
    assert engine.stats.num_preemptions > 100, "a pool this full must preempt, or the case is void"
    for _ in range(100 * engine.max_model_len):
        engine.step()
    clients.forget_ended()
    assert not clients.live, "everything ends when no more comes"
    assert engine.stats.num_live_pages == 0
    engine.scheduler.check_integrity()
