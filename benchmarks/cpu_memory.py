"""The most memory that a process of the CPU engine ever has, beside the bytes of its weights.

    python benchmarks/cpu_memory.py --model FOLDER --json benchmarks/results/cpu_memory.json

    cpu.memory.peak_gib              weights as they are stored
    cpu.memory.peak_gib.int8         weights in int8, quantised from the same files
    cpu.memory.peak_gib.no_kernels   weights as they are stored, with no kernels compiled yet: the first start of all

Each run is a process of its own, which loads the model with a cache of 1/16 GiB, reads a prompt of 512 tokens and
writes 16. Its peak counts what is resident: the code of its libraries too, which several processes share. Linux only.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from record import Row, finish

REPOSITORY = Path(__file__).parents[1]
# VmHWM, not getrusage: that one begins with what the parent had when it started the process.
CHILD = """
import sys
from pathlib import Path
from cupyllm import LLM, SamplingParams
llm = LLM(sys.argv[1], device="cpu", weights=sys.argv[2], kv_cache_gib=1 / 16, generation_config="none")
llm.generate([[1] * 512], SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
weights = llm.engine.runner.model.weights
arrays = {id(a): a for part in (weights, *weights.layers) for a in vars(part).values() if hasattr(a, "nbytes")}
peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
print(int(peak.split()[1]) * 1024 / 2**30, sum(a.nbytes for a in arrays.values()) / 2**30)
"""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="folder of a checkpoint")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    peak_and_weights(options.model, "as stored")  # compiles what is not compiled yet
    stored = [peak_and_weights(options.model, "as stored") for _ in range(options.rounds)]
    int8 = [peak_and_weights(options.model, "int8") for _ in range(options.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        compiling = [peak_and_weights(options.model, "as stored", {"NUMBA_CACHE_DIR": folder})]
    named = {"": stored, ".int8": int8, ".no_kernels": compiling}
    finish([row(f"cpu.memory.peak_gib{ending}", runs) for ending, runs in named.items()], options.json)
    return 0


def row(name: str, runs: list[tuple[float, float]]) -> Row:
    return Row(name, "GiB", [peak for peak, _ in runs], "weights", [weights for _, weights in runs])


def peak_and_weights(model: str, weights: str, environment: Mapping[str, str] | None = None) -> tuple[float, float]:
    """GiB of a process at its peak, and of the weights that it holds."""
    run = subprocess.run(
        [sys.executable, "-c", CHILD, model, weights],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        cwd=REPOSITORY,
        env={**os.environ, **(environment or {})},
    )
    peak, held = run.stdout.split()[-2:]
    return float(peak), float(held)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
