"""`python -m cupyllm doctor`: what this machine can run, what `device: "auto"` chooses and why, and what to install."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import cupyllm
from cupyllm.device import HostDevice
from cupyllm.errors import CupyllmError, DeviceError
from cupyllm.ops.select import make_backend

_EXAMPLES = """\
examples:
  python -m cupyllm doctor

The exit code is 0; docs/troubleshooting.md says more about what may be missing.
"""
# Optional packages: the module to look for, what it is for, and the extra that installs it.
_EXTRAS = (
    ("numba", "the CPU's compiled kernels, many times faster than NumPy", "cpu"),
    ("huggingface_hub", "models by their hub names", "hub"),
    ("llguidance", "structured output: JSON schemas, regular expressions, grammars", "structured"),
)


class Finding(NamedTuple):
    """A line of the report; `advice` says what to do where something is missing."""

    name: str
    value: str
    advice: str = ""


def add_parser(subparsers: Any) -> None:
    """Describe the subcommand."""
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine can run, and what to install",
        description="Look at Python, processor, GPU, driver and libraries, and say what device auto chooses and why.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)


def run(_: argparse.Namespace) -> int:
    """Print what was found; returns 0."""
    findings = list(examine())
    for finding in findings:
        print(f"{finding.name:20}{finding.value}")
    advice = [finding.advice for finding in findings if finding.advice]
    print("\nto do:" if advice else "\nnothing is missing")
    for line in advice:
        print(f"  {line}")
    return 0


def examine() -> Iterator[Finding]:
    """Everything that decides what can run here."""
    yield Finding("cupyllm", cupyllm.__version__)
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    yield Finding("NumPy", importlib.metadata.version("numpy"))
    yield Finding("memory", f"{HostDevice().free_bytes() / 2**30:.1f} GiB can be had")
    yield from _processor()
    yield from _gpu()
    for module, purpose, extra in _EXTRAS:
        yield _package(module, purpose, extra)
    yield _attempt("emulated device", lambda: f"works ({make_backend('emulated').reason})", "")
    yield from _choice()


def _processor() -> Iterator[Finding]:
    """The processor, and what the device `cpu` makes of it where `cpu_isa` and `threads` are "auto"."""
    yield Finding("processor", processor_name())
    if importlib.util.find_spec("numba") is None:
        return
    from cupyllm.ops.cpu.backend import make_ops
    from cupyllm.ops.cpu.isa import available, usable_processors

    ops, (cores, most) = make_ops("auto", "auto"), usable_processors()
    others = [isa.name for isa in available() if isa != ops.isa]
    yield Finding("cores", f"{cores} that this process may use, {most} hardware threads")
    also = f"; there are also {', '.join(others)}" if others else ""
    yield Finding("instruction set", f"{ops.isa.name}, which cpu_isa auto chose{also}")
    yield Finding("threads", f"{ops.threads}, which threads auto chose: one a core; {most} at most")


def processor_name() -> str:
    """As Linux calls it, else as Python does."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"


def _gpu() -> Iterator[Finding]:
    """What the GPU check looks for before it starts; where there is no GPU, why not."""
    from cupyllm.gpu_check.environment import driver_version, look_around
    from cupyllm.gpu_check.gpu import CupyGpu

    try:
        gpu = CupyGpu()
        environment = look_around(gpu.cupy, gpu.compile_probe)
    except DeviceError as error:
        driver = driver_version()
        yield Finding("NVIDIA driver", driver or "none")
        yield Finding("GPU", f"cannot be used: {error}", f"for the GPU: {error}" if driver else "")
        return
    for name, value in environment.facts.items():
        yield Finding(name, value)
    yield Finding("cuBLAS", "works" if environment.has_cublas else "cannot be used; prompts run on our own kernels")
    for line in environment.missing:
        yield Finding("missing", line, line)


def _package(module: str, purpose: str, extra: str) -> Finding:
    if importlib.util.find_spec(module) is not None:
        return Finding(module, importlib.metadata.version(module))
    return Finding(module, "not installed", f"for {purpose}: pip install 'cupyllm[{extra}]'")


def _attempt(name: str, work: Callable[[], str], advice: str) -> Finding:
    try:
        return Finding(name, work())
    except CupyllmError as error:
        return Finding(name, f"does not work: {error}", advice)


def _choice() -> Iterator[Finding]:
    backend = make_backend("auto")
    yield Finding("device auto", f"{backend.ops.name}: {backend.reason}")
    yield Finding("dtypes", ", ".join(backend.dtypes))
