"""The real checkpoint against transformers: greedy tokens, logits and prompt log-probabilities recorded in golden.json.

The checkpoint's folder comes from CUPYLLM_TEST_CHECKPOINT and the recorded answers from CUPYLLM_TEST_GOLDEN.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cupyllm import LLM, SamplingParams
from cupyllm.batch import BatchBuilder
from cupyllm.beam_search import BeamParams
from cupyllm.engine import Engine
from cupyllm.kv_cache import allocate_kv_cache
from cupyllm.messages import normalise_messages
from cupyllm.model import forward, logits
from cupyllm.plan import Plan, PlannedChunk
from cupyllm.sequence import Sequence
from tests.golden_case import CASES, CHECKPOINT, NEEDS_CHECKPOINT

pytestmark = NEEDS_CHECKPOINT
# transformers in float32 with another attention form differs by 1e-4; this is 20 times that.
LOGIT_TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(CHECKPOINT, generation_config="none", kv_cache_gib=0.5, max_model_len=2048)


def params_of(case: dict[str, Any], **more: Any) -> SamplingParams:
    penalty = case.get("repetition_penalty")
    return SamplingParams(temperature=0.0, max_tokens=48, repetition_penalty=penalty, **more)


def check(case: dict[str, Any], output: Any) -> None:
    answer = output.outputs[0]
    assert list(answer.token_ids) == case["output_ids"]
    assert answer.text == case["text"]
    assert answer.finish_reason == case["finish"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_prompts_become_the_recorded_tokens(llm: LLM, case: dict[str, Any]) -> None:
    if "prompt" in case:
        assert llm.tokenizer.encode(case["prompt"]) == case["prompt_ids"]
    else:
        assert llm.chat_template is not None
        messages = normalise_messages(case["messages"])
        assert llm.chat_template.encode(messages, tools=case.get("tools")) == case["prompt_ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_greedy_answers_alone(llm: LLM, case: dict[str, Any]) -> None:
    check(case, llm.generate(case["prompt_ids"], params_of(case))[0])


def test_greedy_answers_all_at_once(llm: LLM) -> None:
    prompts = [case["prompt_ids"] for case in CASES]
    outputs = llm.generate(prompts, [params_of(case) for case in CASES], show_progress=False)
    for case, output in zip(CASES, outputs, strict=True):
        check(case, output)


@pytest.mark.parametrize("case", [case for case in CASES if "top5" in case], ids=lambda case: case["name"])
def test_top_five_logits_of_every_step(llm: LLM, case: dict[str, Any]) -> None:
    ids = case["prompt_ids"] + case["output_ids"]
    logits = all_logits(llm.engine, ids)[len(case["prompt_ids"]) - 1 : -1]
    for row, recorded in zip(logits, case["top5"], strict=True):
        np.testing.assert_allclose(row[recorded["ids"]], recorded["logits"], rtol=0, atol=LOGIT_TOLERANCE)
        assert row.argmax() == recorded["ids"][0]


@pytest.mark.parametrize("case", [case for case in CASES if "prompt_logprobs" in case], ids=lambda case: case["name"])
def test_logprobs_of_the_prompt(llm: LLM, case: dict[str, Any]) -> None:
    ids = case["prompt_ids"]
    logits = all_logits(llm.engine, ids).astype(np.float64)
    log_sums = np.log(np.exp(logits - logits.max(axis=1, keepdims=True)).sum(axis=1)) + logits.max(axis=1)
    found = [logits[t - 1, ids[t]] - log_sums[t - 1] for t in range(1, len(ids))]
    np.testing.assert_allclose(found, case["prompt_logprobs"][1:], rtol=0, atol=LOGIT_TOLERANCE)


def all_logits(engine: Engine, ids: list[int]) -> np.ndarray:
    """The logits after every token of `ids`, run as one prompt over a cache of its own."""
    page_size, num_pages = 16, -(-len(ids) // 16)
    cache = allocate_kv_cache(
        engine.runner.device, engine.runner.model.config, num_pages=num_pages, page_size=page_size, dtype="float32"
    )
    sequence = Sequence(0, ids, len(ids), SamplingParams(), 0, 1, frozenset(), page_table=list(range(num_pages)))
    batch = BatchBuilder(page_size).build(Plan([], [PlannedChunk(sequence, 0, len(ids))], []))
    hidden = forward(engine.ops, engine.runner.model, cache, batch)
    return logits(engine.ops, engine.runner.model, hidden, np.arange(len(ids), dtype=np.int32))


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("name", ["short_hello", "chinese", "json_output"])
def test_beam_search_equals_that_of_transformers(llm: LLM, name: str, width: int) -> None:
    torch = pytest.importorskip("torch", reason="install torch and transformers to compare with them")
    transformers = pytest.importorskip("transformers", reason="install torch and transformers to compare with them")
    ids = next(case for case in CASES if case["name"] == name)["prompt_ids"]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    settings = {"num_beams": width, "num_return_sequences": width, "max_new_tokens": 12, "do_sample": False}
    answers = theirs.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), repetition_penalty=1.0, **settings
    )
    search = llm.engine.add_beams(ids, BeamParams(width, max_tokens=12))
    while not search.done:
        llm.engine.step()
    ends = set(llm.engine.runner.model.config.end_token_ids)
    expected = [[*itertools.takewhile(lambda token: token not in ends, row)] for row in answers[:, len(ids) :].tolist()]
    assert [[token for token in beam.token_ids if token not in ends] for beam in search.finished] == expected
