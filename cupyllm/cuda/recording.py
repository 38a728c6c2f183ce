"""A loader for the emulator's check mode that keeps, of every launch, its geometry and what was counted.

For whoever shows or compares counts: `python -m cupyllm kernels run`, the ladder in benchmarks/, tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cupyllm.cuda.emulated_backend import EmulatedBackend
from cupyllm.cuda.emulator import LaunchReport
from cupyllm.cuda.loader import Geometry, KernelLoader


@dataclass(frozen=True)
class RecordedLaunch:
    """One launch: the kernel's name, how it was launched, and what the emulator counted."""

    name: str
    geometry: Geometry
    report: LaunchReport


class RecordingLoader(KernelLoader):
    """An emulated loader in check mode, with global races watched; `launches` has every launch in order.

    `source` is that of KernelLoader. Raises DeviceError without g++.
    """

    def __init__(self, source: Callable[[str], str] | None = None, *, arch: int = 80) -> None:
        self._reports: list[LaunchReport] = []
        backend = EmulatedBackend("check", arch, global_races=True, on_launch=self._reports.append)
        super().__init__(backend, source)
        self.launches: list[RecordedLaunch] = []

    def launch(self, name: str, geometry: Geometry, args: Sequence[Any]) -> None:
        """Launch, and keep what it tells."""
        already = len(self._reports)
        super().launch(name, geometry, args)
        self.launches += [RecordedLaunch(name, geometry, report) for report in self._reports[already:]]
