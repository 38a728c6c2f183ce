"""Microseconds of host work in a decode step, with no model behind it.

python benchmarks/host_overhead.py --json benchmarks/results/host_overhead.json

host.step_us.N            Engine.step with N decode rows: plan, rows, replay and commit, with overlap and graphs, on a
                          device that computes in no time
host.control_us.N         of that, plan, batch arrays and commit as a step without graphs has them
host.control_us.N.prefill the same beside a prompt that is worked on in chunks
host.prefix_lookup_ms     finding a cached prompt of 32,768 tokens
host.sampling_us.N        the sampling parameters of N sequences as arrays

What is counted is the thread's own processor time, which is the time that passes on a machine with nothing else to do.
The figures are taken in turns, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from record import Row, finish

from cupyllm.batch import BatchBuilder
from cupyllm.config import EngineConfig
from cupyllm.device import Graph, HostDevice
from cupyllm.engine import Engine
from cupyllm.gpu_check.small_models import small_model
from cupyllm.kv_cache import allocate_kv_cache
from cupyllm.model import make_model
from cupyllm.model_config import GenerationDefaults
from cupyllm.ops.reference import ReferenceOps
from cupyllm.page_allocator import PageAllocator
from cupyllm.prefix_cache import PrefixCache
from cupyllm.sampling import SamplingParams
from cupyllm.sampling_batch import SampleResult, SamplingBatch, build_sampling_batch
from cupyllm.scheduler import Scheduler
from cupyllm.sequence import Sequence
from cupyllm.unread import NO_LOGPROBS
from cupyllm.weights import random_weights

PAGE_SIZE = 16
PARAMS = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    measures: list[tuple[Row, Callable[[], float]]] = []
    for count, limit in ((1, 30), (64, 60), (256, 150)):
        measures.append((Row(f"host.step_us.{count}", "us", [], limit=f"<= {limit}"), partial(step_us, count)))
    for count, limit in ((1, 10), (64, 30), (256, 100)):
        control = partial(control_us, count)
        measures += [
            (Row(f"host.control_us.{count}", "us", [], limit=f"<= {limit}"), partial(control, prompt=False)),
            (Row(f"host.control_us.{count}.prefill", "us", []), partial(control, prompt=True)),
            (Row(f"host.sampling_us.{count}", "us", []), partial(sampling_us, count)),
        ]
    measures.append((Row("host.prefix_lookup_ms", "ms", [], limit="<= 3"), prefix_lookup_ms))
    for _ in range(arguments.rounds):
        for row, measure in measures:
            row.runs.append(measure())
    finish([row for row, _ in measures], arguments.json)
    return 0


def make_sequence(number: int, length: int) -> Sequence:
    return Sequence(number, [number] * length, length, PARAMS, 0, 10**6, frozenset())


class InstantOps(ReferenceOps):
    """Samples token 7 for every row, from whatever logits."""

    def sample(self, logits: np.ndarray, sampling: SamplingBatch) -> SampleResult:
        return SampleResult(token_ids=np.full(len(logits), 7, np.int32), **vars(NO_LOGPROBS))


def instant_engine(count: int) -> Engine:
    """An engine over a model without layers, on a device that replays a graph in no time."""
    config, device = replace(small_model("qwen2"), num_layers=0, sliding_windows=()), HostDevice(is_async=True)
    length, num_pages = 100_000, 40_000
    return Engine(
        EngineConfig(page_size=PAGE_SIZE, max_decode_batch_size=count, max_step_tokens=2048),
        make_model(
            config, random_weights(config, dtype="float32", seed=0, upload=device.upload), device, num_positions=1
        ),
        allocate_kv_cache(device, config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32"),
        InstantOps(),
        device,
        max_model_len=length,
        vocab_limit=config.vocab_size,
        defaults=GenerationDefaults(temperature=0.0),
        capture=lambda run, warm_up: Graph(lambda: None, 0, 0),
    )


def step_us(count: int, steps: int = 200) -> float:
    """Microseconds of Engine.step, over steps in which every sequence decodes and pages grow as they do."""
    engine = instant_engine(count)
    for number in range(count):
        params = replace(PARAMS, max_tokens=10**4, ignore_eos=True)
        engine.add([number % 500] * (128 + number % PAGE_SIZE), params)
    while len(engine.scheduler.decoding) < count:
        engine.step()
    engine.step()
    start = time.thread_time()
    for _ in range(steps):
        engine.step()
    return (time.thread_time() - start) / steps * 1e6


def control_us(count: int, *, prompt: bool, steps: int = 200) -> float:
    """Microseconds a step, over steps in which every sequence decodes and pages grow as they do."""
    allocator = PageAllocator(40_000)
    scheduler = Scheduler(
        allocator,
        prefix_cache=PrefixCache(allocator, page_size=PAGE_SIZE),
        page_size=PAGE_SIZE,
        max_decode_batch_size=count + 1,
        max_prefill_batch_size=8,
        max_step_tokens=count + 512,
    )
    builder = BatchBuilder(PAGE_SIZE)
    for number in range(count):
        scheduler.add(make_sequence(number, 128 + number % PAGE_SIZE))
    while any(sequence.num_output_tokens < 2 for sequence in (*scheduler.running, *scheduler.waiting)):
        step(scheduler, builder)
    if prompt:
        scheduler.add(make_sequence(count, 32 * steps + 100))
    start = time.thread_time()
    for _ in range(steps):
        step(scheduler, builder)
    return (time.thread_time() - start) / steps * 1e6


def step(scheduler: Scheduler, builder: BatchBuilder) -> None:
    """What the engine does around the model."""
    plan = scheduler.plan()
    builder.build(plan)
    scheduler.commit(plan)
    ended = [chunk.sequence for chunk in plan.prompts if chunk.reaches_end]
    for sequence, token_id in zip([*plan.decodes, *ended], [7] * (len(plan.decodes) + len(ended)), strict=True):
        if sequence.append(token_id) is not None:
            scheduler.remove(sequence)


def sampling_us(count: int, repeats: int = 200) -> float:
    sequences = [make_sequence(number, 128) for number in range(count)]
    start = time.thread_time()
    for _ in range(repeats):
        build_sampling_batch(sequences, vocab_limit=1000)
    return (time.thread_time() - start) / repeats * 1e6


def prefix_lookup_ms(length: int = 32_768) -> float:
    allocator = PageAllocator(length // PAGE_SIZE)
    cache = PrefixCache(allocator, page_size=PAGE_SIZE)
    ids = list(range(length))
    parent = None
    for number, page in enumerate(allocator.allocate(length // PAGE_SIZE)):
        parent = cache.publish(page, ids[number * PAGE_SIZE : (number + 1) * PAGE_SIZE], parent)
    start = time.thread_time()
    found = cache.find(ids)
    seconds = time.thread_time() - start
    assert len(found) == length // PAGE_SIZE
    return seconds * 1e3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
