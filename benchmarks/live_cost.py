"""What the live page costs: tokens a second of a server without it, of one with it, and while somebody watches that
one, in turns.

    python benchmarks/live_cost.py --model FOLDER --json benchmarks/results/live_cost.json
    python benchmarks/live_cost.py --model demo --tokens 800 --json benchmarks/results/live_cost_demo.json

    live.unwatched.N   N chat streams at once while nobody watches, against a server with `live_view: false`
    live.watched.N     the same while a process reads the steps, against the same server while nobody watches
    live.watcher.N     processor time of that process, as a share of the time it watched

The watcher parses the JSON as the page does, and draws nothing. It runs on the server's processors: where the model
takes all of them, its time is part of what watching costs, as that of a browser on the same machine would be.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import resource
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from record import Row, finish
from servers import Server, own_server

COUNTS = (1, 8)  # streams at once
LIMIT = "ratio >= 0.98"


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder of a checkpoint, or demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=40, help="of each stream")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(words)
    arguments = ["--model", options.model, "--device", options.device, "--max_model_len", "2048"]
    rows: list[Row] = []
    with own_server([*arguments, "--live_view", "false"]) as off:
        warm_up(off)
        with own_server(arguments) as on:
            warm_up(on)
            for count in COUNTS:
                rows += rows_of(count, [one_round(off, on, k, count, options.tokens) for k in range(options.rounds)])
    finish(rows, options.json)
    return 0


def rows_of(count: int, rounds: list[dict[str, float]]) -> list[Row]:
    runs = {kind: [a_round[kind] for a_round in rounds] for kind in rounds[0]}
    return [
        Row(f"live.unwatched.{count}", "tokens/s", runs["unwatched"], "live_view: false", runs["off"], limit=LIMIT),
        Row(f"live.watched.{count}", "tokens/s", runs["watched"], "nobody watches", runs["unwatched"], limit=LIMIT),
        Row(f"live.watcher.{count}", "share", runs["watcher"]),
    ]


def one_round(off: Server, on: Server, number: int, count: int, tokens: int) -> dict[str, float]:
    """Tokens a second of each kind, and the watcher's share; which kind is first changes from round to round."""
    figures: dict[str, float] = {}
    kinds = ["off", "unwatched", "watched"]
    for kind in kinds[number % 3 :] + kinds[: number % 3]:
        server = off if kind == "off" else on
        with server.running():
            if kind == "watched":
                with watcher(server) as shares:
                    figures[kind] = rate(server, count, tokens)
                figures["watcher"] = shares[0]
            else:
                figures[kind] = rate(server, count, tokens)
    return figures


def warm_up(server: Server) -> None:
    rate(server, max(COUNTS), 20)
    server.pause()


def rate(server: Server, count: int, tokens: int) -> float:
    """Tokens a second of `count` chat streams at once, from the first byte sent to the last one read."""
    with ThreadPoolExecutor(count) as pool:
        start = time.perf_counter()
        list(pool.map(lambda _: read_stream(server.url, tokens), range(count)))
        return count * tokens / (time.perf_counter() - start)


def read_stream(url: str, tokens: int) -> None:
    messages = [{"role": "user", "content": "What is a page?"}]
    fields = {"messages": messages, "temperature": 0, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(request, timeout=300) as response:
        if not response.read().endswith(b"data: [DONE]\n\n"):
            raise RuntimeError("the stream broke off")


@contextmanager
def watcher(server: Server) -> Iterator[list[float]]:
    """A process that watches meanwhile; the list holds its share of a processor afterwards."""
    shares: list[float] = []
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    before = seconds_of_children()
    process = context.Process(target=watch, args=(server.url, theirs), daemon=True)
    process.start()
    before += ours.recv()  # it watches
    start = time.perf_counter()
    try:
        yield shares
    finally:
        elapsed = time.perf_counter() - start
        process.terminate()
        process.join()
        shares.append((seconds_of_children() - before) / elapsed)


def watch(url: str, pipe: Connection) -> None:
    """Read the stream; sends the processor time that this process had needed before."""
    with urllib.request.urlopen(f"{url}/live/steps", timeout=300) as stream:
        pipe.send(time.process_time())
        for line in stream:
            if line.startswith(b"data: "):
                json.loads(line[6:])


def seconds_of_children() -> float:
    """Processor time of the children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
