"""Run CUDA kernels on the CPU, from the same text that CuPy compiles, and check them while they run.

    module = EmulatedModule(source, options=("-DHEAD_DIM=64",), mode="check", name="attention")
    report = module.get_function("attention")((4,), (128,), (q, k, out, np.int32(5)), shared_mem=1024)

README.md in this folder explains how it works and what it cannot do. Needs g++ on x86-64 or aarch64 Linux.
"""

from __future__ import annotations

from .errors import KernelBuildError, KernelFault, LaunchError
from .guarded import guarded_copy, guarded_empty
from .launcher import EmulatedKernel, EmulatedModule
from .report import ArgumentReport, LaunchReport, Traffic

__all__ = [
    "ArgumentReport",
    "EmulatedKernel",
    "EmulatedModule",
    "KernelBuildError",
    "KernelFault",
    "LaunchError",
    "LaunchReport",
    "Traffic",
    "guarded_copy",
    "guarded_empty",
]
