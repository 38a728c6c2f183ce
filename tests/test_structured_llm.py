"""Guides in the engine: whatever the demo model would say, its answers keep to them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from cupyllm import LLM, SamplingParams
from cupyllm.errors import DeadEndError, RequestError
from tests.test_structured import POINT, SCHEMAS, judge

NAMES = ["object", "optional key", "enum", "definitions", "any of", "integer bounds", "pattern", "string length"]
MESSAGES = [{"role": "user", "content": "What is a page table?"}]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", kv_cache_gib=0.05)


def answers(llm: LLM, **options: Any) -> list[Any]:
    return [answer for output in llm.chat(MESSAGES, SamplingParams(**options)) for answer in output.outputs]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_answers_are_valid_by_their_schema(llm: LLM, name: str, temperature: float) -> None:
    schema = SCHEMAS[name][0]
    guide = llm.guide(json_schema=schema)
    for answer in answers(llm, guide=guide, temperature=temperature, seed=1, n=3, max_tokens=300):
        assert answer.finish_reason == "stop"
        judge(schema).validate(json.loads(answer.text))


def test_each_kind_of_guide(llm: LLM) -> None:
    few = {"temperature": 2.0, "seed": 4, "n": 3, "max_tokens": 40}
    assert all(a.text in ("yes", "no") for a in answers(llm, guide=llm.guide(choice=["yes", "no"]), **few))
    assert all(re.fullmatch(r"\d{4}", a.text) for a in answers(llm, guide=llm.guide(regex=r"\d{4}"), **few))
    assert all(re.fullmatch("(ab)+", a.text) for a in answers(llm, guide=llm.guide(grammar='start: "ab"+'), **few))
    (greedy,) = answers(llm, guide=llm.guide(json_object=True), temperature=0.0, max_tokens=150)
    assert greedy.finish_reason == "length" or isinstance(json.loads(greedy.text), dict)


def test_max_tokens_may_cut_an_answer(llm: LLM) -> None:
    (answer,) = answers(llm, guide=llm.guide(json_schema=POINT), temperature=0.0, max_tokens=3)
    assert answer.finish_reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(answer.text)


def test_guided_and_free_answers_run_side_by_side(llm: LLM) -> None:
    free = SamplingParams(temperature=0.0, max_tokens=20)
    guided = SamplingParams(temperature=0.0, max_tokens=200, guide=llm.guide(json_schema=POINT))
    alone = [llm.chat(MESSAGES, params)[0] for params in (free, guided)]
    assert llm.chat([MESSAGES] * 2, [free, guided], show_progress=False) == alone


def test_an_answer_that_is_preempted_goes_on_where_it_was(llm: LLM) -> None:
    small = LLM("demo", kv_cache_gib=0.0009, max_model_len=150)
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=130, guide=small.guide(regex=r"([a-c][0-9],){30}"))
    together = small.generate(["Points: "] * 4, params, show_progress=False)
    assert small.engine.stats.num_preemptions > 0, "a pool this small must preempt, or the case is void"
    assert together == llm.generate(["Points: "] * 4, params, show_progress=False)
    assert all(re.fullmatch(r"([a-c][0-9],){30}", output.outputs[0].text) for output in together)


def test_a_guide_that_leads_nowhere_ends_the_answer_with_an_error_that_says_so(llm: LLM) -> None:
    guide = llm.guide(grammar="start: /[0-9]{40}/ never\nnever: never")
    params = SamplingParams(guide=guide, temperature=0.0)
    for answer in (lambda: llm.chat(MESSAGES, params), lambda: list(llm.stream(MESSAGES, params))):
        with pytest.raises(DeadEndError, match=r"^grammar led the answer to a dead end") as caught:
            answer()
        assert caught.value.param == "grammar"
    assert not llm.engine.has_work
    assert answers(llm, temperature=0.0, max_tokens=5)[0].finish_reason == "length"


def test_a_guide_is_made_of_one_thing(llm: LLM) -> None:
    with pytest.raises(RequestError, match="needs one of json_schema, json_object, regex, choice and grammar"):
        llm.guide()
    with pytest.raises(RequestError, match="regex cannot be used with json_schema"):
        llm.guide(json_schema=POINT, regex="a")
    with pytest.raises(RequestError, match="json_schema: the schema's keyword 'not' is not supported"):
        llm.guide(json_schema={"not": {}})
