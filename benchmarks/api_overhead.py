"""What HTTP costs: requests and chunks a second through the whole server, over a stub model that answers at once.

python benchmarks/api_overhead.py --json benchmarks/results/api_overhead.json

N is the number of connections. The clients are one other process, which reads raw sockets.

api.chunks_per_s.N        chat chunks of all streams together; a step of the model begins when the last one's are sent
api.cpu_us_per_chunk.N    the server's CPU time in these runs, over the chunks
api.requests_per_s.N      plain chat requests of 16 tokens, each connection sending one after the other
api.token_to_socket_ms.64 from the end of a step to the client that has read the chunk, at 64 streams of 100 tokens a
                          second each: median and 99th percentile
api.loop_stall_ms.*       how long nothing else moves while a body is read: prompts of 1 MB by route, and bodies as
                          large, or of as many parts, as may be
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from api_stub import StubServer, now_us, stub_server
from record import Row, finish

from cupyllm.api.body import MAX_CONTAINERS, MAX_VALUES
from cupyllm.config import ServerConfig

CONNECTIONS = (1, 16, 64, 256)
CHUNKS_LIMIT = {64: ">= 8000"}
REQUESTS_LIMIT = {16: ">= 600"}
PACE_SECONDS = 0.01
_CONTENT = re.compile(rb'"content": ?"(\d+)')


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(words)
    runs: dict[str, list[float]] = {}
    with stub_server(max(CONNECTIONS)) as server:
        asyncio.run(plain(server, 16, 4))  # warm
        for _ in range(arguments.rounds):
            for name, value in one_round(server):
                runs.setdefault(name, []).append(value)
    finish([row(name, values) for name, values in runs.items()], arguments.json)
    return 0


def one_round(server: StubServer) -> list[tuple[str, float]]:
    figures = []
    for count in CONNECTIONS:
        cpu = server.cpu_seconds()
        load = asyncio.run(streams(server, count, max_tokens=min(1500, 32_000 // count)))
        figures.append((f"api.chunks_per_s.{count}", load.chunks / load.seconds))
        figures.append((f"api.cpu_us_per_chunk.{count}", (server.cpu_seconds() - cpu) / load.chunks * 1e6))
    for count in CONNECTIONS:
        load = asyncio.run(plain(server, count, repeats=max(2, 1000 // count)))
        figures.append((f"api.requests_per_s.{count}", load.requests / load.seconds))
    server.pace.value = PACE_SECONDS
    delays = sorted(asyncio.run(streams(server, 64, max_tokens=300)).delays_us)
    server.pace.value = 0.0
    figures.append(("api.token_to_socket_ms.64.p50", statistics.median(delays) / 1e3))
    figures.append(("api.token_to_socket_ms.64.p99", delays[len(delays) * 99 // 100] / 1e3))
    for name, route, body in large_bodies():
        figures.append((f"api.loop_stall_ms.{name}", asyncio.run(loop_stall(server, route, body)) * 1e3))
    return figures


def large_bodies() -> Iterator[tuple[str, str, bytes]]:
    """(name, route, body); the server refuses every one of them, most as prompts that are too long for the model."""
    text = "The quick brown fox jumps over the lazy dog; 12 of them. "
    yield "completions", "completions", prompt_body(json.dumps(text * 18_000))
    messages = [{"role": "user", "content": text * 18_000}]
    yield "chat", "chat/completions", json.dumps({"messages": messages}).encode()
    room = ServerConfig.max_body_bytes - 100
    largest = text * (room // len(text))
    yield "largest_text", "completions", prompt_body(json.dumps(largest))
    yield "largest_chat", "chat/completions", json.dumps({"messages": [{"role": "user", "content": largest}]}).encode()
    yield "most_ids", "completions", prompt_body(f"[{'12345,' * (MAX_VALUES - 10)}1]")
    yield "most_texts", "completions", prompt_body("[" + '"a",' * (MAX_VALUES - 10) + '"a"]')
    yield "most_lists", "completions", prompt_body(f"[{'[],' * (MAX_CONTAINERS - 10)}[]]")
    yield "most_keys", "completions", prompt_body(json.dumps({str(i): 1 for i in range(MAX_CONTAINERS - 10)}))
    yield "wrong_ids", "completions", b'{"allowed_token_ids": [' + b'"a",' * (MAX_VALUES - 10) + b'"a"]}'
    yield "too_many_ids", "completions", prompt_body(f"[{'1,' * (room // 2)}1]")
    yield "too_many_lists", "completions", prompt_body(f"[{'[],' * (room // 3)}[]]")


def prompt_body(prompt: str) -> bytes:
    """A request whose prompt is this JSON."""
    return b'{"prompt": ' + prompt.encode() + b"}"


def row(name: str, values: list[float]) -> Row:
    _, figure, place, *last = name.split(".")
    if figure == "chunks_per_s":
        return Row(name, "chunks/s", values, limit=CHUNKS_LIMIT.get(int(place)))
    if figure == "requests_per_s":
        return Row(name, "requests/s", values, limit=REQUESTS_LIMIT.get(int(place)))
    if figure == "cpu_us_per_chunk":
        return Row(name, "us", values)
    return Row(name, "ms", values, limit={"loop_stall_ms": "<= 100"}.get(figure, "<= 20" if last == ["p99"] else None))


@dataclass
class Load:
    """What a run of many connections came to."""

    seconds: float = 0.0
    chunks: int = 0
    requests: int = 0
    delays_us: list[int] = field(default_factory=list)


async def streams(server: StubServer, count: int, max_tokens: int) -> Load:
    """`count` chat streams at once. The time runs from the first chunk that all of them share to the last."""
    load = Load()
    sent = request("chat/completions", chat_body(max_tokens=max_tokens, stream=True))

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(sent)
        rest = await reader.readuntil(b"\r\n\r\n")
        assert rest.startswith(b"HTTP/1.1 200 "), rest
        while not rest.endswith(b"0\r\n\r\n"):
            data = await reader.read(65536)
            assert data, "the server closed the connection"
            now = now_us()
            found = _CONTENT.findall(rest + data)
            load.chunks += len(found)
            load.delays_us += [now - int(sent) for sent in found]
            # A chunk may be cut anywhere: what follows the last whole event is looked at again.
            rest = (rest + data).rpartition(b"\n\n")[2]
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    load.seconds = time.perf_counter() - started
    assert load.chunks == count * max_tokens, (load.chunks, count, max_tokens)
    return load


async def plain(server: StubServer, count: int, repeats: int) -> Load:
    """`count` connections, each sending `repeats` plain requests one after the other."""
    sent = request("chat/completions", chat_body(max_tokens=16))

    async def one() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for _ in range(repeats):
            writer.write(sent)
            assert await read_answer(reader) == 200
        writer.close()

    started = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(count)))
    return Load(time.perf_counter() - started, requests=count * repeats)


async def loop_stall(server: StubServer, route: str, body: bytes) -> float:
    """Seconds by which the event loop came too late while a body was read that is refused in the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    await asyncio.sleep(0.1)
    server.longest_stall.value = 0.0
    writer.write(request(route, body))
    assert await read_answer(reader) == 400
    writer.close()
    await asyncio.sleep(0.1)
    return server.longest_stall.value


async def read_answer(reader: asyncio.StreamReader) -> int:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", head).group(1))  # type: ignore[union-attr]
    await reader.readexactly(length)
    return int(head[9:12])


def chat_body(**fields: Any) -> bytes:
    messages = [{"role": "system", "content": "You are helpful."}, {"role": "user", "content": "What is a page?"}]
    body = {"model": "stub", "messages": messages, "temperature": 0.7, "ignore_eos": True} | fields
    return json.dumps(body).encode()


def request(route: str, content: bytes) -> bytes:
    head = f"POST /v1/{route} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
