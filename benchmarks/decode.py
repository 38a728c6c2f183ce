"""Speed of decode steps over batch sizes and contexts, as a share of what memory can give; and the engine's memory.

    python benchmarks/decode.py --model FOLDER --json benchmarks/results/decode.json

Each figure over several rounds, in turns with what it is held against:

    decode.batchB.contextT   tokens/s of B sequences whose context is T tokens, against the tokens/s at which the bytes
                             of such a step (weights, and the sequences' keys and values) can be read from memory
    decode.batchB.step_rate  steps/s at the shortest context, against the steps/s of batch 1
    decode.host_share        share of a batch-1 step outside the ops: planning, batch arrays, sampling arrays, commit;
                             not on a GPU, where the ops return before they have run (host_overhead.py has it)
    memory.peak              peak resident memory of load and a short run, against weights plus the cache in use
    peer.transformers.*      batch 1 at the shortest context, against transformers, where it is installed

A context is not computed: its pages are published in the prefix cache as if it had been, with random keys and values,
each sequence with pages of its own. Sizes that need more pages than the cache has are left out, and said so.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine_rates import read_rate
from record import Row, finish

from cupyllm import LLM, SamplingParams
from cupyllm.engine import Engine
from cupyllm.errors import CupyllmError

MOST_STEPS, FEWEST_STEPS, SECONDS = 64, 4, 1.0
SHORTEST = 128


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint folder or hub name")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", type=numbers, default=[1, 8, 64, 256], metavar="B,...")
    parser.add_argument("--context", type=numbers, default=[128, 1024, 4096, 8192, 32000], metavar="T,...")
    parser.add_argument("--kv-cache-gib", type=float, default=4.0, metavar="X")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out even where it is installed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--peak-memory-of-a-short-run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.peak_memory_of_a_short_run:
        print_peak_memory(options.model, options.device)
        return 0
    try:
        llm = LLM(
            options.model,
            device=options.device,
            kv_cache_gib=options.kv_cache_gib,
            max_decode_batch_size=max(options.batch),
            max_prefill_batch_size=max(options.batch),
            max_step_tokens=max(1024, *options.batch),
            max_waiting=max(options.batch),
            generation_config="none",
        )
    except CupyllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    fill_cache(llm.engine)
    rows = decode_rows(llm.engine, options.batch, options.context, options.rounds)
    if not llm.engine.runner.device.is_async:
        rows.append(Row("decode.host_share", "share", [host_share(llm.engine) for _ in range(options.rounds)]))
        rows.append(memory_row(options.model, options.device, llm.engine))
    if not options.no_peers:
        rows += peer_rows(llm.engine, options.model, options.rounds)
    finish(rows, options.json)
    return 0


def numbers(text: str) -> list[int]:
    return sorted({int(part) for part in text.split(",")})


def fill_cache(engine: Engine) -> None:
    """Random keys and values in every page: zeros can be faster to read than real ones."""
    rng = np.random.default_rng(0)
    for array in (*engine.runner.cache.keys, *engine.runner.cache.values):
        page = rng.standard_normal(array.shape[1:], np.float32)
        bits = page.view(np.uint32) >> 16
        array[:] = engine.runner.device.upload(
            bits.astype(array.dtype) if array.dtype == np.uint16 else page.astype(array.dtype)
        )


def decode_rows(engine: Engine, batches: list[int], contexts: list[int], rounds: int) -> list[Row]:
    """Every size that fits, each round of it beside a measure of the memory's rate."""
    rate = read_rate(engine.runner.device)
    rows, step_rates = [], {}
    for context in contexts:
        for batch in batches:
            if not fits(engine, batch, context):
                print(f"left out: batch {batch} with contexts of {context} does not fit", file=sys.stderr)
                continue
            runs, limits = [], []
            decode(engine, batch, context)  # warm up
            for _ in range(rounds):
                seconds, mean_context = decode(engine, batch, context)
                runs.append(batch / seconds)
                limits.append(batch * rate() / step_bytes(engine, batch, mean_context))
            rows.append(
                Row(f"decode.batch{batch}.context{context}", "tokens/s", runs, "bytes at the read rate", limits)
            )
            if context == contexts[0]:
                step_rates[batch] = [run / batch for run in runs]
    first = step_rates.get(1, [])
    for batch, rates in step_rates.items():
        if batch != 1 and first:
            rows.append(Row(f"decode.batch{batch}.step_rate", "steps/s", rates, "batch 1", first))
    return rows


def fits(engine: Engine, batch: int, context: int) -> bool:
    cache = engine.runner.cache
    tokens = context + MOST_STEPS + 8
    return tokens <= engine.max_model_len and batch * math.ceil(tokens / cache.page_size) <= cache.num_pages


def decode(engine: Engine, batch: int, context: int) -> tuple[float, float]:
    """Seconds of a step, over as many steps as fill a second, and the mean context of a sequence in them."""
    start_decoding(engine, batch, context)
    start = time.perf_counter()
    steps = 0
    while steps < FEWEST_STEPS or (steps < MOST_STEPS and time.perf_counter() - start < SECONDS):
        engine.step()
        steps += 1
    seconds = time.perf_counter() - start
    assert len(engine.scheduler.decoding) == batch, "a sequence ended or was preempted"
    mean = sum(sequence.num_tokens for sequence in engine.scheduler.decoding) / batch - steps / 2
    engine.abort_all()
    return seconds / steps, mean


def start_decoding(engine: Engine, batch: int, context: int) -> None:
    """Bring `batch` prompts of `context` tokens so far that every step from here is decode rows only."""
    params = SamplingParams(temperature=0.0, max_tokens=MOST_STEPS + 4, ignore_eos=True)
    rng = np.random.default_rng(context)
    prompts = [rng.integers(0, 1000, context).tolist() for _ in range(batch)]
    for prompt in prompts:
        publish(engine, prompt)
    sequences = [engine.add(prompt, params) for prompt in prompts]
    while any(sequence.num_output_tokens < 2 for sequence in sequences):
        engine.step()


def publish(engine: Engine, prompt: list[int]) -> None:
    """Make the full pages of a prompt known as computed; its last token has to be computed in any case."""
    scheduler, size = engine.scheduler, engine.runner.cache.page_size
    assert scheduler.prefix_cache is not None
    found = scheduler.prefix_cache.find(prompt[:-1])
    if len(found) == (len(prompt) - 1) // size:
        return
    pages = scheduler.allocator.allocate((len(prompt) - 1) // size)
    parent = None
    for number, page in enumerate(pages):
        parent = scheduler.prefix_cache.publish(page, prompt[number * size : (number + 1) * size], parent)
    scheduler.allocator.release(pages)


def weight_arrays(engine: Engine) -> list[Any]:
    """Every weight that a step reads; an embedding that is no head is not among them."""
    weights = engine.runner.model.weights
    arrays = [array for layer in weights.layers for array in vars(layer).values() if array is not None]
    return [*arrays, weights.final_norm, weights.lm_head]


def step_bytes(engine: Engine, batch: int, context: float) -> float:
    """Bytes of weights, and of the keys and values of `batch` sequences with `context` tokens each."""
    cache = engine.runner.cache
    slots = cache.num_pages * cache.page_size
    token_bytes = sum(array.nbytes for array in (*cache.keys, *cache.values)) / slots
    return sum(array.nbytes for array in weight_arrays(engine)) + batch * context * token_bytes


class TimedOps:
    """Ops with a clock around every call that a step makes of them."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._ops, name)
        if not callable(attribute):
            return attribute

        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return attribute(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start

        return timed


def host_share(engine: Engine) -> float:
    """The share of batch-1 steps that passes outside the ops."""
    kept, timed = engine.ops, TimedOps(engine.ops)
    engine.ops = timed  # type: ignore[assignment]
    try:
        start_decoding(engine, 1, SHORTEST)
        timed.seconds = 0.0
        start = time.perf_counter()
        for _ in range(MOST_STEPS // 2):
            engine.step()
        total = time.perf_counter() - start
        engine.abort_all()
    finally:
        engine.ops = kept
    return 1 - timed.seconds / total


def memory_row(model: str, device: str, engine: Engine) -> Row:
    """Peak memory of a fresh process with a cache of 0.25 GiB, all of it touched."""
    command = [sys.executable, __file__, "--model", model, "--device", device, "--peak-memory-of-a-short-run"]
    peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    weights = engine.runner.model.weights
    arrays = weight_arrays(engine) + ([] if weights.lm_head is weights.embedding else [weights.embedding])
    size = sum(array.nbytes for array in arrays) / 2**30
    return Row("memory.peak", "GiB", [peak], "weights + KV cache", [size + 0.25])


def print_peak_memory(model: str, device: str) -> None:
    llm = LLM(model, device=device, kv_cache_gib=0.25, generation_config="none")
    fill_cache(llm.engine)
    llm.generate([[1] * 100, [2] * 50], SamplingParams(temperature=0.0, max_tokens=8), show_progress=False)
    status = Path("/proc/self/status").read_text(encoding="ascii")
    print(int(status.split("VmHWM:")[1].split()[0]) / 2**20)


def peer_rows(engine: Engine, model: str, rounds: int) -> list[Row]:
    """transformers on the same folder, batch 1, its decode phase alone; rounds alternate with the engine."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return []
    rows = []
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        theirs = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        own, peer = [], []
        transformers_rate(theirs)  # warm up
        for _ in range(rounds):
            own.append(1 / decode(engine, 1, SHORTEST)[0])
            peer.append(transformers_rate(theirs))
        rows.append(Row(f"peer.transformers.{name}.batch1", "tokens/s", own, f"transformers {name}", peer))
        del theirs
    return rows


def transformers_rate(model: Any) -> float:
    import torch

    ids = torch.arange(SHORTEST)[None]
    with torch.no_grad():
        step = model(ids, use_cache=True)
        start = time.perf_counter()
        for _ in range(MOST_STEPS // 2):
            token = step.logits[:, -1:].argmax(-1)
            step = model(token, past_key_values=step.past_key_values, use_cache=True)
        return MOST_STEPS // 2 / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
