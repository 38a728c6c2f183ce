"""Speed and memory of the engine on one model, against the bare matrix products over the same weights.

    python benchmarks/decode.py --model FOLDER --json benchmarks/results/decode.json

Figures, each over several rounds in which the engine and what it is held against alternate:

    decode.batch1        tokens/s of one sequence, against NumPy's bare products for one row (the floor of a step)
    decode.concurrent8   tokens/s of eight sequences together, against batch 1
    prefill.512          tokens/s of a 512-token prompt, against the bare products for 512 rows
    decode.host_share    share of a batch-1 step outside the ops: planning, batch arrays, sampling arrays, commit
    memory.peak          peak resident memory of load and a short run, against float32 weights plus the cache in use
    peer.*               transformers' generate on the same weights, where torch and transformers are installed

With OpenBLAS the environment decides which kernels run: compare within one run only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from record import Row, finish

from cupyllm import LLM, SamplingParams
from cupyllm.ops.reference import ReferenceOps

NUM_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint folder or hub name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out even where it is installed")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--peak-memory-of-a-short-run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak_memory_of_a_short_run:
        print_peak_memory(arguments.model)
        return
    llm = LLM(arguments.model, kv_cache_gib=0.5, max_step_tokens=1024, generation_config="none", prefix_cache=False)
    rows = engine_rows(llm, arguments.rounds)
    rows.append(memory_row(arguments.model, llm))
    if not arguments.no_peers:
        rows += peer_rows(llm, arguments.model, arguments.rounds)
    finish(rows, arguments.json)


def engine_rows(llm: LLM, rounds: int) -> list[Row]:
    """The engine's own figures and their floors, alternating."""
    matrices = [m for w in llm.engine.runner.model.weights.layers for m in (w.qkv, w.o, w.gate_up, w.down)]
    head = llm.engine.runner.model.weights.lm_head
    decode_rate(llm, 1)  # warm up
    batch1, floor1, batch8, prefill, floor512, host = [], [], [], [], [], []
    for _ in range(rounds):
        batch1.append(decode_rate(llm, 1))
        floor1.append(1 / products_seconds([*matrices, head], 1))
        batch8.append(decode_rate(llm, 8))
        prefill.append(prefill_rate(llm, 512))
        floor512.append(512 / (products_seconds(matrices, 512) + products_seconds([head], 1)))
        host.append(host_share(llm))
    return [
        Row("decode.batch1", "tokens/s", batch1, "bare products, 1 row", floor1, "ratio >= 0.9"),
        Row("decode.concurrent8", "tokens/s", batch8, "decode.batch1", batch1, "ratio >= 2.6"),
        Row("prefill.512", "tokens/s", prefill, "bare products, 512 rows", floor512, "ratio >= 0.7"),
        Row("decode.host_share", "share", host, limit="<= 0.10"),
    ]


def decode_rate(llm: LLM, num_sequences: int) -> float:
    """Tokens per second of the decode phase: prompts of 128 tokens are in the cache when the clock starts."""
    start_decoding(llm, num_sequences)
    start = time.perf_counter()
    for _ in range(NUM_TOKENS):
        llm.engine.step()
    seconds = time.perf_counter() - start
    llm.engine.abort_all()
    return num_sequences * NUM_TOKENS / seconds


def start_decoding(llm: LLM, num_sequences: int) -> None:
    """Bring `num_sequences` prompts of 128 tokens so far that every step from here is decode rows only."""
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS + 100, ignore_eos=True)
    rng = np.random.default_rng(num_sequences)
    sequences = [engine.add(rng.integers(0, 1000, 128).tolist(), params) for _ in range(num_sequences)]
    while any(sequence.num_output_tokens < 2 for sequence in sequences):
        engine.step()


def prefill_rate(llm: LLM, length: int) -> float:
    engine = llm.engine
    engine.add(np.random.default_rng(length).integers(0, 1000, length).tolist(), SamplingParams(max_tokens=2))
    start = time.perf_counter()
    while not engine.step():
        pass
    seconds = time.perf_counter() - start
    engine.abort_all()
    return length / seconds


def products_seconds(matrices: list[np.ndarray], num_rows: int) -> float:
    """Seconds for one pass of x through every matrix, in the faster form for the number of rows."""
    inputs = {m.shape[1]: np.ones((num_rows, m.shape[1]), np.float32) for m in matrices}
    repeats = 8 if num_rows == 1 else 1
    start = time.perf_counter()
    for _ in range(repeats):
        for m in matrices:
            x = inputs[m.shape[1]]
            _ = m @ x[0] if num_rows == 1 else x @ m.T
    return (time.perf_counter() - start) / repeats


class TimedOps(ReferenceOps):
    """The reference ops with a clock around every call that a step makes from outside the ops."""

    seconds = 0.0
    depth = 0

    def __getattribute__(self, name: str):  # type: ignore[no-untyped-def]
        attribute = super().__getattribute__(name)
        if name.startswith("_") or not callable(attribute):
            return attribute

        def timed(*args, **kwargs):  # type: ignore[no-untyped-def]
            start = time.perf_counter()
            self.depth += 1
            try:
                return attribute(*args, **kwargs)
            finally:
                self.depth -= 1
                if self.depth == 0:
                    self.seconds += time.perf_counter() - start

        return timed


def host_share(llm: LLM) -> float:
    """The share of batch-1 steps that passes outside the ops."""
    kept, timed = llm.engine.ops, TimedOps()
    llm.engine.ops = timed
    try:
        start_decoding(llm, 1)
        timed.seconds = 0.0
        start = time.perf_counter()
        for _ in range(NUM_TOKENS):
            llm.engine.step()
        total = time.perf_counter() - start
        llm.engine.abort_all()
    finally:
        llm.engine.ops = kept
    return 1 - timed.seconds / total


def memory_row(model: str, llm: LLM) -> Row:
    """Peak memory of a fresh process; the cache counts with the pages that its short run touches."""
    command = [sys.executable, __file__, "--model", model, "--peak-memory-of-a-short-run"]
    peak = float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])
    weights = llm.engine.runner.model.weights
    arrays = [weights.embedding, weights.final_norm]
    arrays += [a for w in weights.layers for a in vars(w).values() if a is not None]
    if weights.lm_head is not weights.embedding:
        arrays.append(weights.lm_head)
    size = sum(a.nbytes for a in arrays) / 2**30
    return Row("memory.peak", "GiB", [peak], "float32 weights + KV cache", [size + 0.25], "ratio <= 1.15")


def print_peak_memory(model: str) -> None:
    """A cache of 0.25 GiB, all of it touched, as a full one would be."""
    llm = LLM(model, kv_cache_gib=0.25, generation_config="none")
    for array in (*llm.engine.runner.cache.keys, *llm.engine.runner.cache.values):
        array.fill(0)
    llm.generate([[1] * 100, [2] * 50], SamplingParams(temperature=0.0, max_tokens=8), show_progress=False)
    status = Path("/proc/self/status").read_text()
    peak_kib = int(status.split("VmHWM:")[1].split()[0])
    print(peak_kib / 2**20)


def peer_rows(llm: LLM, model: str, rounds: int) -> list[Row]:
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
        for _ in range(rounds):
            own.append(decode_rate(llm, 1))
            peer.append(transformers_rate(theirs))
        rows.append(Row(f"peer.transformers.{name}.batch1", "tokens/s", own, f"transformers {name}", peer))
        del theirs
    return rows


def transformers_rate(model) -> float:  # type: ignore[no-untyped-def]
    import torch

    ids = torch.arange(128)[None]
    with torch.no_grad():
        step = model(ids, use_cache=True)
        start = time.perf_counter()
        for _ in range(NUM_TOKENS):
            token = step.logits[:, -1:].argmax(-1)
            step = model(token, past_key_values=step.past_key_values, use_cache=True)
        return NUM_TOKENS / (time.perf_counter() - start)


if __name__ == "__main__":
    main()
