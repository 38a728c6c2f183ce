"""Rope settings and the table of rotations: against plain loops, and against transformers where it is installed."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.errors import CheckpointError
from cupyllm.json_object import JsonObject
from cupyllm.rope import RopeConfig, cos_sin_table, inverse_frequencies, read_rope_config

# Trained for 256 positions, stretched to 1024.
YARN = RopeConfig(10_000.0, "yarn", factor=4.0, original_max_position=256)
YARN_FROM_FIRST_COLUMN = replace(YARN, beta_fast=64.0)  # no column turns that often: the ramp begins at column 0
YARN_EXACT_LIMITS = replace(YARN, beta_fast=16.0, truncate=False)
LINEAR = RopeConfig(10_000.0, "linear", factor=4.0)
DEFAULT = RopeConfig(10_000.0)

SETTINGS = {
    "default": {},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 256},
    "yarn-betas": {"factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-from-first-column": {"factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 64.0},
    "yarn-exact-limits": {"factor": 4.0, "original_max_position_embeddings": 256, "truncate": False},
    "yarn-attention-factor": {"factor": 4.0, "original_max_position_embeddings": 256, "attention_factor": 0.9},
    "yarn-mscales": {
        "factor": 40.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.2,
        "mscale_all_dim": 0.7,
    },
    "yarn-original-length-left-out": {"factor": 4.0},
}


def config_json(**values: Any) -> JsonObject:
    return JsonObject(Path("config.json"), {"max_position_embeddings": 1024, "rope_theta": 10_000.0} | values)


def yarn_by_hand(rope: RopeConfig, head_size: int, pair: int) -> float:
    """One inverse frequency, from the definition in section 3.2 of the paper."""
    plain = rope.theta ** (-2 * pair / head_size)

    def pair_with(turns: float) -> float:
        return head_size * math.log(rope.original_max_position / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(0, low), min(head_size - 1, high)
    slow = min(1.0, max(0.0, (pair - low) / (high - low)))
    return plain * (1 - slow) + plain / rope.factor * slow


@pytest.mark.parametrize(
    ("rope", "frequency"),
    [
        (DEFAULT, lambda pair: 10_000.0 ** (-2 * pair / 40)),
        (LINEAR, lambda pair: 10_000.0 ** (-2 * pair / 40) / 4),
        (YARN, lambda pair: yarn_by_hand(YARN, 40, pair)),
        (YARN_FROM_FIRST_COLUMN, lambda pair: yarn_by_hand(YARN_FROM_FIRST_COLUMN, 40, pair)),
        (YARN_EXACT_LIMITS, lambda pair: yarn_by_hand(YARN_EXACT_LIMITS, 40, pair)),
    ],
    ids=["default", "linear", "yarn", "yarn-from-first-column", "yarn-exact-limits"],
)
def test_table_equals_a_plain_loop(rope: RopeConfig, frequency: Any) -> None:
    scale = 0.1 * math.log(4.0) + 1.0 if rope.kind == "yarn" else 1.0
    table = cos_sin_table(rope, 40, 1024)  # (1024, 40)
    expected = np.empty((1024, 40))
    for position in range(1024):
        for pair in range(20):
            angle = position * frequency(pair)
            expected[position, pair] = math.cos(angle) * scale
            expected[position, 20 + pair] = math.sin(angle) * scale
    assert table.dtype == np.float32
    np.testing.assert_allclose(table, expected, rtol=0, atol=1e-4)


def test_yarn_leaves_fast_columns_alone_and_slows_the_others_by_the_factor() -> None:
    yarn, _ = inverse_frequencies(YARN, 64)
    plain, _ = inverse_frequencies(DEFAULT, 64)
    ratio = plain / yarn
    assert ratio[0] == 1.0
    np.testing.assert_allclose(ratio[-4:], 4.0, rtol=1e-6)
    assert np.all(np.diff(ratio) > -1e-6)


def test_long_tables_are_computed_in_blocks_without_seams() -> None:
    table = cos_sin_table(YARN, 8, 20_000)
    inv_freq, scale = inverse_frequencies(YARN, 8)
    for position in (8191, 8192, 16_383, 16_384, 19_999):
        angles = position * inv_freq.astype(np.float64)
        np.testing.assert_allclose(table[position], np.concatenate([np.cos(angles), np.sin(angles)]) * scale, atol=1e-6)


def test_no_positions_make_an_empty_table() -> None:
    assert cos_sin_table(DEFAULT, 8, 0).shape == (0, 8)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("name", SETTINGS)
def test_table_matches_transformers_beyond_the_original_length(name: str, model_type: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch and transformers (pip install torch transformers)")
    pytest.importorskip("transformers", reason="needs transformers (pip install torch transformers)")
    from transformers import Qwen2Config, Qwen3Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    make_config, make_embedding = {
        "qwen2": (Qwen2Config, Qwen2RotaryEmbedding),
        "qwen3": (Qwen3Config, Qwen3RotaryEmbedding),
    }[model_type]
    settings = {"rope_type": name.split("-")[0], "rope_theta": 10_000.0, **SETTINGS[name]}
    config = make_config(
        hidden_size=128,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        rope_parameters=dict(settings),
    )
    positions = torch.arange(1024)[None]
    cos, sin = make_embedding(config)(torch.zeros(1, dtype=torch.float32), positions)

    table = cos_sin_table(read_rope_config(config_json(rope_parameters=settings)), 64, 1024)
    np.testing.assert_allclose(table[:, :32], cos[0, :, :32].numpy(), rtol=0, atol=1e-4)
    np.testing.assert_allclose(table[:, 32:], sin[0, :, 32:].numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 256}},
        {"rope_scaling": {"rope_type": "yarn", "type": "yarn", "factor": 4, "original_max_position_embeddings": 256}},
        {
            "rope_theta": None,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 256,
                "beta_fast": None,
            },
        },
    ],
    ids=["type", "rope_type", "both", "version-5"],
)
def test_all_spellings_of_yarn_are_read(values: dict[str, Any]) -> None:
    assert read_rope_config(config_json(**values)) == YARN


@pytest.mark.parametrize("values", [{}, {"rope_scaling": None}, {"rope_parameters": {"rope_type": "default"}}])
def test_no_scaling_is_the_default_kind(values: dict[str, Any]) -> None:
    assert read_rope_config(config_json(**values)) == DEFAULT


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_theta": -1.0}, "rope_theta"),
        ({"rope_theta": math.nan}, "rope_theta"),
        ({"rope_scaling": "yarn"}, "rope_scaling"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
        ({"rope_scaling": {"type": ["yarn"], "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": math.inf}}, "rope_scaling.factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": -1}}, "rope_scaling.beta_fast"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "low_freq_factor": 1}}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor"),
        ({"rope_scaling": {"type": "default", "mrope_section": [1, 2]}}, "rope_scaling.mrope_section"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}, "rope_parameters": {"rope_theta": 2.0}}, "rope_parameters"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters.full_attention"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(values: dict[str, Any], named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_rope_config(config_json(**values))
    assert "config.json" in str(caught.value)
    assert named in str(caught.value)
