"""SamplingParams refuses what it cannot honour, and names the field."""

from __future__ import annotations

from typing import Any

import pytest

from cupyllm.errors import RequestError
from cupyllm.model_config import GenerationDefaults
from cupyllm.sampling import SamplingParams
from cupyllm.token_guide import AllowedIds

BAD: dict[str, list[Any]] = {
    "temperature": [-0.1, 2.1, float("nan"), float("inf"), "1", True],
    "top_p": [0, -0.5, 1.0001, float("nan"), "1"],
    "min_p": [-0.1, 1.1],
    "top_k": [-2, 1.5, "3", True, 2**31],
    "repetition_penalty": [0, -1, 11, float("inf")],
    "seed": [-(2**63) - 1, 2**64, 10**20, "x", 1.5, True],
    "presence_penalty": [-2.1, 2.1, float("nan"), "1", True],
    "frequency_penalty": [-2.1, 2.1, float("inf"), "1", True],
    "logit_bias": [
        *({5: 101}, {"5": -101}, {"5": "1"}, {"5": None}, {"5": float("nan")}, {"x": 1}, {"-1": 1}, {True: 1}),
        *({"5": 1, 5: 1}, {"5": 1, "05": 1}, dict.fromkeys(range(1025), 1), [5], 5),
    ],
    "allowed_token_ids": [[], [-1], ["1"], [True], 5, [1.5]],
    "bad_words": ["word", [""], [1], ["a"] * 129, ["a" * 257], 5],
    "max_tokens": [-1, 1.5, "5", True],
    "min_tokens": [-1, 1.5, "5", True],
    "logprobs": [-1, 21, True],
    "prompt_logprobs": [-1, 21, True],
    "include_stop_str_in_output": [1, "yes"],
    "stop": [[""], "", ["a"] * 5, ["a" * 257], [1], 7],
    "stop_token_ids": [[-1], ["1"], [True], list(range(129)), 5],
    "ignore_eos": [1, "yes"],
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", 0),
        ("temperature", 2),
        ("top_k", -1),
        ("top_k", 10**6),
        ("top_p", 1e-9),
        ("seed", -(2**63)),
        ("seed", 2**64 - 1),
        ("logprobs", 0),
        ("logprobs", 20),
        ("stop", "END"),
        ("stop", ["a", "b", "c", "d"]),
        ("stop", None),
    ],
)
def test_the_edges_are_accepted(field: str, value: Any) -> None:
    SamplingParams(**{field: value})


def test_one_stop_string_is_a_list_of_one() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]


def test_only_what_was_left_out_is_filled_from_the_defaults() -> None:
    defaults = GenerationDefaults(temperature=0.7, top_k=20, top_p=0.8, min_p=0.1, repetition_penalty=1.1)
    filled = SamplingParams(temperature=0.0, top_k=0).filled(defaults)
    values = (filled.temperature, filled.top_k, filled.top_p, filled.min_p, filled.repetition_penalty)
    assert values == (0.0, 0, 0.8, 0.1, 1.1)


def test_what_is_absent_is_neutral() -> None:
    names = ("presence_penalty", "frequency_penalty", "min_tokens", "bad_words", "logit_bias", "stop", "n")
    absent: dict[str, Any] = dict.fromkeys(names)
    assert SamplingParams(**absent) == SamplingParams()


def test_logit_bias_takes_the_ids_as_json_writes_them() -> None:
    assert SamplingParams(logit_bias={"7": -100, 8: 0.5}).logit_bias == {7: -100.0, 8: 0.5}  # type: ignore[dict-item]


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(RequestError, match="min_tokens is 3, but max_tokens is 2"):
        SamplingParams(min_tokens=3, max_tokens=2)


def test_allowed_ids_and_a_grammar_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="allowed_token_ids cannot be used with a grammar"):
        SamplingParams(allowed_token_ids=(1,), guide=AllowedIds([1]))
