"""Faults planted in the project's kernels are caught: by the emulator's check mode, or by comparison with the twin.

This is what the other kernel tests rest on. A fault whose text is no longer found exactly once fails its test, so that
the table (planted_faults.py) keeps up with the kernels.
"""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from planted_faults import CASES, FAULTS, WRONG, Fault

from cupyllm.cuda.emulator import KernelFault
from cupyllm.cuda.examples import EXAMPLES, ExampleRun, GuardedHost
from cupyllm.cuda.loader import emulated_loader, source_of
from cupyllm.cuda.nvrtc import kernel_names

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")

PLANTED = [(kernel, fault) for kernel, faults in FAULTS.items() for fault in faults]


def run(kernel: str, case: dict[str, Any], fault: Fault | None = None) -> ExampleRun:
    """The kernel's example, launched from the faulty text if there is a fault."""

    def source(name: str) -> str:
        text = source_of(name)
        if fault is None or name != kernel:
            return text
        assert text.count(fault.old) == 1, f"the text to replace is found {text.count(fault.old)} times"
        return text.replace(fault.old, fault.new)

    loader = emulated_loader("check", global_races=True, source=source)
    return EXAMPLES[kernel](loader, GuardedHost(), **{**CASES.get(kernel, {}), **case})


@pytest.mark.parametrize(("kernel", "fault"), PLANTED, ids=[f"{kernel}: {fault.name}" for kernel, fault in PLANTED])
def test_a_planted_fault_is_caught(kernel: str, fault: Fault) -> None:
    if fault.caught == WRONG:
        assert not run(kernel, fault.case, fault).agrees
        return
    with pytest.raises(KernelFault) as raised:
        run(kernel, fault.case, fault)
    assert (raised.value.kind, raised.value.kernel) == (fault.caught, kernel)


@pytest.mark.parametrize("kernel", FAULTS)
def test_without_a_fault_the_same_examples_raise_nothing_and_agree(kernel: str) -> None:
    cases = {str(fault.case): fault.case for fault in FAULTS[kernel]}
    for case in cases.values():
        assert run(kernel, case).agrees, case


def test_every_kernel_has_planted_faults_and_their_names_are_unique() -> None:
    assert set(FAULTS) == set(kernel_names())
    assert len({(kernel, fault.name) for kernel, fault in PLANTED}) == len(PLANTED) >= 30
