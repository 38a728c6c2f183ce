"""The server of api_overhead.py: the real application, worker and uvicorn over an engine whose model answers at once.

Engine, scheduler, tokenizer and template are real. The ops do nothing: every row's token is the time in microseconds
at which it was chosen, and its text that number, so that whoever reads it knows how long it travelled.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np

from cupyllm.api.app import make_app
from cupyllm.api.logs import configure_logging
from cupyllm.api.serve import bind_socket, serve
from cupyllm.config import ServerConfig
from cupyllm.ops.reference import ReferenceOps
from cupyllm.sampling_batch import SampleResult
from cupyllm.startup import load_engine
from cupyllm.tokenizer import Tokenizer

HEARTBEAT_SECONDS = 0.002


def now_us() -> int:
    """Microseconds on a clock that all processes share, small enough for a token id."""
    return time.monotonic_ns() // 1000 % 2**31


@dataclass
class StubServer:
    """A running server process. `pace` seconds from step to step; 0: as fast as the event loop takes the tokens."""

    port: int
    pid: int
    pace: Synchronized[float]
    longest_stall: Synchronized[float]  # seconds; set it to 0 to measure anew

    def cpu_seconds(self) -> float:
        """What the process has used so far, in user and kernel mode."""
        with open(f"/proc/{self.pid}/stat", encoding="ascii") as file:
            fields = file.read().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def stub_server(max_streams: int) -> Iterator[StubServer]:
    """Run the server in a process of its own, with room for `max_streams` sequences at once."""
    context = multiprocessing.get_context("spawn")
    pace, stall = context.Value("d", 0.0), context.Value("d", 0.0)
    port, child_port = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(max_streams, pace, stall, child_port), daemon=True)
    process.start()
    try:
        assert process.pid is not None
        yield StubServer(port.recv(), process.pid, pace, stall)
    finally:
        process.terminate()
        process.join(20)


class _StubOps(ReferenceOps):
    """Touches neither weights nor cache; the chosen token of every row is the time."""

    name = "stub"

    def __init__(self, pace: Synchronized[float]) -> None:
        self.loop: Any = None
        self._pace = pace
        self._last_step = 0.0

    def linear(self, x: Any, *_: Any, **options: Any) -> Any:
        return x

    gate_up_silu_mul = rope_and_kv_write = paged_attention = linear

    def embedding(self, token_ids: Any, table: Any) -> Any:
        return token_ids

    def copy_pages(self, *_: Any) -> None:
        pass

    def logits(self, x: Any, head: Any, *, rows: Any, norm: Any) -> Any:
        return rows

    def sample(self, logits: Any, sampling: Any) -> SampleResult:
        self._wait()
        rows = len(logits)
        none = np.zeros((rows, 0), np.float32)
        return SampleResult(
            token_ids=np.full(rows, now_us(), np.int32),
            logprobs=np.zeros(rows, np.float32),
            top_ids=none.astype(np.int32),
            top_logprobs=none,
        )

    def _wait(self) -> None:
        """Until the pace allows, or until the event loop has gone round and has no tokens of the last step left."""
        if self._pace.value:
            time.sleep(max(0.0, self._last_step + self._pace.value - time.monotonic()))
            self._last_step = time.monotonic()
            return
        done = threading.Event()

        def again(rounds: int) -> None:
            self.loop.call_soon(again, rounds - 1) if rounds else done.set()

        self.loop.call_soon_threadsafe(again, 4)
        done.wait()


class _TimeTokenizer(Tokenizer):
    """The model's tokenizer, but for generated ids, which are times."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"%d " % token_id


def _serve(max_streams: int, pace: Synchronized[float], stall: Synchronized[float], port: Any) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # log lines are written, as ever, to nobody
    config = ServerConfig(
        served_model_name="stub",
        port=0,
        kv_cache_gib=1.0,
        max_decode_batch_size=max_streams,
        max_prefill_batch_size=max_streams,
        max_step_tokens=64 * max_streams,
        max_waiting=4 * max_streams,
    )
    configure_logging(config.log_level, config.log_format)
    loaded = load_engine(config, show_progress=False)
    ops = loaded.engine.ops = _StubOps(pace)
    loaded.tokenizer.__class__ = _TimeTokenizer
    with bind_socket(config.host, config.port) as listener:

        def on_listening() -> None:
            ops.loop = asyncio.get_running_loop()
            _watch(ops.loop, stall)
            port.send(listener.getsockname()[1])

        serve(make_app(loaded, config), listener, config, on_listening=on_listening)


def _watch(loop: Any, stall: Synchronized[float]) -> None:
    """Keep the longest time by which the event loop came too late to a heartbeat."""

    def beat(due: float) -> None:
        stall.value = max(stall.value, loop.time() - due)
        loop.call_later(HEARTBEAT_SECONDS, beat, loop.time() + HEARTBEAT_SECONDS)

    beat(loop.time())
