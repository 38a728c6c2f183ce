"""Any order of operations on scheduler, allocator and prefix cache, against a model of what the cache must hold."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.proof.driver import VOCAB, Driver, Limits
from tests.proof.scale import pick

STEPS_OF_A_RUN = 50
SEEDS = st.integers(0, 2**32 - 1)


class CacheMachine(RuleBasedStateMachine):
    """Add, step, abort, fork, pause, resume, preempt and evict, in pools that are mostly too small for all."""

    @initialize(
        num_pages=st.integers(4, 14),
        page_size=st.sampled_from([1, 2, 4]),
        rows=st.integers(1, 6),
        prefills=st.integers(1, 3),
        spare=st.integers(0, 14),
        cache=st.sampled_from(["on", "on", "off", "one hash"]),
        seed=SEEDS,
    )
    def start(
        self, num_pages: int, page_size: int, rows: int, prefills: int, spare: int, cache: str, seed: int
    ) -> None:
        limits = Limits(num_pages, page_size, rows, prefills, rows + spare, cache != "off", cache == "one hash")
        self.driver = Driver(limits, seed)
        self.texts = [[self.driver.rng.randrange(VOCAB) for _ in range(limits.longest)] for _ in range(2)]

    @rule(seed=SEEDS, kind=st.sampled_from(["one", "answers", "beams"]), priority=st.integers(0, 1))
    def add(self, seed: int, kind: str, priority: int) -> None:
        add_any(self.driver, random.Random(seed), self.texts, kind, priority)

    @precondition(lambda self: self.driver.live)
    @rule(seed=SEEDS)
    def abort(self, seed: int) -> None:
        self.driver.abort(random.Random(seed).choice(self.driver.live))

    @rule()
    def step(self) -> None:
        self.driver.step()

    @rule()
    def three_steps(self) -> None:
        for _ in range(3):
            self.driver.step()
            self.driver.check_books()

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "driver"):
            self.driver.check_books()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            run_dry(self.driver)


def add_any(driver: Driver, rng: random.Random, texts: list[list[int]], kind: str, priority: int) -> None:
    """A prompt that begins like one of `texts`, for what always fits the pool alone."""
    longest = driver.limits.longest
    length = rng.randint(1, longest - 1)
    text = rng.choice(texts)[: rng.randint(0, length)]
    prompt = text + [rng.randrange(VOCAB) for _ in range(length - len(text))]
    output = rng.randint(1, longest - length)
    # Salts act on keys alone: where all keys are the same they cannot keep requests apart.
    salts = [""] if driver.limits.one_hash else ["", "", "other"]
    options: dict[str, Any] = {"priority": priority, "salt": rng.choice(salts)}
    if kind == "beams":
        driver.add_beams(prompt, output, rng.randint(1, driver.limits.rows), **options)
    else:
        driver.add(prompt, output, answers=rng.randint(2, 4) if kind == "answers" else 1, **options)


def run_dry(driver: Driver, most_steps: int = 20_000) -> None:
    """Step until nothing is left: everything ends, and every page comes back."""
    for _ in range(most_steps):
        if not driver.live:
            break
        driver.step()
        driver.check_books()
    assert not driver.live, "every sequence ends"
    assert driver.allocator.num_live == 0
    assert driver.allocator.num_free + driver.allocator.num_cached == driver.limits.num_pages
    assert not driver.beams
    assert not driver.unforked


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_random_runs_meet_everything_that_can_happen(prefix_cache: bool) -> None:
    num_preemptions = num_copies = num_forks = num_hits = num_paused = 0
    for seed in range(pick(60, 3000)):
        rng = random.Random(seed)
        rows = rng.randint(2, 8)
        limits = Limits(rng.randint(4, 16), rng.choice([1, 2, 4, 8]), rows, 3, rows + rng.randint(0, 20), prefix_cache)
        driver = Driver(limits, seed)
        texts = [[rng.randrange(VOCAB) for _ in range(limits.longest)]]
        for _ in range(40):
            if rng.random() < 0.3:
                add_any(driver, rng, texts, rng.choice(["one", "answers", "beams"]), 0)
            driver.step()
            driver.check_books()
            num_paused += len(driver.scheduler.paused)
        num_hits += sum(sequence.num_cached_tokens or 0 for sequence in driver.live)
        run_dry(driver)
        num_preemptions += driver.scheduler.num_preemptions
        num_copies, num_forks = num_copies + driver.num_copies, num_forks + driver.num_forks
    assert min(num_preemptions, num_copies, num_forks, num_paused) > 500, "else the runs are void"
    assert (num_hits > 100) == prefix_cache


@pytest.mark.parametrize("seed", range(pick(100, 5000)))
def test_a_long_prompt_first_and_beams_behind_it(seed: int) -> None:
    """The first needs nearly the whole pool while the beams fork: what was planned for them must give way to it."""
    rng = random.Random(seed)
    rows = rng.randint(4, 8)
    limits = Limits(rng.randint(6, 16), rng.choice([2, 4, 8]), rows, 4, rows + rng.choice([8, 12, 16, 20]), False)
    driver = Driver(limits, seed)
    driver.add([0] * rng.randint(limits.longest * 2 // 3, limits.longest - 1), 1)
    for _ in range(rng.randint(1, 2)):
        driver.add_beams([1] * rng.randint(1, limits.page_size), 6, rng.randint(2, rows))
    run_dry(driver)


CacheMachine.TestCase.settings = settings(
    max_examples=pick(20_000, 1_000_000) // STEPS_OF_A_RUN, stateful_step_count=STEPS_OF_A_RUN, deadline=None
)
TestAnyOrderOfOperations = CacheMachine.TestCase
