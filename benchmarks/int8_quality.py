"""What `weights: "int8"` costs in quality: errors of every layer's matrices, and how far the next token's distribution
moves over a fixed text.

    python benchmarks/int8_quality.py --model FOLDER --json benchmarks/results/int8_quality.json

    int8.weight_error.<matrix>   relative error |quantised - stored| / |stored| (Frobenius); a run is a layer
    int8.kl_mean, int8.kl_max    KL divergence of the next token's distribution from that with the stored weights
    int8.greedy_agreement        share of positions at which the most likely token is the same

The text is the beginning of LICENSE, or of --text. Both sides keep activations in float32 where they are not int8.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from record import Row, finish

from cupyllm import LLM
from cupyllm.batch import BatchBuilder
from cupyllm.kv_cache import allocate_kv_cache
from cupyllm.model import forward, logits
from cupyllm.number_formats import bfloat16_to_float32
from cupyllm.plan import Plan, PlannedChunk
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence

PAGE_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint folder or hub name")
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    stored, int8 = (
        LLM(arguments.model, device="cpu", cpu_isa=isa, weights=weights, kv_cache_gib=0.1)
        for isa, weights in (("avx512", "as stored"), ("auto", "int8"))
    )
    ids = stored.tokenizer.encode(arguments.text.read_text(encoding="utf-8"))[: arguments.tokens]
    finish(
        [*weight_rows(stored, int8), *text_rows(log_probabilities(stored, ids), log_probabilities(int8, ids))],
        arguments.json,
    )


def weight_rows(stored: LLM, int8: LLM) -> list[Row]:
    """One row for each kind of matrix, one run for each layer."""
    rows = []
    pairs = list(zip(stored.engine.runner.model.weights.layers, int8.engine.runner.model.weights.layers, strict=True))
    for name in ("qkv", "o", "gate_up", "down"):
        errors = [relative_error(getattr(exact, name), getattr(ours, name)) for exact, ours in pairs]
        print(f"{name:8}", " ".join(f"{error:.4f}" for error in errors))
        rows.append(Row(f"int8.weight_error.{name}", "relative", errors))
    heads = (llm.engine.runner.model.weights.lm_head for llm in (stored, int8))
    return [*rows, Row("int8.weight_error.lm_head", "relative", [relative_error(*heads)])]


def relative_error(stored: np.ndarray, int8) -> float:  # type: ignore[no-untyped-def]
    wide = bfloat16_to_float32(stored) if stored.dtype == np.uint16 else stored.astype(np.float32)
    return float(np.linalg.norm(int8.dequantised() - wide) / np.linalg.norm(wide))


def log_probabilities(llm: LLM, ids: list[int]) -> np.ndarray:
    """Of every next token after every position of `ids`: (T, V) float32."""
    runner, num_pages = llm.engine.runner, -(-len(ids) // PAGE_SIZE)
    cache = allocate_kv_cache(
        runner.device, runner.model.config, num_pages=num_pages, page_size=PAGE_SIZE, dtype="float32"
    )
    sequence = Sequence(0, ids, len(ids), SamplingParams(), 0, 1, frozenset(), page_table=list(range(num_pages)))
    batch = BatchBuilder(PAGE_SIZE).build(Plan([], [PlannedChunk(sequence, 0, len(ids))], []))
    hidden = forward(runner.ops, runner.model, cache, batch)
    scores = logits(runner.ops, runner.model, hidden, np.arange(len(ids), dtype=np.int32))
    scores -= scores.max(axis=1, keepdims=True)
    scores -= np.log(np.exp(scores).sum(axis=1, keepdims=True))
    return scores


def text_rows(exact: np.ndarray, ours: np.ndarray) -> list[Row]:
    """How far the distributions are from each other."""
    divergences = [float(np.exp(e) @ (e - o)) for e, o in zip(exact.astype(np.float64), ours, strict=True)]
    return [
        Row("int8.kl_mean", "nats", [float(np.mean(divergences))]),
        Row("int8.kl_max", "nats", [max(divergences)]),
        Row("int8.greedy_agreement", "share", [float(np.mean(exact.argmax(axis=1) == ours.argmax(axis=1)))]),
    ]


if __name__ == "__main__":
    main()
