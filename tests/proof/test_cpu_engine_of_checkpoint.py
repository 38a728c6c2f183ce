"""The CPU engine over the real checkpoint: the recorded answers on every instruction set; no switch changes a bit."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm import LLM, SamplingParams
from cupyllm.checkpoint import Checkpoint
from cupyllm.device import HostDevice
from cupyllm.model import Model, make_model
from cupyllm.model_config import read_model_config
from cupyllm.weights import load_weights
from tests.engine_case import make_engine
from tests.golden_case import CASES, CHECKPOINT, NEEDS_CHECKPOINT
from tests.proof.answers import Answer, answers_of
from tests.test_golden import LOGIT_TOLERANCE, all_logits

pytest.importorskip("numba", reason="needs numba: pip install 'cupyllm[cpu]'")

from cupyllm.ops.cpu.backend import make_int8, make_ops
from cupyllm.ops.cpu.isa import available

pytestmark = NEEDS_CHECKPOINT
PLAIN = [case for case in CASES if "repetition_penalty" not in case]
EACH_ISA = pytest.mark.parametrize("isa", [isa.name for isa in available()])
# Of the two most likely logits: bf16 weights and activations move a logit by less than a fifth of this.
CLEAR_MARGIN = 0.4
INT8_AGREEMENT = 0.97  # share of positions; 0.99 was measured

B = 16
LENGTHS = [B - 1, B, B + 1, 2 * B - 1, 2 * B, 2 * B + 1, 5 * B + 3]
MAX_TOKENS = 4
LONGEST = LENGTHS[-1] + MAX_TOKENS
TINY, LARGE = -(-LONGEST // B), 100


def load(**config: Any) -> LLM:
    settings = {"kv_cache_gib": 0.1, "max_model_len": 2048, "generation_config": "none", "show_progress": False}
    return LLM(CHECKPOINT, device="cpu", **settings, **config)


def logits_of(llm: LLM, case: dict[str, Any]) -> np.ndarray:
    """The logits after every token of a case's prompt and recorded answer."""
    return all_logits(llm.engine, case["prompt_ids"] + case["output_ids"])


@EACH_ISA
def test_weights_as_stored_give_the_recorded_tokens_and_logits(isa: str) -> None:
    llm = load(cpu_isa=isa, dtype="float16")
    for case in PLAIN:
        logits = logits_of(llm, case)[len(case["prompt_ids"]) - 1 : -1]
        assert logits.argmax(axis=1).tolist() == case["output_ids"], case["name"]
        for row, recorded in zip(logits, case.get("top5", []), strict=False):
            np.testing.assert_allclose(row[recorded["ids"]], recorded["logits"], rtol=0, atol=LOGIT_TOLERANCE)


@EACH_ISA
def test_bf16_weights_give_the_recorded_tokens_wherever_the_margin_is_clear(isa: str) -> None:
    llm, num_clear = load(cpu_isa=isa, dtype="bfloat16"), 0
    for case in PLAIN:
        clear = np.array(case["margins"]) > CLEAR_MARGIN
        logits = logits_of(llm, case)[len(case["prompt_ids"]) - 1 : -1]
        assert np.isfinite(logits).all()
        np.testing.assert_array_equal(logits.argmax(axis=1)[clear], np.array(case["output_ids"])[clear], case["name"])
        num_clear += int(clear.sum())
    assert num_clear > 300


def test_int8_weights_agree_with_bf16_ones_on_the_most_likely_token() -> None:
    int8, bf16 = load(dtype="bfloat16", weights="int8"), load(dtype="bfloat16")
    agree: list[bool] = []
    for case in PLAIN:
        ours, theirs = logits_of(int8, case), logits_of(bf16, case)
        assert np.isfinite(ours).all()
        agree += (ours.argmax(axis=1) == theirs.argmax(axis=1)).tolist()
    assert np.mean(agree) >= INT8_AGREEMENT
    assert not all(agree), "the weights are quantised, or the case is void"


@cache
def model_of(weights: str) -> Model:
    config, ops = read_model_config(Path(CHECKPOINT)), make_ops("auto", "auto")
    upload = make_int8(ops, config) if weights == "int8" else HostDevice().upload
    loaded = load_weights(Checkpoint.open(Path(CHECKPOINT)), config, dtype="bfloat16", upload=upload)
    return make_model(config, loaded, HostDevice(), num_positions=1024)


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of real text around page edges, every second beginning alike; greedy and drawn in turns."""
    texts = [
        case["prompt_ids"][:LONGEST] for name in ("code_review", "tool_call") for case in CASES if case["name"] == name
    ]
    prompts = [texts[number % 2][:length] for number, length in enumerate(LENGTHS)]
    common = {"max_tokens": MAX_TOKENS, "ignore_eos": True, "logprobs": 5}
    kinds = [SamplingParams(temperature=0.0, **common), SamplingParams(temperature=0.8, top_p=0.9, seed=3, **common)]
    return prompts, [kinds[number % 2] for number in range(len(prompts))]


def run(weights: str, at_a_time: int, **settings: Any) -> tuple[list[Answer], Any]:
    engine = make_engine(model_of(weights), ops=make_ops("auto", "auto"), page_size=B, **settings)
    return answers_of(engine, *asked(), at_a_time), engine.stats


@cache
def alone(weights: str) -> list[Answer]:
    """Whole prompts, one after another, with nothing reused."""
    return run(weights, 1, num_pages=LARGE, prefix_cache=False)[0]


@pytest.mark.parametrize("weights", ["bf16", "int8"])
@pytest.mark.parametrize(
    ("chunk", "prefix_cache", "num_pages", "at_a_time"),
    [
        pytest.param(1, True, LARGE, 8, id="chunks of 1, cache"),
        pytest.param(B - 1, False, TINY, 8, id="B-1, tiny pool"),
        pytest.param(B + 1, True, LARGE, 1, id="B+1, cache, alone"),
        pytest.param(3 * B, False, LARGE, 8, id="3B, all at once"),
        pytest.param(512, True, LARGE, 8, id="whole prompts, cache, all at once"),
    ],
)
def test_no_switch_changes_a_bit_of_an_answer(
    weights: str, chunk: int, prefix_cache: bool, num_pages: int, at_a_time: int
) -> None:
    found, stats = run(
        weights,
        at_a_time,
        num_pages=num_pages,
        prefix_cache=prefix_cache,
        max_step_tokens=chunk,
        max_decode_batch_size=min(chunk, 8),
    )
    assert found == alone(weights)  # log-probabilities too, to the last bit
    assert all(np.isfinite(answer.logprobs).all() for answer in found)
    if num_pages == TINY:
        assert stats.num_preemptions > 0, "a pool this small must preempt, or the case is void"
    if prefix_cache:
        assert stats.num_cached_pages > 0
