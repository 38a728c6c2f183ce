"""What every compiled kernel takes of a GPU and which instructions it has, kept by the hash of its text and options.

Compiling all kernels for all architectures takes minutes of CPU time; a kernel that has not changed is read back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from cupyllm.cuda.loader import source_of
from cupyllm.cuda.nvrtc import (
    ARCHS,
    DISASSEMBLED_ARCHS,
    Nvrtc,
    compile_options,
    disassemble,
    kernel_names,
    launch_module,
)
from cupyllm.cuda.occupancy import occupancy

_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", re.MULTILINE)
# Part of the key: to be changed when reports change their meaning.
_FORMAT = "1"


@dataclass(frozen=True)
class KernelReport:
    """One kernel, one set of constants, one architecture. `opcodes` is empty where the code cannot be disassembled."""

    name: str
    constants: dict[str, int]
    arch: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared: int
    opcodes: list[str]

    def occupancy(self) -> float:
        """The share of a multiprocessor's threads that can be resident in the launch of the kernel's example."""
        geometry = launch_module(self.name).example(self.constants)
        return occupancy(self.arch, geometry.block[0], self.registers, self.static_shared + geometry.shared_mem)


def all_reports(names: Iterable[str] | None = None) -> list[KernelReport]:
    """The reports of these kernels (all of them) in all their constant sets, for every architecture.

    Raises DeviceError when one does not compile or the wheels are not installed.
    """
    compiler = Nvrtc()
    cases = [
        (name, constants, arch)
        for name in (names or kernel_names())
        for constants in launch_module(name).CONSTANT_SETS
        for arch in ARCHS
    ]
    compiler.version  # noqa: B018 - load the library once, before the threads start
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda case: report_of(compiler, *case), cases))


def report_of(compiler: Nvrtc, name: str, constants: Mapping[str, int], arch: int) -> KernelReport:
    """The report of one kernel, from the cache folder if its text, options and compiler are the same."""
    parts = (_FORMAT, str(compiler.version), source_of(name), *compile_options(constants, arch))
    file = _cache_folder() / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()}.json"
    if file.exists():
        return KernelReport(**json.loads(file.read_text(encoding="utf-8")))
    kernel = compiler.compile(name, constants, arch)
    opcodes = sorted(set(_OPCODE.findall(disassemble(kernel)))) if arch in DISASSEMBLED_ARCHS else []
    report = KernelReport(
        name=name,
        constants=dict(constants),
        arch=arch,
        registers=kernel.registers,
        spill_bytes=kernel.spill_bytes,
        stack_bytes=kernel.stack_bytes,
        static_shared=kernel.static_shared,
        opcodes=opcodes,
    )
    _write(file, json.dumps(asdict(report)))
    return report


def problems_of(report: KernelReport) -> list[str]:
    """What is wrong with a compiled kernel, a line for each: spills, local memory, registers, missing instructions."""
    module = launch_module(report.name)
    settings = " ".join(f"{key}={value}" for key, value in report.constants.items())
    problems = []
    if report.spill_bytes or report.stack_bytes:
        problems.append(f"spills {report.spill_bytes} bytes, {report.stack_bytes} bytes of local memory")
    if report.registers > module.MAX_REGISTERS:
        problems.append(f"takes {report.registers} registers of {module.MAX_REGISTERS}")
    missing = [marker for marker in module.MARKERS if report.opcodes and not _has(report, marker)]
    problems += [f"has no {marker}" for marker in missing]
    return [f"{report.name} {settings} sm_{report.arch}: {problem}" for problem in problems]


def _has(report: KernelReport, marker: str) -> bool:
    """Whether the marker's parts stand in an instruction in their order: LDG.E.128 is in LDG.E.EF.128.CONSTANT."""
    if marker == "HMMA" and report.arch < 80 and report.constants.get("ELEMENT_BF16"):
        return True  # the tensor cores of sm_75 know no bf16; common.cuh multiplies without them
    pattern = re.compile(r"(\.\w+)*".join(re.escape(part) for part in re.split(r"(?=\.)", marker)) + r"(\.|$)")
    return any(pattern.match(opcode) for opcode in report.opcodes)


def _cache_folder() -> Path:
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cupyllm" / "nvrtc"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(file: Path, text: str) -> None:
    """Write a whole file or nothing, whoever else writes it."""
    temporary = file.with_suffix(f".{os.getpid()}.{hash(text)}")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(file)
