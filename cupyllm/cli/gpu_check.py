"""`python -m cupyllm gpu-check`: on a machine with a GPU, whether the kernels are right there and how fast they are."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from cupyllm.errors import ConfigError

_EXAMPLES = """\
examples:
  python -m cupyllm gpu-check --json gpu.json
  python -m cupyllm gpu-check --quick

The exit code is 0 when everything that was compared agrees, 1 when something does not, and 2 when there is no GPU that
can be used. docs/gpu-check.md explains the figures.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the subcommand's arguments."""
    parser = subparsers.add_parser(
        "gpu-check",
        help="on a GPU: every kernel against the reference, and its speed against what the GPU can do",
        description="Check the CUDA kernels on this machine's GPU and time them: under eight minutes.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the figures here, after each part")
    parser.add_argument("--quick", action="store_true", help="fewer variants and runs, and small shapes: two minutes")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check and time; 1 when something is wrong. Raises DeviceError without a GPU that can be used."""
    from cupyllm.gpu_check.environment import look_around
    from cupyllm.gpu_check.gpu import CupyGpu
    from cupyllm.gpu_check.plan import FULL, QUICK
    from cupyllm.gpu_check.report import Report
    from cupyllm.gpu_check.run import Check
    from cupyllm.simulator.known_models import find_model

    start = time.perf_counter()
    if arguments.json is not None and not arguments.json.parent.is_dir():
        raise ConfigError(f"--json {arguments.json}: the folder {arguments.json.parent} does not exist")
    gpu = CupyGpu()
    environment = look_around(gpu.cupy, gpu.compile_probe)
    gpu.has_cublas = environment.has_cublas
    report = Report(arguments.json, environment.facts)
    for name, value in environment.facts.items():
        print(f"{name:20}{value}")
    for line in environment.missing:
        report.note(line)
    plan = QUICK if arguments.quick else FULL
    models = {name: find_model(name) for name in plan.models}
    check = Check(gpu, plan, report, time.perf_counter, start, models)
    agrees = check.run(gpu.device)
    print(f"\n{'everything agrees' if agrees else 'WRONG: ' + ', '.join(report.wrong)}")
    return 0 if agrees else 1
