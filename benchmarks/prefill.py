"""Speed of prompts by their length: tokens/s until the first token is known.

    python benchmarks/prefill.py --model FOLDER --json benchmarks/results/prefill.json

    prefill.T                  tokens/s of one prompt of T tokens, in chunks of --max-step-tokens
    prefill.batch8.T           the same for 8 prompts at once, at lengths where a prompt alone fills no step
    prefill.products.T         GFLOP/s of the model's matrix products in `prefill.T`, against those of NumPy's float32
                               products of the same shapes (on the CPU)
    peer.transformers.*.T      against transformers' forward pass on the same weights, where it is installed

Prompts are random and nothing is cached, so every token is computed. Rounds alternate with what is compared.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from record import Row, finish

from cupyllm import LLM, SamplingParams
from cupyllm.engine import Engine
from cupyllm.errors import CupyllmError

TOGETHER = 8
LONGEST_TOGETHER = 128


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint folder or hub name")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--lengths", default="32,128,512,2048,8192", metavar="T,...")
    parser.add_argument("--max-step-tokens", type=int, default=1024, metavar="N")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out even where it is installed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    try:
        llm = LLM(
            options.model,
            device=options.device,
            kv_cache_gib=1.0,
            max_step_tokens=options.max_step_tokens,
            prefix_cache=False,
            generation_config="none",
        )
    except CupyllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    lengths = [length for length in map(int, options.lengths.split(",")) if length < llm.engine.max_model_len]
    rows = prefill_rows(llm.engine, lengths, options.rounds)
    if not options.no_peers:
        rows += peer_rows(llm.engine, options.model, lengths, options.rounds)
    finish(rows, options.json)
    return 0


def prefill_rows(engine: Engine, lengths: list[int], rounds: int) -> list[Row]:
    rows = []
    on_host = not engine.runner.device.is_async
    for length in lengths:
        prefill_rate(engine, length)  # warm up
        rates, together, products, floor = [], [], [], []
        for _ in range(rounds):
            rates.append(prefill_rate(engine, length))
            if length <= LONGEST_TOGETHER:
                together.append(prefill_rate(engine, length, TOGETHER))
            if on_host:
                operations = 2 * sum(N * K for N, K in shapes(engine))
                products.append(rates[-1] * operations / 1e9)
                floor.append(length * operations / numpy_seconds(engine, length) / 1e9)
        rows.append(Row(f"prefill.{length}", "tokens/s", rates))
        if together:
            rows.append(Row(f"prefill.batch{TOGETHER}.{length}", "tokens/s", together, "one prompt alone", rates))
        if on_host:
            rows.append(Row(f"prefill.products.{length}", "GFLOP/s", products, "NumPy's products, float32", floor))
    return rows


def prefill_rate(engine: Engine, length: int, count: int = 1) -> float:
    """Tokens/s of `count` new prompts, from when they are added until each has its first token."""
    rng = np.random.default_rng()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    sequences = [engine.add(rng.integers(0, 1000, length).tolist(), params) for _ in range(count)]
    start = time.perf_counter()
    while any(sequence.finish_reason is None for sequence in sequences):
        engine.step()
    return count * length / (time.perf_counter() - start)


def shapes(engine: Engine) -> list[tuple[int, int]]:
    """(N, K) of every matrix that each token of a prompt goes through; the head is for the last one alone."""
    layers = engine.runner.model.weights.layers
    return [matrix.shape for layer in layers for matrix in (layer.qkv, layer.o, layer.gate_up, layer.down)]


def numpy_seconds(engine: Engine, length: int) -> float:
    """Seconds of `length` rows through all matrices in float32, timed on one layer of them."""
    layer = shapes(engine)[:4]
    rng = np.random.default_rng(0)
    weights = [rng.standard_normal(shape, np.float32) for shape in layer]
    inputs = [rng.standard_normal((length, K), np.float32) for _, K in layer]
    for x, weight in zip(inputs, weights, strict=True):
        x @ weight.T
    start = time.perf_counter()
    for x, weight in zip(inputs, weights, strict=True):
        x @ weight.T
    return (time.perf_counter() - start) * len(engine.runner.model.weights.layers)


def peer_rows(engine: Engine, model: str, lengths: list[int], rounds: int) -> list[Row]:
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError:
        return []
    rows = []
    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    for length in lengths:
        own, peer = [], []
        transformers_rate(theirs, length)  # warm up
        for _ in range(rounds):
            own.append(prefill_rate(engine, length))
            peer.append(transformers_rate(theirs, length))
        rows.append(Row(f"peer.transformers.bfloat16.prefill.{length}", "tokens/s", own, "transformers bfloat16", peer))
    return rows


def transformers_rate(model: Any, length: int) -> float:
    import torch

    ids = torch.randint(0, 1000, (1, length))
    with torch.no_grad():
        start = time.perf_counter()
        model(ids, use_cache=True, logits_to_keep=1)
        return length / (time.perf_counter() - start)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
