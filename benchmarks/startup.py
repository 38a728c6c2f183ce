"""Seconds from the start of the server's process to the first token, and what `import cupyllm` takes.

python benchmarks/startup.py --json benchmarks/results/startup.json

startup.import_s                  `import cupyllm` in a fresh process, beside `import numpy`
startup.listening_s               from the start of `python server.py` until clients can connect
startup.first_token_s             from the same start to the first token of a chat
startup.first_token_s.no_bytecode with no compiled Python files of any package yet
startup.first_token_s.no_kernels  with no kernels of the CPU engine compiled yet: the first start of all, once

All but the last two find on disk what an earlier start has left there.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from record import Row, finish
from servers import own_server

from cupyllm.load.client import Client, Outcome
from cupyllm.load.connection import Target
from cupyllm.load.prompts import PATHS, BodyStyle, request_body
from cupyllm.simulator.workload import Request

REPOSITORY = Path(__file__).parents[1]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default=str(REPOSITORY / "configs" / "default.json"), metavar="FILE")
    parser.add_argument("--model", metavar="MODEL", help="another model than that of the config")
    parser.add_argument("--device", metavar="DEVICE", help="another device than that of the config")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-cold", action="store_true", help="only starts that find what earlier ones have left")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    server = ["--config", options.config]
    for key in ("model", "device"):
        server += [f"--{key}", getattr(options, key)] if getattr(options, key) else []
    finish(measure(server, options.rounds, cold=not options.no_cold), options.json)
    return 0


def measure(server: list[str], rounds: int, *, cold: bool) -> list[Row]:
    first_token(server)  # leaves on disk what later starts find
    imports: list[float] = []
    numpy: list[float] = []
    listening: list[float] = []
    first: list[float] = []
    without: list[float] = []
    for _ in range(rounds):
        imports.append(import_seconds("cupyllm"))
        numpy.append(import_seconds("numpy"))
        until_listening, until_token = first_token(server)
        listening.append(until_listening)
        first.append(until_token)
        if cold:
            with tempfile.TemporaryDirectory() as folder:
                without.append(first_token(server, {"PYTHONPYCACHEPREFIX": folder})[1])
    rows = [
        Row("startup.import_s", "s", imports, "import numpy", numpy, "<= 0.3"),
        Row("startup.listening_s", "s", listening),
        Row("startup.first_token_s", "s", first, limit="<= 2"),
    ]
    if cold:
        with tempfile.TemporaryDirectory() as folder:
            compiling = first_token(server, {"NUMBA_CACHE_DIR": folder})[1]
        rows.append(Row("startup.first_token_s.no_bytecode", "s", without))
        rows.append(Row("startup.first_token_s.no_kernels", "s", [compiling]))
    return rows


def import_seconds(package: str) -> float:
    code = f"import time; start = time.perf_counter(); import {package}; print(time.perf_counter() - start)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    return float(run.stdout)


def first_token(server: list[str], environment: Mapping[str, str] | None = None) -> tuple[float, float]:
    """Seconds from the start of the process until it listens, and until the first token has arrived."""
    start = time.perf_counter()
    with own_server(server, environment) as running:
        listening = time.perf_counter() - start
        outcome = asyncio.run(ask(running.url, start))
    if outcome.error is not None:
        sys.exit(f"the first request failed: {outcome.error}")
    return listening, outcome.time_to_first_token


async def ask(url: str, start: float) -> Outcome:
    client = Client(Target.parse(url))
    style = BodyStyle(await client.first_model())
    body = request_body(Request(0.0, prompt_tokens=16, output_tokens=1), style, seed=0, number=0)
    outcome = await client.answer(PATHS["chat"], body, start)
    await client.close()
    return outcome


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
