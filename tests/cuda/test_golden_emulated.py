"""The real checkpoint through the CUDA kernels under the emulator: the first tokens that transformers gives."""

from __future__ import annotations

import shutil

import pytest

from cupyllm import LLM, SamplingParams
from tests.golden_case import CASES, CHECKPOINT, NEEDS_CHECKPOINT

pytestmark = [
    *NEEDS_CHECKPOINT,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++"),
]
NAMES = ("short_hello", "chinese", "system_pirate")


def test_eight_greedy_tokens_of_three_prompts_together() -> None:
    settings = {"kv_cache_gib": 0.02, "max_model_len": 256, "generation_config": "none"}
    # Prompts are launched one by one, and the other steps are replayed.
    llm = LLM(CHECKPOINT, device="emulated", graphs=True, **settings)
    cases = [next(case for case in CASES if case["name"] == name) for name in NAMES]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.generate([case["prompt_ids"] for case in cases], greedy, show_progress=False)
    for case, output in zip(cases, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case["output_ids"][:8], case["name"]
