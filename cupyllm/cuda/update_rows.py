"""Launches update_rows.cu: changes of the decode rows, put into the array that holds them."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array

CONSTANT_SETS: tuple[dict[str, int], ...] = ({},)
MAX_REGISTERS = 16
MARKERS = ("LDG.E",)
BLOCK = 256


def geometry(N: int) -> Geometry:
    """A thread for every change."""
    return Geometry(grid=(-(-N // BLOCK),), block=(BLOCK,))


def least_bytes(N: int) -> dict[str, int]:
    """The fewest bytes each array can cost."""
    return dict.fromkeys(("places", "values", "words"), 4 * N)


def example(constants: dict[str, int]) -> Geometry:
    """The launch where every row of a full batch enters a page, for the table of occupancy."""
    return geometry(N=64)


def launch(loader: KernelLoader, words: Array, places: Array, values: Array) -> None:
    """words[places] = values: (W,), (N,), (N,) int32, in place. Raises DeviceError for what is not supported."""
    check_array("update_rows", "words", words, np.int32, (None,))
    check_array("update_rows", "places", places, np.int32, (None,))
    check_array("update_rows", "values", values, np.int32, (len(places),))
    loader.launch("update_rows", geometry(len(places)), (places, values, words, np.int32(len(places))))
