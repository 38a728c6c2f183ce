"""The real checkpoint through the CUDA kernels under the emulator: the first tokens that transformers gives."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from cupyllm import LLM, SamplingParams

CHECKPOINT = os.environ.get("CUPYLLM_TEST_CHECKPOINT")
GOLDEN = os.environ.get("CUPYLLM_TEST_GOLDEN")
pytestmark = [
    pytest.mark.checkpoint,
    pytest.mark.skipif(
        not (CHECKPOINT and GOLDEN),
        reason="set CUPYLLM_TEST_CHECKPOINT to a folder with Qwen2.5-Coder-0.5B-Instruct and CUPYLLM_TEST_GOLDEN to "
        "its recorded answers",
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++"),
]
NAMES = ("short_hello", "chinese", "system_pirate")
CASES: list[dict[str, Any]] = json.loads(Path(GOLDEN).read_text())["cases"] if GOLDEN else []


def test_eight_greedy_tokens_of_three_prompts_together() -> None:
    assert CHECKPOINT
    llm = LLM(CHECKPOINT, device="emulated", kv_cache_gib=0.02, max_model_len=256, generation_config="none")
    cases = [next(case for case in CASES if case["name"] == name) for name in NAMES]
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    outputs = llm.generate([case["prompt_ids"] for case in cases], greedy, show_progress=False)
    for case, output in zip(cases, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == case["output_ids"][:8], case["name"]
