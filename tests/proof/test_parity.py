"""No switch changes an answer: prefix cache, chunk size, pool, company; 100 prompts of lengths around page edges."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from cupyllm.model import Model
from tests.engine_case import make_engine
from tests.proof.answers import Answer, answers_of, assert_same, edge_prompts, kinds_of_params
from tests.proof.scale import LONG, pick

B = 4
NUM_PROMPTS = pick(100, 1000)
MAX_TOKENS = 6
LONGEST = 9 * B + MAX_TOKENS
CHUNKS = {"1": 1, "B-1": B - 1, "B": B, "B+1": B + 1, "3B": 3 * B, "off": 64 * LONGEST}
POOLS = {"tiny": -(-LONGEST // B), "large": 1000}
COMPANY = {"alone": 1, "64 at a time": 64}


def switches() -> list[tuple[str, bool, str, str]]:
    """Combinations of (chunk, prefix cache, pool, company): all 48, or in the quick setting 12 that hold every pair.

    Each chunk size comes with one choice of the other three switches and with its opposite, in turns.
    """
    every = list(itertools.product(CHUNKS, [True, False], POOLS, COMPANY))
    return every if LONG else [every[8 * k + place] for k in range(len(CHUNKS)) for place in (k % 4, 7 - k % 4)]


@pytest.fixture(scope="module")
def alone(model: Model) -> list[Answer]:
    """The answers of an engine that has room for everything, reuses nothing and does one thing at a time."""
    engine = make_engine(model, page_size=B, prefix_cache=False, max_step_tokens=512)
    return answers_of(engine, *asked(), at_a_time=1)


def asked() -> tuple[list[list[int]], list[Any]]:
    return edge_prompts(NUM_PROMPTS, B, seed=1), kinds_of_params(NUM_PROMPTS, MAX_TOKENS, seed=2)


def test_the_quick_choice_of_switches_holds_every_pair_of_values() -> None:
    every = list(itertools.product(CHUNKS, [True, False], POOLS, COMPANY))
    for one, other in itertools.combinations(range(4), 2):
        assert {(s[one], s[other]) for s in switches()} == {(s[one], s[other]) for s in every}


@pytest.mark.parametrize(("chunk", "prefix_cache", "pool", "company"), switches())
def test_no_switch_changes_an_answer(
    model: Model, alone: list[Answer], chunk: str, prefix_cache: bool, pool: str, company: str
) -> None:
    engine = make_engine(
        model,
        page_size=B,
        num_pages=POOLS[pool],
        prefix_cache=prefix_cache,
        max_step_tokens=CHUNKS[chunk],
        max_decode_batch_size=min(CHUNKS[chunk], 64),
        max_prefill_batch_size=64,
    )
    found = answers_of(engine, *asked(), at_a_time=COMPANY[company])
    assert_same(found, alone)
    if pool == "tiny" and company != "alone" and CHUNKS[chunk] > B:
        assert engine.stats.num_preemptions > 0, "a pool this small must preempt, or the case is void"
    if prefix_cache and pool == "large":
        assert engine.stats.num_cached_pages > 0
