"""The roofline of a load, against sums by hand."""

from __future__ import annotations

import math

import pytest

from cupyllm.errors import ConfigError
from cupyllm.load.client import Outcome
from cupyllm.load.roofline import roofline_tokens_per_s
from cupyllm.simulator.known_models import find_model

MODEL = find_model("qwen2.5-0.5b")
WEIGHTS = 987_987_712 - 2 * 0  # bytes that a step reads: the matrices, norms and the tied head in 16 bits
KV = 12_288  # bytes a token


def answered(prompt_tokens: int | None, output_tokens: int) -> Outcome:
    return Outcome(0.0, 0.0, 9.0, [1.0, 9.0], prompt_tokens, output_tokens)


def test_one_client_reads_the_weights_once_a_token_and_the_cache_before_it() -> None:
    rate = roofline_tokens_per_s([answered(100, 50)], 1, MODEL, bandwidth=100e9)
    steps = [WEIGHTS + KV * (100 + 100)] + [WEIGHTS + KV * (100 + token + 1) for token in range(1, 50)]
    assert rate == pytest.approx(50 / (sum(steps) / 100e9), rel=1e-3)


def test_eight_clients_share_the_weights() -> None:
    alone = roofline_tokens_per_s([answered(20, 100)], 1, MODEL, bandwidth=100e9)
    together = roofline_tokens_per_s([answered(20, 100)] * 8, 8, MODEL, bandwidth=100e9)
    assert alone is not None
    assert together is not None
    assert 7.5 < together / alone < 8.0


def test_operations_count_where_their_rate_is_known() -> None:
    outcomes = [answered(1000, 1)]
    memory = roofline_tokens_per_s(outcomes, 1, MODEL, bandwidth=100e9)
    both = roofline_tokens_per_s(outcomes, 1, MODEL, bandwidth=100e9, flops=1e12)
    assert memory is not None
    assert both is not None
    assert both == pytest.approx(1 / (2 * 1000 * 357.9e6 / 1e12), rel=0.1)
    assert memory > 50 * both


def test_failures_have_no_part_and_unknown_lengths_have_no_roofline() -> None:
    failure = Outcome(0.0, 0.0, 1.0, error="status 429: full")
    rate = roofline_tokens_per_s([answered(10, 10)], 1, MODEL, bandwidth=1e9)
    assert rate is not None
    assert math.isfinite(rate)
    assert roofline_tokens_per_s([answered(10, 10), failure], 1, MODEL, bandwidth=1e9) == rate
    assert roofline_tokens_per_s([answered(None, 10)], 1, MODEL, bandwidth=1e9) is None
    assert roofline_tokens_per_s([failure], 1, MODEL, bandwidth=1e9) is None


def test_float32_weights_are_refused_as_the_cost_model_does() -> None:
    import dataclasses

    with pytest.raises(ConfigError, match="float32"):
        roofline_tokens_per_s([answered(1, 1)], 1, dataclasses.replace(MODEL, dtype="float32"), bandwidth=1e9)
