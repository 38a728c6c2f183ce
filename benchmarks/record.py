"""What every benchmark here shares: timing by rounds, the machine's kind, a table on the screen, a JSON file.

The file is {"machine", "versions", "commit", "command", "rows"}; a row is {"name", "value", "unit", "runs", "peer",
"peer_value", "ratio", "limit"}. `value` is the median of `runs`. Rows keep their names from run to run.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("cupyllm", "numpy", "numba", "torch", "transformers", "cupy-cuda12x", "tokenizers", "starlette", "uvicorn")


@dataclass
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
    def ratio(self) -> float | None:
        """Median of the ratios pair by pair, so that a machine whose speed drifts does not decide."""
        if not self.peer_runs:
            return None
        return statistics.median(own / peer for own, peer in zip(self.runs, self.peer_runs, strict=True))


def machine() -> dict[str, Any]:
    """The kind of machine, without its name."""
    model = platform.processor() or platform.machine()
    flags: set[str] = set()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                model = value.strip()
            elif key.strip() == "flags":
                flags = set(value.split())
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni")
    return {"cpu": model, "cores": os.cpu_count(), "isa": [flag for flag in wanted if flag in flags]}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    run = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def spread(runs: list[float]) -> str:
    return f"{min(runs):.4g} / {statistics.median(runs):.4g} / {max(runs):.4g}"


def finish(rows: list[Row], json_path: Path | None) -> None:
    """Print the rows as a table and, where a path is given, write them as JSON."""
    print(
        f"{'figure':34} {'unit':10} {'min / median / max':>26}  {'against':34} {'min / median / max':>26} {'ratio':>6}"
    )
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        against = spread(row.peer_runs) if row.peer_runs else ""
        name = row.peer or (f"limit {row.limit}" if row.limit else "")
        print(f"{row.name:34} {row.unit:10} {spread(row.runs):>26}  {name:34} {against:>26} {ratio:>6}")
    if json_path is None:
        return
    table = []
    for row in rows:
        entry = asdict(row) | {"value": row.value, "ratio": row.ratio}
        entry["peer_value"] = statistics.median(row.peer_runs) if row.peer_runs else None
        table.append(entry)
    command = " ".join(["python", *sys.argv])
    record = {"machine": machine(), "versions": versions(), "commit": commit(), "command": command, "rows": table}
    json_path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
