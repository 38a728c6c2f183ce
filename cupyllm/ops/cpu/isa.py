"""Instruction sets: what the kernels are compiled for, what this machine has, and what the config may ask for.

The kernels are LLVM IR over vectors of `lanes` float32, so that one text serves every machine; an instruction set says
how wide a vector is and whether its two special instructions exist:

    avx512_bf16  32 products of bf16 weights and bf16 activations in one instruction (VDPBF16PS)
    avx512       16 lanes
    avx2         8 lanes
    portable     4 lanes: SSE2, NEON or whatever LLVM makes of them
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from llvmlite import binding as llvm

from cupyllm.errors import DeviceError


class Isa(NamedTuple):
    """An instruction set: float32 lanes of a vector, and whether bf16 products have an instruction."""

    name: str
    lanes: int
    bf16_dot: bool = False

    def lanes_for(self, width: int) -> int:
        """The widest vector for rows of `width` numbers: two of them divide a row (`width` is a multiple of 8)."""
        lanes = self.lanes
        while width % (2 * lanes):
            lanes //= 2
        assert lanes >= 4, width
        return lanes


# Best first. Each needs these features of the processor, by LLVM's names.
_NEEDS = {
    Isa("avx512_bf16", 16, bf16_dot=True): ("avx512f", "avx512bw", "avx512vl", "avx512bf16"),
    Isa("avx512", 16): ("avx512f", "avx512bw", "avx512vl"),
    Isa("avx2", 8): ("avx2", "fma", "f16c"),
    Isa("portable", 4): (),
}
NAMES = ("auto", *(isa.name for isa in _NEEDS))


def available() -> list[Isa]:
    """The instruction sets that this machine has, best first."""
    features = llvm.get_host_cpu_features()
    return [isa for isa, needs in _NEEDS.items() if all(features.get(need) for need in needs)]


def choose(name: str) -> Isa:
    """The instruction set of that name, or the best for "auto". Raises DeviceError where the machine lacks it."""
    found = {isa.name: isa for isa in available()}
    if name == "auto":
        return next(iter(found.values()))
    if name not in found:
        raise DeviceError(f"cpu_isa {name!r}: this processor does not have it; it has {', '.join(found)}")
    return found[name]


def usable_processors() -> tuple[int, int]:
    """Physical cores that this process may use, and hardware threads: two of one core are counted once, and twice."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    cores = set()
    for cpu in cpus:
        try:
            path = f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            cores.add(Path(path).read_text(encoding="ascii"))
        except OSError:  # not Linux: there is nothing better to know
            cores.add(str(cpu))
    return len(cores), len(cpus)
