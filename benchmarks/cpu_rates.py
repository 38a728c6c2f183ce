"""Tokens per second without a server: the engine's, llama-bench's and transformers'."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from cupyllm import LLM, SamplingParams

PROMPT, NUM_TOKENS = 128, 32


def decode_rate(llm: LLM, num_sequences: int) -> float:
    """Of the decode phase: prompts of 128 tokens are in the cache when the clock starts."""
    start_decoding(llm, num_sequences)
    start = time.perf_counter()
    for _ in range(NUM_TOKENS):
        llm.engine.step()
    seconds = time.perf_counter() - start
    llm.engine.abort_all()
    return num_sequences * NUM_TOKENS / seconds


def start_decoding(llm: LLM, num_sequences: int) -> None:
    """Bring so many prompts so far that every step from here is decode rows only."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS + 100, ignore_eos=True)
    rng = np.random.default_rng(num_sequences)
    sequences = [engine.add(rng.integers(0, 1000, PROMPT).tolist(), params) for _ in range(num_sequences)]
    while any(sequence.num_output_tokens < 2 for sequence in sequences):
        engine.step()


def prefill_rate(llm: LLM, length: int) -> float:
    """Of a prompt, up to its first token."""
    engine = llm.engine
    engine.add(np.random.default_rng(length).integers(0, 1000, length).tolist(), SamplingParams(max_tokens=2))
    start = time.perf_counter()
    while not engine.step():
        pass
    seconds = time.perf_counter() - start
    engine.abort_all()
    return length / seconds


def llama_rate(programs: Path, file: Path, threads: int, *, prompt: int, output: int) -> float:
    """llama-bench: of `output` tokens behind a prompt of 128, or of a prompt."""
    depth = ["-d", PROMPT] if output else []
    command = [programs / "llama-bench", "-m", file, "-t", threads, "-r", 1, "-o", "json", "-p", prompt, "-n", output]
    run = subprocess.run([str(word) for word in [*command, *depth]], capture_output=True, text=True, check=True)
    return float(json.loads(run.stdout)[0]["avg_ts"])


def transformers_rates(model: str) -> tuple[Callable[[], float], Callable[[], float]]:
    """transformers in bf16: decode phase of one sequence, and a prompt of 512."""
    import torch
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)

    def decode() -> float:
        with torch.no_grad():
            step = theirs(torch.arange(PROMPT)[None], use_cache=True)
            start = time.perf_counter()
            for _ in range(NUM_TOKENS):
                token = step.logits[:, -1:].argmax(-1)
                step = theirs(token, past_key_values=step.past_key_values, use_cache=True)
            return NUM_TOKENS / (time.perf_counter() - start)

    def prefill() -> float:
        with torch.no_grad():
            start = time.perf_counter()
            theirs(torch.arange(512)[None], use_cache=True, logits_to_keep=1)
            return 512 / (time.perf_counter() - start)

    return decode, prefill
