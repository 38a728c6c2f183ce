"""What `kernels run NAME` prints: one example of a kernel under the emulator's check mode, counted and compared."""

from __future__ import annotations

import math
from collections.abc import Sequence

from cupyllm.cuda.emulator import EmulatedModule, LaunchReport
from cupyllm.cuda.examples import EXAMPLES, ExampleRun, GuardedHost, Output
from cupyllm.cuda.loader import Geometry, define_options, source_of
from cupyllm.cuda.recording import RecordingLoader


def run_example(name: str) -> tuple[str, bool]:
    """Run a kernel's example: geometry, traffic, conflicts and errors as text, and whether it agrees with its twin.

    Raises DeviceError when g++ is missing or the emulator finds a fault.
    """
    loader = RecordingLoader()
    run = EXAMPLES[name](loader, GuardedHost())
    launch = next(launch for launch in loader.launches if launch.name == name)
    sizes = " ".join(f"{size}={value}" for size, value in run.sizes.items())
    lines = [
        f"{name} with {sizes} on this CPU, each access checked: no fault",
        "",
        *_geometry_lines(name, launch.geometry),
        "",
        *_traffic_lines(run, launch.report),
        "",
        *_error_lines(run),
    ]
    return "\n".join(lines), run.agrees


def _geometry_lines(name: str, geometry: Geometry) -> list[str]:
    """Grid, block, shared memory and constants of a launch."""
    options = define_options(geometry.constants)
    static = EmulatedModule(source_of(name), options=options, name=name).static_shared
    constants = " ".join(f"{key}={value}" for key, value in geometry.constants.items())
    return [
        f"grid            {_product(geometry.grid)} blocks",
        f"block           {_product(geometry.block)} threads, {math.prod(geometry.block) // 32} warps",
        f"shared memory   {static:,} static + {geometry.shared_mem:,} dynamic bytes a block",
        f"constants       {constants or 'none'}",
    ]


def _traffic_lines(run: ExampleRun, report: LaunchReport) -> list[str]:
    """A row for every array: bytes the threads moved against the least, 32-byte sectors and their use."""
    lines = [f"{'array':16}{'least bytes':>12}{'counted':>12}{'ratio':>8}{'sectors':>10}{'efficiency':>12}"]
    for argument in report.arguments:
        traffic, least = argument.read + argument.written, run.least_bytes.get(argument.name, 0)
        if traffic.bytes or least:
            ratio = f"{traffic.bytes / least:.2f}" if least else "-"
            figures = f"{least:>12,}{traffic.bytes:>12,}{ratio:>8}{traffic.sectors:>10,}{traffic.efficiency:>12.0%}"
            lines.append(f"{argument.name:16}{figures}")
    return [
        *lines,
        "counted: the bytes of all threads; what several lanes or blocks read, memory sends once and then a cache",
        "efficiency: the share of the bytes in the sectors (32 bytes each) that the warp asked for",
        "",
        f"shared memory   {report.shared_accesses:,} accesses by warps, {report.bank_conflicts:,} bank conflicts",
        f"barriers        {report.barriers:,}, over all blocks",
    ]


def _error_lines(run: ExampleRun) -> list[str]:
    """The largest error of every output against the twin."""
    return [f"against ReferenceOps.{run.twin}", *(f"{output.name:16}{_verdict(output)}" for output in run.outputs)]


def _verdict(output: Output) -> str:
    if output.tolerance == 0:
        return "equal" if output.agrees else "DIFFERS"
    error = f"error {output.error:.1e} of its row's largest value, {output.tolerance:.1e} allowed"
    return f"{error}: {'agrees' if output.agrees else 'DIFFERS'}"


def _product(sizes: Sequence[int]) -> str:
    return " x ".join(map(str, sizes))
