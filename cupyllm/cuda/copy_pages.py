"""Launches copy_pages.cu: whole pages of one layer's KV cache to other pages."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array, check_inner_size, element_bf16
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 32
MARKERS = ("LDG.E.128",)
BLOCK = 128


def geometry(N: int) -> Geometry:
    """A block for every page of keys and every page of values."""
    return Geometry(grid=(N, 2), block=(BLOCK,))


def least_bytes(N: int, page_size: int, KH: int, D: int) -> dict[str, int]:
    """The fewest bytes each array can cost: pages are read and written."""
    pages = 2 * N * 2 * page_size * KH * D
    return {"sources": 4 * N, "copies": 4 * N, "keys": pages, "values": pages}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(N=8)


def launch(loader: KernelLoader, keys: Array, values: Array, sources: Array, copies: Array) -> None:
    """Copy page sources[i] to page copies[i] in keys and values. Raises DeviceError for what is not supported."""
    name = "copy_pages"
    element_bf16(name, "keys", keys)
    check_array(name, "keys", keys, keys.dtype, (None, None, None, None))
    check_array(name, "values", values, keys.dtype, keys.shape)
    check_array(name, "sources", sources, np.int32, (None,))
    check_array(name, "copies", copies, np.int32, (len(sources),))
    page_size, KH, D = keys.shape[1:]
    check_inner_size(name, "D", D)
    page_chunks = page_size * KH * D // 8
    loader.launch(name, geometry(len(sources)), (sources, copies, keys, values, np.int32(page_chunks)))
