"""The real checkpoint behind the real server: all recorded conversations at once, through the official client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.golden_case import CASES, CHECKPOINT, NEEDS_CHECKPOINT

pytestmark = NEEDS_CHECKPOINT
SERVER = Path(__file__).parents[2] / "server.py"


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    """A server process as a user starts it, on a free port that its banner names."""
    settings = {"model": CHECKPOINT, "port": 0, "generation_config": "none", "served_model_name": "qwen"}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    process = subprocess.Popen([sys.executable, str(SERVER), *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if line.startswith("url"):
                with openai.OpenAI(base_url=f"{line.split()[1]}/v1", api_key="none", timeout=600) as client:
                    yield client
                break
        else:
            pytest.fail("the server ended before it listened")
    finally:
        process.terminate()
        assert process.wait(60) == 0
        process.stdout.close()


def ask(client: openai.OpenAI, case: dict[str, Any], stream: bool) -> tuple[str, list[int], list[int], str]:
    """Text, prompt ids, output ids and finish reason of one recorded case."""
    extra = {"return_token_ids": True, "repetition_penalty": case.get("repetition_penalty")}
    common: dict[str, Any] = {"model": "qwen", "temperature": 0, "max_tokens": 48, "extra_body": extra}
    if "prompt" in case or "tools" in case:
        # Tools are part of a later version: their rendered prompt is sent as token ids.
        prompt = case.get("prompt", case["prompt_ids"])
        choice: Any = client.completions.create(prompt=prompt, **common).choices[0]
        prompt_ids = getattr(choice, "prompt_token_ids", None) or case["prompt_ids"]
        return choice.text, prompt_ids, choice.token_ids, choice.finish_reason
    if not stream:
        answer: Any = client.chat.completions.create(messages=case["messages"], **common)
        choice = answer.choices[0]
        return choice.message.content, answer.prompt_token_ids, choice.token_ids, choice.finish_reason
    text, prompt_ids, token_ids, reason = "", [], [], ""
    for chunk in client.chat.completions.create(messages=case["messages"], stream=True, **common):
        choice = chunk.choices[0]
        text += choice.delta.content or ""
        token_ids += getattr(choice, "token_ids", None) or []
        prompt_ids = getattr(chunk, "prompt_token_ids", None) or prompt_ids
        reason = choice.finish_reason or reason
    return text, prompt_ids, token_ids, reason


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_all_recorded_cases_at_once(client: openai.OpenAI, stream: bool) -> None:
    with ThreadPoolExecutor(len(CASES)) as threads:
        answers = list(threads.map(lambda case: ask(client, case, stream), CASES))
    for case, (text, prompt_ids, token_ids, reason) in zip(CASES, answers, strict=True):
        assert prompt_ids == case["prompt_ids"], case["name"]
        assert token_ids == case["output_ids"], case["name"]
        assert (text, reason) == (case["text"], case["finish"]), case["name"]
