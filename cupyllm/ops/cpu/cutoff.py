"""Top-k, top-p and min-p without sorting: how far down its ranking a row may draw its next token.

The rank of a token is the pair (distance, id): tokens of the same distance go in order of id. A row's cutoff is the
last rank that all filters keep; each filter works on what the one before it has kept, as in the reference.

Only tokens near the most likely one are looked at: within a reach that grows until they are enough. Among these a
search halves an interval of distances (their bits, which have the same order) and sums up to its middle.

Masses are float64 and as good as those of the reference, but not the same: it adds them in another order. Where an edge
of top-p lies so near a token that the order could decide, the answer is NOT_SURE.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cupyllm.ops.cpu.bits import bits_of, float_of
from cupyllm.ops.cpu.compile import part, part_in_any_order
from cupyllm.ops.cpu.groups import GROUP, Row, distance_of, logit_of, mass_of_row, weight_of

# Of the mass of all tokens. A sum of half a million numbers in float64, one after another, is off by less than 6e-11.
_SURE = 1e-10
_FIRST_REACH, _GROWTH, _LAST_REACH = np.float32(2), np.float32(1.5), np.float32(100)
_ALL_FINITE = np.finfo(np.float32).max
_INFINITY = np.float32(np.inf)
NOT_SURE = -2


@part
def cutoff_of(row: Row, top_k: int, top_p: Any, min_p_distance: Any) -> Any:
    """The row's cutoff: a distance and an id, or NOT_SURE for the id."""
    distance, last_id = _INFINITY, row.N - 1
    cuts_k, cuts_p = 0 < top_k < row.N, top_p < 1
    if cuts_k or cuts_p:
        total = 0.0 if cuts_k else mass_of_row(row)
        near, near_ids, weights, low, high = enough(row, top_k if cuts_k else 0, top_p * total)
        if cuts_k and top_k <= len(near):
            distance, last_id = edge_of_count(near, near_ids, top_k, low, high)
            forget_rest(weights, near, near_ids, distance, last_id)
            low, high = 0, bits_of(distance)
        if cuts_p:
            total = mass_within(near, weights, distance) if cuts_k else total
            distance, last_id = edge_of_mass(near, near_ids, weights, top_p * total, _SURE * total, low, high)
    if min_p_distance < distance and last_id != NOT_SURE:
        distance, last_id = min_p_distance, row.N - 1
    return distance, last_id


@part
def enough(row: Row, count: int, mass: float) -> Any:
    """The nearest tokens (distances, ids, weights), in order of id: `count` with `mass` together and some more, or all
    that are not impossible. With them the bits of a distance that the last needed one is above, and of one it is not.
    """
    reach, previous = _FIRST_REACH, np.float32(0)
    near, near_ids, weights = gather(row, reach)
    while (len(near) < count or mass_within(near, weights, reach) < mass) and reach < _ALL_FINITE:
        reach, previous = reach * _GROWTH if reach < _LAST_REACH else _ALL_FINITE, reach
        near, near_ids, weights = gather(row, reach)
    return near, near_ids, weights, bits_of(previous), bits_of(reach)


@part
def gather(row: Row, reach: Any) -> Any:
    """The tokens within `reach`: distances, ids and weights."""
    groups, room, count = len(row.maxima), 0, 0
    for g in range(groups):
        room += GROUP if distance_of(row, row.maxima[g]) <= reach else 0
    near, near_ids = np.empty(room, np.float32), np.empty(room, np.int32)
    for g in range(groups):
        if distance_of(row, row.maxima[g]) <= reach:
            for token_id in range(g * GROUP, min((g + 1) * GROUP, row.N)):
                distance = distance_of(row, logit_of(row, token_id))
                near[count], near_ids[count] = distance, token_id
                count += distance <= reach
    weights = np.empty(count, np.float64)
    for i in range(count):
        weights[i] = weight_of(near[i])
    return near[:count], near_ids[:count], weights


@part
def forget_rest(weights: Any, near: Any, near_ids: Any, distance: Any, last_id: int) -> None:
    """Take the tokens after a rank out of the masses."""
    for i in range(len(near)):
        if near[i] > distance or (near[i] == distance and near_ids[i] > last_id):
            weights[i] = 0.0


@part
def edge_of_count(near: Any, near_ids: Any, count: int, low: int, high: int) -> Any:
    """The rank of the token number `count`, whose distance's bits are from low to high."""
    while low < high:
        middle = (low + high) // 2
        if count_within(near, float_of(middle)) >= count:
            high = middle
        else:
            low = middle + 1
    distance = float_of(high)
    before = count_within(near, float_of(high - 1)) if high > 0 else 0
    return distance, tied_id(near, near_ids, distance, count - before)


@part
def edge_of_mass(near: Any, near_ids: Any, weights: Any, target: float, slack: float, low: int, high: int) -> Any:
    """The rank of the last token before which there is less than `target`, whose distance's bits are from low to high;
    with NOT_SURE for its id where a mass that is off by `slack` would give another.
    """
    while low < high:
        middle = (low + high) // 2
        if mass_within(near, weights, float_of(middle)) >= target:
            high = middle
        else:
            low = middle + 1
    distance = float_of(high)
    before = mass_within(near, weights, float_of(high - 1)) if high > 0 else 0.0
    weight, tied = weight_of(distance), 0
    for i in range(len(near)):
        tied += near[i] == distance and weights[i] > 0
    places = (target - before) / weight  # how many of the tied tokens it takes
    nearest = min(max(np.rint(places), 0.0), float(tied))
    if abs(places - nearest) * weight <= slack and (before > 0 or nearest > 0):  # that nothing is nothing is sure
        return distance, NOT_SURE
    return distance, tied_id(near, near_ids, distance, min(max(np.ceil(places), 1.0), float(tied)))


@part
def count_within(near: Any, distance: Any) -> Any:
    count = np.int32(0)
    for i in range(len(near)):
        count = np.int32(count + np.int32(near[i] <= distance))
    return count


@part_in_any_order
def mass_within(near: Any, weights: Any, distance: Any) -> Any:
    mass = 0.0
    for i in range(len(near)):
        mass += weights[i] if near[i] <= distance else 0.0
    return mass


@part
def tied_id(near: Any, near_ids: Any, distance: Any, place: float) -> int:
    """The id in a place, from 1 on, among the tokens at a distance."""
    last_id = 0
    for i in range(len(near)):
        if near[i] == distance and place > 0:
            last_id, place = near_ids[i], place - 1
    return last_id
