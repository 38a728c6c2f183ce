"""NVIDIA's compute-sanitizer over the examples, in a process of its own and with a time limit."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from cupyllm.figures import Row
from cupyllm.gpu_check.environment import SANITIZER

TOOLS = ("memcheck", "racecheck")
EXAMPLES_COMMAND = (sys.executable, "-m", "cupyllm.gpu_check.correctness")
_SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards?)")
_SHOWN_LINES = 8


@dataclass(frozen=True)
class Findings:
    """What a tool found: how many errors or hazards, None when it did not come to an end; and what it printed."""

    tool: str
    count: int | None
    text: str

    def row(self) -> Row:
        """The count as a figure, which must be 0."""
        assert self.count is not None
        return Row(f"sanitizer.{self.tool}", "findings", [self.count], limit="<= 0")


def sanitize(tool: str, *, limit_s: float, command: Sequence[str] = EXAMPLES_COMMAND) -> Findings:
    """Run `command` under a tool of compute-sanitizer, which must be on PATH."""
    process = subprocess.Popen(
        [SANITIZER, "--tool", tool, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that all its processes can be ended together
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return Findings(tool, None, f"stopped after {limit_s:.0f} s")
    found = _SUMMARY.findall(output)
    lines = [line for line in output.splitlines() if line.strip("= ")]
    if not found:
        return Findings(tool, None, f"ended without a summary: {lines[-1] if lines else 'no output'}")
    return Findings(tool, int(found[-1]), "\n".join(lines[:_SHOWN_LINES]))
