"""A fault in the middle of a step leaves pool and tables whole, and nobody uses what a failed sequence computed."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from cupyllm.beam_search import BeamParams
from cupyllm.engine import Engine
from cupyllm.model import Model
from cupyllm.ops.reference import ReferenceOps
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason
from tests.engine_case import make_engine, run_to_end
from tests.proof.answers import VOCAB

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


class FaultyOps(ReferenceOps):
    """Raises in the given call of one op, counted over the whole run."""

    def __init__(self, op: str, call: int) -> None:
        self.op, self.calls_left = op, call

    def _count(self, op: str) -> None:
        if op == self.op:
            self.calls_left -= 1
            if self.calls_left == 0:
                raise MemoryError(f"no memory for {op}")

    def rope_and_kv_write(self, *args: Any, **options: Any) -> Any:
        self._count("rope_and_kv_write")
        return super().rope_and_kv_write(*args, **options)

    def copy_pages(self, *args: Any) -> None:
        self._count("copy_pages")
        super().copy_pages(*args)

    def sample(self, *args: Any) -> Any:
        self._count("sample")
        return super().sample(*args)


def fill(engine: Engine) -> None:
    """Requests of every kind that together are too much for 12 pages."""
    rng = random.Random(0)
    params = SamplingParams(temperature=1.0, max_tokens=14, ignore_eos=True)
    engine.add_beams(prompt(rng, 9), BeamParams(3, max_tokens=14, ignore_eos=True))
    engine.add_parallel(prompt(rng, 6), [params] * 3)
    engine.add(prompt(rng, 17), params)


def prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(VOCAB) for _ in range(length)]


def assert_whole_again(engine: Engine) -> None:
    """After the end of everything nothing is held, and the engine answers as a fresh one does."""
    engine.abort_all()
    engine.scheduler.check_integrity()
    assert engine.stats.num_live_pages == 0
    assert not engine.has_work
    asked = prompt(random.Random(1), 13)
    sequence, alone = engine.add(asked, GREEDY), make_engine(engine.runner.model)
    run_to_end(engine)
    expected = alone.add(asked, GREEDY)
    run_to_end(alone)
    assert sequence.output_ids == expected.output_ids


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize("op", ["rope_and_kv_write", "copy_pages", "sample"])
@pytest.mark.parametrize("call", range(1, 9))
def test_an_op_that_fails_leaves_the_engine_whole(model: Model, op: str, call: int) -> None:
    engine = make_engine(model, num_pages=12, max_decode_batch_size=6, ops=FaultyOps(op, call))
    fill(engine)
    with pytest.raises(MemoryError):
        run_to_end(engine)
    assert_whole_again(engine)


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize("call", range(1, 40))
def test_an_allocation_that_fails_leaves_the_engine_whole(
    model: Model, call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, num_pages=12, max_decode_batch_size=6)
    allocator, calls = engine.scheduler.allocator, iter(range(1, 1000))
    allocate = allocator.allocate

    def failing(count: int) -> list[int]:
        if next(calls) == call:
            raise MemoryError("no page")
        return allocate(count)

    monkeypatch.setattr(allocator, "allocate", failing)
    fill(engine)
    with pytest.raises(MemoryError):
        run_to_end(engine)
    assert_whole_again(engine)


class PoisonOps(ReferenceOps):
    """Writes NaN instead of the values of one token, once."""

    def __init__(self, token_id: int) -> None:
        self.token_id: int | None = token_id

    def rope_and_kv_write(self, qkv: Any, rope_table: Any, batch: Any, *rest: Any, **options: Any) -> Any:
        hit = np.flatnonzero(batch.token_ids == self.token_id)
        if len(hit):
            self.token_id, qkv = None, qkv.copy()
            qkv[hit] = np.nan
        return super().rope_and_kv_write(qkv, rope_table, batch, *rest, **options)


@pytest.mark.parametrize("place", [1, 6, 11])
def test_pages_of_a_failed_sequence_are_not_reused(model: Model, place: int) -> None:
    asked = [*range(10, 22), 1]
    engine = make_engine(model, ops=PoisonOps(asked[place]))
    failed, _ = engine.add(asked, GREEDY), engine.add(asked[:4], GREEDY)
    run_to_end(engine)
    assert failed.finish_reason is FinishReason.ERROR
    assert engine.stats.num_cached_pages == 0, "nothing is kept that builds on a page of the failed one"
    sequence, alone = engine.add(asked, GREEDY), make_engine(model)
    run_to_end(engine)
    expected = alone.add(asked, GREEDY)
    run_to_end(alone)
    assert (sequence.output_ids, sequence.finish_reason) == (expected.output_ids, FinishReason.LENGTH)


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_any_text_can_be_a_salt(model: Model) -> None:
    engine = make_engine(model)
    sequence = engine.add([1, 2, 3, 4, 5], GREEDY, cache_salt="\ud800")
    run_to_end(engine)
    assert sequence.num_output_tokens == 8
