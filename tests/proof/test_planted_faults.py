"""Every fault of planted_faults.py, planted in a copy of the project, is noticed by the tests that are named for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.proof.planted_faults import FAULTS

ROOT = Path(__file__).parents[2]


def test_every_fault_planted_by_hand_is_noticed() -> None:
    pytest.importorskip("resource", reason="needs a system that can fork")
    command = [sys.executable, str(ROOT / "scripts" / "mutation.py"), "--by-hand", "--at-least", "100"]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert f"all: {len(FAULTS)} of {len(FAULTS)} noticed" in run.stdout
