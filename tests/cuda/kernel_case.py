"""What the kernel tests share: loaders in check mode, guarded arrays, elements in both types, and the comparison."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from cupyllm.cuda.emulator import LaunchReport, guarded_copy
from cupyllm.cuda.loader import KernelLoader, emulated_loader

DTYPES = pytest.mark.parametrize("dtype", ["fp16", "bf16"])
# The distance from 1 to the next number of the type.
EPSILON = {"fp16": 2.0**-10, "bf16": 2.0**-7, "fp32": 2.0**-23}


@dataclass
class CheckedLaunches:
    """A loader in the emulator's check mode, and the reports of what was launched through it."""

    arch: int = 80
    global_races: bool = True
    reports: list[LaunchReport] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.loader: KernelLoader = emulated_loader(
            "check", arch=self.arch, global_races=self.global_races, on_launch=self.reports.append
        )


def elements(values: np.ndarray, dtype: str) -> np.ndarray:
    """Floats as guarded elements: float16, or the bits of bf16 (rounded to nearest even) in uint16."""
    if dtype == "fp16":
        return guarded_copy(values.astype(np.float16))
    bits = values.astype(np.float32).view(np.uint32)
    return guarded_copy(((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16))


def widen(array: np.ndarray) -> np.ndarray:
    """Elements as the float32 that they stand for: what the reference op gets."""
    if array.dtype == np.uint16:
        return (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float32)


def random_floats(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> np.ndarray:
    """Normal float32 numbers in a guarded array."""
    return guarded_copy((rng.standard_normal(shape) * scale).astype(np.float32))


def assert_close(actual: np.ndarray, expected: np.ndarray, *, epsilon: float, factor: float) -> None:
    """Every value within factor * epsilon of the expected one, relative to the largest magnitude of its row.

    A sum of many products cancels, so that its error is measured against the size of the row's values. NaN fails.
    """
    row_size = np.abs(expected).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(actual / row_size, expected / row_size, rtol=0, atol=factor * epsilon)


def total_bytes(report: LaunchReport) -> dict[str, int]:
    """Bytes read and written by array argument."""
    return {argument.name: argument.read.bytes + argument.written.bytes for argument in report.arguments}


def parameters_with_ids(cases: list[Any]) -> Any:
    """pytest.mark.parametrize("case", ...) with readable ids."""
    return pytest.mark.parametrize("case", cases, ids=[str(case).replace(" ", "") for case in cases])
