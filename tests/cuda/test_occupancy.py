"""Resident blocks of a multiprocessor, against values worked out by hand from NVIDIA's tables."""

from __future__ import annotations

import pytest

from cupyllm.cuda.occupancy import occupancy, resident_blocks


@pytest.mark.parametrize(
    ("arch", "block", "registers", "shared_memory", "blocks"),
    [
        (80, 256, 32, 0, 8),  # 2048 threads
        (80, 256, 33, 0, 6),  # 40 registers a thread after rounding: 65536 / (40 * 256)
        (80, 256, 128, 0, 2),
        (80, 32, 16, 0, 32),  # the limit of blocks
        (89, 32, 16, 0, 24),
        (80, 128, 32, 48 * 1024, 3),  # 164 KB / (48 KB + 1 KB)
        (75, 128, 32, 48 * 1024, 1),  # 64 KB
        (75, 128, 32, 65 * 1024, 0),  # more than a block may have
        (90, 1024, 64, 0, 1),
    ],
)
def test_the_scarcest_resource_decides(arch: int, block: int, registers: int, shared_memory: int, blocks: int) -> None:
    assert resident_blocks(arch, block, registers, shared_memory) == blocks


def test_occupancy_is_the_share_of_threads() -> None:
    assert occupancy(86, 256, 128, 0) == pytest.approx(512 / 1536)
