"""A row of logits with an index: the largest of every group of 128 neighbours.

With it most of a row need not be looked at again: what is far below the largest logit can neither be drawn nor be
among the most likely.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cupyllm.ops.cpu.bits import bits_of, exp_double, float_of
from cupyllm.ops.cpu.compile import part, part_in_any_order
from cupyllm.ops.cpu.numerics import load_number

GROUP = 128
_SIGN, _MAGNITUDE, _INFINITY = np.int32(31), np.int32(0x7FFFFFFF), np.int32(0x7F800000)
_LOWEST = np.int32(-(2**31))
_NAN = np.float32(np.nan)
_NO_MASS = np.float32(50)  # half a million tokens this far away have less than 1e-15 of the mass of the nearest
_FARTHEST = 708.0  # what is less likely than e ** -708 counts as that


class Row(NamedTuple):
    """The first N numbers from `offset` on of the logits' memory."""

    logits: Any
    offset: int
    N: int
    maxima: Any  # (ceil(N / 128),) float32, of the groups
    most_likely: int  # the first id with the largest logit; -1 where this is not finite or the row has a NaN
    largest: Any  # its logit
    temperature: Any


@part
def index_row(logits: Any, r: int, N: int, temperature: Any) -> Any:
    """Row r of logits (R, V)."""
    offset, maxima = r * logits.shape[1], np.empty((N + GROUP - 1) // GROUP, np.float32)
    best, is_sound = 0, True
    for g in range(len(maxima)):
        maxima[g] = largest_of(logits, offset + g * GROUP, min(GROUP, N - g * GROUP))
        is_sound = is_sound and not np.isnan(maxima[g])
        if maxima[g] > maxima[best]:
            best = g
    most_likely = best * GROUP
    while is_sound and load_number(logits, offset + most_likely) != maxima[best]:
        most_likely += 1
    most_likely = most_likely if is_sound and np.isfinite(maxima[best]) else -1
    return Row(logits, offset, N, maxima, most_likely, maxima[best], temperature)


@part
def largest_of(logits: Any, offset: int, count: int) -> Any:
    """The largest of `count` numbers of the logits' memory; NaN where one is NaN.

    They are compared as whole numbers, which become vectors: floats do not, because of NaN.
    """
    most, magnitude = _LOWEST, np.int32(0)
    for i in range(count):
        bits = bits_of(load_number(logits, offset + i))
        most = max(most, ordered(bits))
        magnitude = max(magnitude, np.int32(bits & _MAGNITUDE))
    return _NAN if magnitude > _INFINITY else float_of(ordered(most))


@part
def ordered(bits: Any) -> Any:
    """The bits of a float32 as a number that is larger for a larger float; and back."""
    return np.int32(bits ^ ((bits >> _SIGN) & _MAGNITUDE))


@part
def logit_of(row: Row, token_id: int) -> Any:
    return load_number(row.logits, row.offset + token_id)


@part
def distance_of(row: Row, logit: Any) -> Any:
    """How far below the most likely token's a logit is: in float32, rounded as in the reference."""
    return (row.largest - logit) / row.temperature


@part
def weight_of(distance: Any) -> Any:
    """exp(-distance) in float64."""
    return exp_double(-min(np.float64(distance), _FARTHEST))


@part
def mass_of_row(row: Row) -> float:
    """The sum of all tokens' weights."""
    mass = 0.0
    for g in range(len(row.maxima)):
        if distance_of(row, row.maxima[g]) < _NO_MASS:
            mass += mass_of_group(row, g * GROUP, min((g + 1) * GROUP, row.N))
    return mass


@part_in_any_order
def mass_of_group(row: Row, first: int, last: int) -> float:
    mass = 0.0
    for token_id in range(first, last):
        mass += weight_of(distance_of(row, logit_of(row, token_id)))
    return mass
