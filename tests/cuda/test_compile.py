"""Every kernel through NVIDIA's compiler, for every architecture and in every set of constants, without a GPU.

The first run takes about a minute; kernels that have not changed are then read from the cache folder.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cupyllm.cuda.compile_report import KernelReport, all_reports, problems_of, report_of
from cupyllm.cuda.kernel_table import write_table
from cupyllm.cuda.nvrtc import ARCHS, Nvrtc, disassemble, kernel_names, launch_module
from cupyllm.errors import DeviceError


def missing_wheels() -> str | None:
    """Why nothing can be compiled here, or None."""
    try:
        disassemble(Nvrtc().compile("silu_mul", {}, 80))
    except DeviceError as error:
        return str(error)
    return None


MISSING = missing_wheels()
pytestmark = pytest.mark.skipif(MISSING is not None, reason=f"{MISSING}")


@pytest.mark.parametrize("name", kernel_names())
def test_every_kernel_compiles_everywhere_without_spills_and_with_the_instructions_it_is_built_on(name: str) -> None:
    reports = all_reports([name])
    assert len(reports) == len(launch_module(name).CONSTANT_SETS) * len(ARCHS)
    assert [problem for report in reports for problem in problems_of(report)] == []


def a_report() -> KernelReport:
    return report_of(Nvrtc(), "gemv", launch_module("gemv").CONSTANT_SETS[0], 80)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"registers": 255}, "takes 255 registers of 80"),
        ({"spill_bytes": 8}, "spills 8 bytes, 0 bytes of local memory"),
        ({"stack_bytes": 16}, "spills 0 bytes, 16 bytes of local memory"),
        ({"opcodes": ["LDG.E", "LDG.E.64.CONSTANT"]}, "has no LDG.E.128"),
    ],
)
def test_a_worse_kernel_would_be_noticed(change: dict[str, object], problem: str) -> None:
    report = a_report()
    assert problems_of(report) == []
    (line,) = problems_of(replace(report, **change))
    assert line.startswith("gemv ELEMENT_BF16=0")
    assert line.endswith(f"sm_80: {problem}")


def test_a_kernel_that_does_not_compile_names_the_real_file_and_line() -> None:
    with pytest.raises(DeviceError, match=r"cupyllm/cuda/embedding\.cu:\d+: static assertion failed.*TABLE_FLOAT32"):
        Nvrtc().compile("embedding", {"ELEMENT_BF16": 0, "TABLE_FLOAT32": 2}, 80)


def test_reports_come_from_the_cache_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = report_of(Nvrtc(), "silu_mul", {}, 80)
    (file,) = (tmp_path / "cupyllm" / "nvrtc").iterdir()
    file.write_text(file.read_text().replace(f'"registers": {first.registers}', '"registers": 7'))
    assert report_of(Nvrtc(), "silu_mul", {}, 80).registers == 7
    assert report_of(Nvrtc(), "silu_mul", {}, 90).registers != 7


def test_the_table_has_a_row_for_every_kernel_and_set_of_constants(tmp_path: Path) -> None:
    assert write_table(tmp_path / "KERNELS.md") == []
    rows = [line for line in (tmp_path / "KERNELS.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) == sum(len(launch_module(name).CONSTANT_SETS) for name in kernel_names())
