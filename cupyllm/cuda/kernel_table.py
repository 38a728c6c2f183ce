"""The table of what every compiled kernel takes of a GPU, as benchmarks/KERNELS.md has it."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from cupyllm.cuda.compile_report import KernelReport, all_reports, problems_of
from cupyllm.cuda.nvrtc import ARCHS, launch_module

_HEAD = """# Kernels as NVIDIA's compiler makes them

Written by `python -m cupyllm.cuda.nvrtc --table benchmarks/KERNELS.md`; no GPU is needed. A cell is the registers of a
thread and, computed from them, the block size and the shared memory, the share of a multiprocessor's threads that can
be resident. The launch is that of a Qwen2.5-7B shape. Shared memory is static + dynamic bytes of a block; a dash means
that a block asks for more than the architecture has. Nothing spills and nothing uses local memory; a test holds that.

"""


def write_table(file: Path) -> list[str]:
    """Compile every kernel in all its constant sets for every architecture, write the table. Returns the problems."""
    reports = all_reports()
    head = ["kernel", "constants", "block", "shared memory", *(f"sm_{arch}" for arch in ARCHS)]
    rows = [_row(list(group)) for _, group in groupby(reports, key=lambda report: (report.name, report.constants))]
    file.write_text(_HEAD + "\n".join([_line(head), _line(["---"] * len(head)), *rows]) + "\n", encoding="utf-8")
    return [problem for report in reports for problem in problems_of(report)]


def _row(reports: list[KernelReport]) -> str:
    """One kernel with one set of constants, a report for each architecture."""
    name, constants = reports[0].name, reports[0].constants
    geometry = launch_module(name).example(constants)
    cells = []
    for report in reports:
        share = report.occupancy()
        cells.append(f"{report.registers}, {share:.0%}" if share else "-")
    settings = " ".join(f"{key}={value}" for key, value in constants.items())
    shared = f"{reports[0].static_shared} + {geometry.shared_mem}"
    return _line([name, settings, str(geometry.block[0]), shared, *cells])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
