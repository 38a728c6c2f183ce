"""Nothing is left behind: no page, no entry of a table, and no host memory."""

from __future__ import annotations

import gc
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyllm.beam_search import BeamParams
from cupyllm.engine import Engine
from cupyllm.model import Model
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason
from tests.engine_case import make_engine
from tests.proof.answers import VOCAB
from tests.proof.scale import pick

STATUS = Path("/proc/self/status")
WARM_UP, MEASURED = pick(1000, 2000), pick(2000, 10_000)
# An allocator of small objects takes memory in arenas of 1 MiB; one or two of them may be open at either time.
SLACK_KIB = 2048


def one_request(engine: Engine, rng: random.Random) -> Iterator[None]:
    """A short request of any kind; a third of them are aborted after some steps."""
    prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))]
    params = SamplingParams(temperature=1.0, max_tokens=rng.randint(1, 8), logprobs=rng.choice([None, 2]))
    steps = rng.randint(0, 6) if rng.random() < 1 / 3 else None
    kind = rng.random()
    if kind < 0.1:
        search = engine.add_beams(prompt, BeamParams(rng.randint(2, 4), max_tokens=5))
        for _ in range(steps or 0):
            yield
        if steps is not None:
            engine.abort_search(search)
    else:
        sequences = engine.add_parallel(prompt, [params] * (3 if kind < 0.2 else 1))
        for _ in range(steps or 0):
            yield
        if steps is not None:
            engine.abort(rng.choice(sequences))


def serve(engine: Engine, count: int, seed: int) -> None:
    """`count` requests, four after every few steps, then until nothing is left."""
    rng = random.Random(seed)
    for _ in range(count // 4):
        for _ in itertools.zip_longest(*(one_request(engine, rng) for _ in range(4))):
            engine.step()
        while engine.num_waiting > 8:
            engine.step()
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()


def assert_idle(engine: Engine) -> None:
    """No page is live, all are accounted for, and no table of the engine has an entry."""
    stats, scheduler = engine.stats, engine.scheduler
    assert (stats.num_running, stats.num_waiting, stats.num_live_pages) == (0, 0, 0)
    assert stats.num_cached_pages + stats.num_free_pages == engine.runner.cache.num_pages
    assert [scheduler.waiting, scheduler.prefilling, scheduler.decoding, scheduler.paused] == [[], [], [], []]
    assert len(engine._unforked) == 0
    assert len(engine._beams) == 0
    cached = 0 if scheduler.prefix_cache is None else len(scheduler.prefix_cache)
    assert cached == stats.num_cached_pages


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_pages_tables_and_host_memory_come_back(model: Model, prefix_cache: bool) -> None:
    engine = make_engine(model, num_pages=24, max_decode_batch_size=8, prefix_cache=prefix_cache)
    serve(engine, WARM_UP, seed=0)
    assert_idle(engine)
    before = host_kib()
    serve(engine, MEASURED, seed=1)
    assert_idle(engine)
    after = host_kib()
    if before is not None and after is not None:
        assert after <= before * 1.01 + SLACK_KIB, f"host memory grew from {before} to {after} KiB"


def host_kib() -> int | None:
    """Memory of this process that is not backed by a file, swapped or not; None where the system does not tell."""
    if not STATUS.exists():
        return None
    gc.collect()
    values = dict(line.split(":", 1) for line in STATUS.read_text(encoding="ascii").splitlines())
    return sum(int(values[name].split()[0]) for name in ("RssAnon", "VmSwap"))


@pytest.mark.parametrize("step", range(12))
def test_everything_comes_back_when_all_is_aborted_after_any_step(model: Model, step: int) -> None:
    engine = make_engine(model, num_pages=14, max_decode_batch_size=6, max_step_tokens=12)
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)
    search = engine.add_beams([1, 2, 3], BeamParams(3, max_tokens=16, ignore_eos=True))
    sequences = [*engine.add_parallel(list(range(19)), [params] * 3), engine.add([4, 5], params)]
    for _ in range(step):
        engine.step()
    engine.abort_all()
    engine.scheduler.check_integrity()
    assert_idle(engine)
    assert (search.done, search.failed) == (True, True)
    assert [sequence.finish_reason for sequence in sequences] == [FinishReason.ERROR] * 4
