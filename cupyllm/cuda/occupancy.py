"""How many blocks of a kernel fit a multiprocessor at once, from its registers, shared memory and block size.

Source: CUDA C++ Programming Guide, "Technical specifications per compute capability"; the register file is handed out
in units of 256 registers a warp.
"""

from __future__ import annotations

from dataclasses import dataclass

_REGISTERS = 65536
_REGISTER_UNIT = 256  # a warp's registers are rounded up to this
_WARP = 32


@dataclass(frozen=True)
class Multiprocessor:
    """What one multiprocessor of an architecture can hold at once."""

    threads: int
    blocks: int
    shared_memory: int  # bytes for all its blocks
    shared_per_block: int  # bytes that the system keeps of each block
    max_block_shared: int  # bytes one block may have


MULTIPROCESSORS = {
    70: Multiprocessor(2048, 32, 96 * 1024, 0, 96 * 1024),
    75: Multiprocessor(1024, 16, 64 * 1024, 0, 64 * 1024),
    80: Multiprocessor(2048, 32, 164 * 1024, 1024, 163 * 1024),
    86: Multiprocessor(1536, 16, 100 * 1024, 1024, 99 * 1024),
    89: Multiprocessor(1536, 24, 100 * 1024, 1024, 99 * 1024),
    90: Multiprocessor(2048, 32, 228 * 1024, 1024, 227 * 1024),
    100: Multiprocessor(2048, 32, 228 * 1024, 1024, 227 * 1024),
    120: Multiprocessor(1536, 24, 100 * 1024, 1024, 99 * 1024),
}


def resident_blocks(arch: int, block: int, registers: int, shared_memory: int) -> int:
    """How many blocks of `block` threads one multiprocessor holds at once; 0 when not even one fits."""
    limits = MULTIPROCESSORS[arch]
    if shared_memory > limits.max_block_shared:
        return 0
    warps = -(-block // _WARP)
    registers_per_warp = -(-registers * _WARP // _REGISTER_UNIT) * _REGISTER_UNIT
    by_registers = _REGISTERS // registers_per_warp // warps
    by_shared = limits.shared_memory // max(1, shared_memory + limits.shared_per_block)
    return min(limits.blocks, limits.threads // (warps * _WARP), by_registers, by_shared)


def occupancy(arch: int, block: int, registers: int, shared_memory: int) -> float:
    """The share of a multiprocessor's threads that can be resident, from 0 to 1."""
    return resident_blocks(arch, block, registers, shared_memory) * block / MULTIPROCESSORS[arch].threads
