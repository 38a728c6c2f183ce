"""The ladder to gemv: four slower teaching versions and the kernel in use, counted side by side.

    python benchmarks/ladder/ladder.py [--json FILE]

runs all of them under the emulator's check mode, holds them against the reference op, and writes LADDER.md. Registers
come from NVIDIA's compiler where its wheels are installed, GB/s from a GPU where CuPy finds one.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyllm.cuda import gemv
from cupyllm.cuda.emulator import Traffic, guarded_copy
from cupyllm.cuda.linear_arguments import LinearCall
from cupyllm.cuda.loader import Geometry, KernelLoader, cuda_loader, source_of, with_header
from cupyllm.cuda.nvrtc import Nvrtc
from cupyllm.cuda.recording import RecordedLaunch, RecordingLoader
from cupyllm.errors import CupyllmError, DeviceError
from cupyllm.number_formats import bfloat16_to_float32, float32_to_bfloat16
from cupyllm.ops.reference import ReferenceOps

HERE = Path(__file__).parent
COUNTED = (896, 896)  # N, K: the product after attention in Qwen2.5-0.5B
TIMED = (3584, 18944)  # the MLP's second product in Qwen2.5-7B: 136 MB, more than a GPU's cache holds
ARCH = 80
PRODUCTION = "gemv"
# A step's launch: x (1, K) float32 and weight (N, K) bf16 -> (1, N).
Launch = Callable[[KernelLoader, Any, Any], Any]


def teaching_step(name: str, block_outputs: int, **constants: int) -> Launch:
    """The launch of a kernel in this folder, whose blocks of 256 threads make so many outputs each."""

    def launch(loader: KernelLoader, x: Any, weight: Any) -> Any:
        N, K = weight.shape
        y = loader.empty((1, N), np.float32)
        geometry = Geometry((-(-N // block_outputs),), (256,), constants={"ELEMENT_BF16": 1, **constants})
        loader.launch(name, geometry, (x, weight, y, np.int32(N), np.int32(K)))
        return y

    return launch


# Kernel -> what is new in it, and its launch.
STEPS: dict[str, tuple[str, Launch]] = {
    "gemv_1_naive": ("a thread a row", teaching_step("gemv_1_naive", 256)),
    "gemv_2_coalesced": ("a warp a row", teaching_step("gemv_2_coalesced", 8)),
    "gemv_3_vectorised": ("16-byte loads", teaching_step("gemv_3_vectorised", 8)),
    "gemv_4_split_k": ("4 warps a row", teaching_step("gemv_4_split_k", 2, K_WARPS=4)),
    PRODUCTION: ("rows share x", lambda loader, x, weight: gemv.launch(loader, LinearCall(x, weight))),
}


@dataclass(frozen=True)
class Count:
    """One step at the counted shape. None: there is no compiler, or no GPU, that could say."""

    launch: RecordedLaunch
    error: float  # relative to the largest output
    registers: int | None
    gigabytes_per_second: float | None

    def traffic(self, array: str) -> Traffic:
        """Reads of an argument."""
        return self.launch.report.argument(array).read

    @property
    def warps(self) -> int:
        return self.launch.geometry.grid[0] * self.launch.geometry.block[0] // 32


def ladder_source(name: str) -> str:
    """The whole text of a step."""
    if name == PRODUCTION:
        return source_of(name)
    return with_header(f"benchmarks/ladder/{name}.cu", (HERE / f"{name}.cu").read_text("utf-8"))


def random_layer(N: int, K: int) -> tuple[np.ndarray, np.ndarray]:
    """x (1, K) float32 and weight (N, K) bf16."""
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((N, K), np.float32) / np.float32(np.sqrt(K))
    return rng.standard_normal((1, K), np.float32), float32_to_bfloat16(weight)


def count(name: str, N: int, K: int) -> Count:
    """One step under the emulator's check mode, against the reference op. Raises DeviceError without g++."""
    loader = RecordingLoader(ladder_source)
    x, weight = random_layer(N, K)
    y = STEPS[name][1](loader, guarded_copy(x), guarded_copy(weight))
    expected = ReferenceOps().linear(x, bfloat16_to_float32(weight))
    (launch,) = loader.launches
    error = float(np.abs(y - expected).max() / np.abs(expected).max())
    return Count(launch, error, registers(launch), speed(name))


def registers(launch: RecordedLaunch) -> int | None:
    """Registers of a thread, from NVIDIA's compiler."""
    try:
        compiled = Nvrtc().compile(launch.name, launch.geometry.constants, ARCH, source=ladder_source(launch.name))
    except DeviceError:
        return None
    return compiled.registers


def speed(name: str) -> float | None:
    """GB/s of weights on the GPU, the best of 20 launches."""
    try:
        loader = cuda_loader(ladder_source)
    except DeviceError:
        return None
    cupy: Any = importlib.import_module("cupy")
    x, weight = (cupy.asarray(array) for array in random_layer(*TIMED))
    milliseconds = []
    for _ in range(21):
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        start.record()
        STEPS[name][1](loader, x, weight)
        end.record()
        end.synchronize()
        milliseconds.append(cupy.cuda.get_elapsed_time(start, end))
    return float(weight.nbytes / min(milliseconds[1:]) / 1e6)  # the first launch compiles


def table(counts: dict[str, Count]) -> str:
    """LADDER.md."""
    N, K = COUNTED
    head = ["step", "new", "warps", "weight bytes", "weight loads", "sectors", "of them used", "x loads", "x sectors"]
    head += ["shared accesses", "bank conflicts", f"registers sm_{ARCH}", "GB/s", "error"]
    rows = [head, ["---"] * len(head), *(_cells(name, count) for name, count in counts.items())]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    least = gemv.least_bytes(N, K)["weight"]
    return _TEXT.format(N=N, K=K, least=least, sectors=least // 32, timed=TIMED, rows="\n".join(lines))


def _cells(name: str, count: Count) -> list[str]:
    weight, x, report = count.traffic("weight"), count.traffic("x"), count.launch.report
    file = f"{name}.cu" if name != PRODUCTION else f"../../cupyllm/cuda/{name}.cu"
    return [
        f"[{name}]({file})",
        STEPS[name][0],
        f"{count.warps:,}",
        f"{weight.bytes:,}",
        f"{weight.warp_accesses:,}",
        f"{weight.sectors:,}",
        f"{weight.efficiency:.1%}",
        f"{x.warp_accesses:,}",
        f"{x.sectors:,}",
        f"{report.shared_accesses:,}",
        f"{report.bank_conflicts:,}",
        "-" if count.registers is None else str(count.registers),
        "-" if count.gigabytes_per_second is None else f"{count.gigabytes_per_second:,.0f}",
        f"{count.error:.1e}",
    ]


_TEXT = """# The ladder to gemv

One product, y = x @ weight.T for one row x, five times: each file changes one thing of the step before and says at its
top why that helps and what is still lost. Written by `python benchmarks/ladder/ladder.py`.

Counted by the emulator for N={N}, K={K}, bf16. The weights are {least:,} bytes in {sectors:,} sectors of 32
bytes; a load is one instruction of one warp. Sectors are those that the instructions touch: what a cache then saves on
a GPU is not counted. The error is relative to the largest output. GB/s are measured on a GPU
with N={timed[0]}, K={timed[1]}; a dash means that no GPU, or no NVIDIA compiler, was there.

{rows}
"""


def write_json(counts: dict[str, Count], file: Path) -> None:
    """The same figures as rows of the JSON file that all benchmarks write."""
    sys.path.append(str(HERE.parent))
    from record import Row, finish

    rows = []
    for name, count in counts.items():
        weight = count.traffic("weight")
        rows.append(Row(f"ladder.{name}.weight_loads", "loads", [weight.warp_accesses]))
        rows.append(Row(f"ladder.{name}.weight_sectors", "sectors", [weight.sectors]))
        if count.registers is not None:
            rows.append(Row(f"ladder.{name}.registers", "registers", [count.registers]))
        if count.gigabytes_per_second is not None:
            rows.append(Row(f"ladder.{name}.speed", "GB/s", [count.gigabytes_per_second]))
    finish(rows, file)


def main(arguments: list[str]) -> int:
    """Count every step, print the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=HERE / "LADDER.md", help="the table (default: beside this file)")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    try:
        counts = {name: count(name, *COUNTED) for name in STEPS}
    except CupyllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    text = table(counts)
    print(text)
    options.out.write_text(text, encoding="utf-8")
    if options.json:
        write_json(counts, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
