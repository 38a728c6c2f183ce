"""Launches group_maxima.cu: the largest and the weight of every 128 neighbouring logits."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.row_sampling import count_width

CONSTANT_SETS = (
    {"HAS_TEMPERATURE": 0, "HAS_PENALTIES": 0},
    {"HAS_TEMPERATURE": 1, "HAS_PENALTIES": 0},
    {"HAS_TEMPERATURE": 1, "HAS_PENALTIES": 1},
)
MAX_REGISTERS = 40
MARKERS = ("LDG.E.128",)
WARPS = 8
GROUP_IDS = 128
# The arrays of a RowSampling that `launch` takes as penalties, under their names there.
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "counts")


def num_groups(N: int) -> int:
    """How many groups N logits have."""
    return -(-N // GROUP_IDS)


def geometry(R: int, N: int, constants: dict[str, int]) -> Geometry:
    """A block for every eight groups of every row."""
    return Geometry(grid=(-(-num_groups(N) // WARPS), R), block=(WARPS * 32,), constants=constants)


def least_bytes(R: int, N: int, penalised: int = 0) -> dict[str, int]:
    """The fewest bytes each array can cost; `penalised` rows have a penalty."""
    counts = {"counts": 4 * penalised * count_width(N)} if penalised else {}
    return {"logits": 4 * R * N, "maxima": 4 * R * num_groups(N), "sums": 4 * R * num_groups(N), **counts}


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(R=64, N=151936, constants=constants)


def launch(
    loader: KernelLoader,
    logits: Array,
    N: int,
    temperature: Array | None = None,
    penalties: Mapping[str, Array] | None = None,
) -> tuple[Array, Array]:
    """Maxima and sums of the groups of each row's first N logits: (R, V) float32 -> two arrays (R, G).

    `penalties`, the arrays of PENALTIES, are laid on the logits first, in place; they need a temperature. Raises
    DeviceError for what is not supported.
    """
    check_array("group_maxima", "logits", logits, np.float32, (None, None))
    R, V = logits.shape
    if temperature is not None:
        check_array("group_maxima", "temperature", temperature, np.float32, (R,))
    if penalties is not None:
        assert temperature is not None
        dtypes = (np.float32, np.float64, np.float64, np.uint32)
        shapes = ((R,), (R,), (R,), (R, count_width(N)))
        for name, dtype, shape in zip(PENALTIES, dtypes, shapes, strict=True):
            check_array("group_maxima", name, penalties[name], dtype, shape)
    constants = {"HAS_TEMPERATURE": int(temperature is not None), "HAS_PENALTIES": int(penalties is not None)}
    maxima, sums = (loader.empty((R, num_groups(N)), np.float32) for _ in range(2))
    by = [loader.nothing if penalties is None else penalties[name] for name in PENALTIES]
    args = (logits, loader.nothing if temperature is None else temperature, *by, maxima, sums)
    loader.launch("group_maxima", geometry(R, N, constants), (*args, np.int32(V), np.int32(N)))
    return maxima, sums
