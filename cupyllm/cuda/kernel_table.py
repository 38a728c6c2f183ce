"""The table of what every compiled kernel needs of a GPU, as benchmarks/KERNELS.md has it."""

from __future__ import annotations

from pathlib import Path

from cupyllm.cuda.nvrtc import ARCHS, Nvrtc, kernel_names, launch_module

_HEAD = """# Kernels as NVIDIA's compiler makes them

Written by `python -m cupyllm.cuda.nvrtc --table benchmarks/KERNELS.md`; no GPU is needed. A cell is the registers of a
thread and, computed from them, the block size and the shared memory, the share of a multiprocessor's threads that can
be resident. The launch is that of a Qwen2.5-7B shape. Shared memory is static + dynamic bytes of a block; a dash means
that a block asks for more than the architecture has. Nothing spills and nothing uses local memory; a test holds that.

"""


def write_table(file: Path) -> None:
    """Compile every kernel in all its constant sets for every architecture and write the table."""
    compiler = Nvrtc()
    rows = [
        _row(compiler, name, constants) for name in kernel_names() for constants in launch_module(name).CONSTANT_SETS
    ]
    head = ["kernel", "constants", "block", "shared memory", *(f"sm_{arch}" for arch in ARCHS)]
    lines = [_line(head), _line(["---"] * len(head)), *rows]
    file.write_text(_HEAD + "\n".join(lines) + "\n", encoding="utf-8")


def _row(compiler: Nvrtc, name: str, constants: dict[str, int]) -> str:
    geometry = launch_module(name).example(constants)
    kernels = [compiler.compile(name, constants, arch) for arch in ARCHS]
    cells = []
    for kernel in kernels:
        share = kernel.occupancy(geometry.block[0], geometry.shared_mem)
        cells.append(f"{kernel.registers}, {share:.0%}" if share else "-")
    settings = " ".join(f"{key}={value}" for key, value in constants.items())
    shared = f"{kernels[0].static_shared} + {geometry.shared_mem}"
    return _line([name, settings, str(geometry.block[0]), shared, *cells])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
