"""Every kernel has an example, and every example agrees with its twin under the emulator's check mode."""

from __future__ import annotations

import re
import shutil
from importlib import resources

import numpy as np
import pytest

from cupyllm.cuda.examples import EXAMPLES, GuardedHost, Output
from cupyllm.cuda.nvrtc import kernel_names
from cupyllm.cuda.recording import RecordingLoader

needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")


def test_every_kernel_has_an_example() -> None:
    assert sorted(EXAMPLES) == kernel_names()


@needs_gpp
@pytest.mark.parametrize("name", sorted(EXAMPLES))
@pytest.mark.parametrize("arch", [70, 80])
def test_an_example_launches_its_kernel_and_agrees_with_the_twin_in_the_header(name: str, arch: int) -> None:
    loader = RecordingLoader(arch=arch)
    run = EXAMPLES[name](loader, GuardedHost())
    report = next(launch.report for launch in loader.launches if launch.name == name)
    header = (resources.files("cupyllm.cuda") / f"{name}.cu").read_text("utf-8")
    assert run.twin in re.findall(r"ReferenceOps\.(\w+)", header)
    assert set(run.least_bytes) <= {argument.name for argument in report.arguments}
    assert {output.name: output.error for output in run.outputs if not output.agrees} == {}


@pytest.mark.parametrize(
    ("actual", "agrees"),
    [
        ([1.0, 100.0, np.nan], True),
        ([1.0 + 5e-5, 100.0, np.nan], True),  # small beside the row's 100
        ([1.1, 100.0, np.nan], False),
        ([np.nan, 100.0, np.nan], False),
        ([1.0, 100.0, 0.0], False),
        ([1.0, np.inf, np.nan], False),
    ],
)
def test_an_output_agrees_within_its_tolerance_of_the_row_and_nan_only_with_nan(
    actual: list[float], agrees: bool
) -> None:
    output = Output("y", np.array([actual], np.float32), np.array([[1.0, 100.0, np.nan]], np.float32), 1e-6)
    assert output.agrees is agrees
