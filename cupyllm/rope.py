"""Rotary position embedding: from the rope settings in config.json to one table of cosines and sines.

This module reads the settings and computes the table; rotating queries and keys by it is an op (ops/).

Each pair of columns (i, i + D/2) of a query or key turns by `position * inverse_frequency[i]`. Three kinds are known:
`default` (RoFormer, arXiv 2104.09864), `linear` (every frequency divided by `factor`) and `yarn` (YaRN, arXiv
2309.00071: slow columns are divided by `factor`, fast ones are left alone, and cosines and sines are scaled a little).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from cupyllm.json_object import JsonObject

RopeKind = Literal["default", "linear", "yarn"]

_KEYS_OF_ALL_KINDS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_KEYS = {  # kind -> the further keys that mean something for it
    "default": set[str](),
    "linear": {"factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    },
}
_ROWS_PER_BLOCK = 8192  # positions computed at once in float64, so that a long table needs little extra memory


@dataclass(frozen=True)
class RopeConfig:
    """The rope settings of one checkpoint. Fields below `factor` matter for `yarn` only."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0  # positions the model was trained on before it was stretched
    beta_fast: float = 32.0  # columns that turn more often than this over the original length keep their frequency
    beta_slow: float = 1.0  # columns that turn less often than this are divided by factor
    attention_factor: float | None = None  # scale of cosines and sines; None: derived from factor and the mscales
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # round the two limits between fast and slow columns outwards to whole columns


def read_rope_config(config: JsonObject) -> RopeConfig:
    """The rope settings in config.json: in `rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (4).

    Raises CheckpointError for an unknown type, for a key that means nothing for the type, and for values out of range.
    """
    if config.has("rope_scaling") and config.has("rope_parameters"):
        config.fail("rope_scaling", "is given together with rope_parameters; keep one of them")
    key = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    values = config.get(key, {})
    if not isinstance(values, dict):
        config.fail(key, f"is {values!r}, not an object")
    rope = JsonObject(config.file, values, key + ".")
    kind = _read_kind(rope)
    for holder in (config, rope):
        if holder.number("partial_rotary_factor", default=1.0) != 1.0:
            holder.fail("partial_rotary_factor", "is not 1; only rotating whole heads is supported")
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", above=1.0)
    if kind == "default":
        return RopeConfig(theta)
    factor = rope.number("factor", at_least=1.0)
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    return _read_yarn(rope, theta, factor, config.integer("max_position_embeddings"))


def _read_kind(rope: JsonObject) -> RopeKind:
    """The kind, named by `rope_type` or, in older files, `type`; a key that the kind does not use is refused."""
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", _KEYS, default="default")
    if rope.get("type", kind) != kind:
        rope.fail("type", f"is {rope.values['type']!r} while rope_type is {kind!r}")
    for key in sorted(rope.values.keys() - _KEYS[kind] - _KEYS_OF_ALL_KINDS):
        rope.fail(key, f"means nothing for rope type {kind!r}")
    return cast(RopeKind, kind)


def _read_yarn(rope: JsonObject, theta: float, factor: float, max_position: int) -> RopeConfig:
    def optional(key: str) -> float | None:
        return rope.number(key, above=0.0) if rope.has(key) else None

    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_position=rope.integer("original_max_position_embeddings", default=max_position),
        beta_fast=rope.number("beta_fast", default=32.0, above=0.0),
        beta_slow=rope.number("beta_slow", default=1.0, above=0.0),
        attention_factor=optional("attention_factor"),
        mscale=optional("mscale"),
        mscale_all_dim=optional("mscale_all_dim"),
        truncate=rope.flag("truncate", default=True),
    )


def inverse_frequencies(rope: RopeConfig, head_size: int) -> tuple[NDArray[np.float32], float]:
    """Radians per position of each column pair, (D/2,) float32, and the scale of every cosine and sine."""
    columns = np.arange(0, head_size, 2, dtype=np.float64)  # (D/2,)
    plain = rope.theta ** (-columns / head_size)  # (D/2,)
    if rope.kind == "yarn":
        slow = _slow_share(rope, head_size)  # (D/2,)
        stretched = plain / rope.factor * slow + plain * (1.0 - slow)
        return stretched.astype(np.float32), _yarn_attention_scale(rope)
    if rope.kind == "linear":
        return (plain / rope.factor).astype(np.float32), 1.0
    return plain.astype(np.float32), 1.0


def cos_sin_table(rope: RopeConfig, head_size: int, num_positions: int) -> NDArray[np.float32]:
    """One row per position: D/2 cosines, then D/2 sines, both already times the attention scale. (positions, D)

    Angles are float64: in float32 an angle of some 10,000 radians would be wrong in the third digit after the point.
    """
    half = head_size // 2
    inv_freq, scale = inverse_frequencies(rope, head_size)
    table = np.empty((num_positions, head_size), dtype=np.float32)
    for first in range(0, num_positions, _ROWS_PER_BLOCK):
        rows = table[first : first + _ROWS_PER_BLOCK]
        positions = np.arange(first, first + len(rows), dtype=np.float64)
        angles = np.multiply.outer(positions, inv_freq.astype(np.float64))  # (rows, D/2)
        rows[:, :half] = np.cos(angles) * scale
        rows[:, half:] = np.sin(angles) * scale
    return table


def _slow_share(rope: RopeConfig, head_size: int) -> NDArray[Any]:
    """How far each column pair is slowed down: 0 = not at all, 1 = by the whole factor. (D/2,) YaRN, section 3.2."""
    first_slowed = _column_turning(rope.beta_fast, rope, head_size)
    fully_slowed = _column_turning(rope.beta_slow, rope, head_size)
    if rope.truncate:
        first_slowed, fully_slowed = math.floor(first_slowed), math.ceil(fully_slowed)
    first_slowed, fully_slowed = max(first_slowed, 0), min(fully_slowed, head_size - 1)
    width = fully_slowed - first_slowed or 0.001  # a step instead of a ramp when both limits are the same column
    ramp = (np.arange(head_size // 2, dtype=np.float64) - first_slowed) / width
    return np.clip(ramp, 0.0, 1.0)


def _column_turning(turns: float, rope: RopeConfig, head_size: int) -> float:
    """The column pair (a fraction) that turns `turns` times over the original length."""
    return head_size * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))


def _yarn_attention_scale(rope: RopeConfig) -> float:
    """The scale of cosines and sines: given, or 0.1 ln(factor) + 1 (YaRN, section 3.4), or a ratio of two of those."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _magnitude(rope.factor, rope.mscale) / _magnitude(rope.factor, rope.mscale_all_dim)
    return _magnitude(rope.factor, 1.0)


def _magnitude(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
