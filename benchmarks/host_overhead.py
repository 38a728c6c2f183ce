"""Microseconds of host work in a decode step: plan, batch arrays and commit, with no model behind them.

python benchmarks/host_overhead.py --json benchmarks/results/host_overhead.json

host.control_us.N         N running sequences, every one with one decode row
host.control_us.N.prefill the same beside a prompt that is worked on in chunks
host.prefix_lookup_ms     finding a cached prompt of 32,768 tokens
host.sampling_us.N        the sampling parameters of N sequences as arrays

What is counted is the thread's own processor time, which is the time that passes on a machine with nothing else to do.
The figures are taken in turns, so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from record import Row, finish

from cupyllm.batch import BatchBuilder
from cupyllm.page_allocator import PageAllocator
from cupyllm.prefix_cache import PrefixCache
from cupyllm.sampling import SamplingParams
from cupyllm.sampling_batch import build_sampling_batch
from cupyllm.scheduler import Scheduler
from cupyllm.sequence import Sequence

PAGE_SIZE = 16
PARAMS = SamplingParams(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, repetition_penalty=1.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    measures: list[tuple[Row, Callable[[], float]]] = []
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


def make_sequence(number: int, length: int) -> Sequence:
    return Sequence(number, [number] * length, length, PARAMS, 0, 10**6, frozenset())


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
    main()
