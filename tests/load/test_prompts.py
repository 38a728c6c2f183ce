"""The bodies of requests: the same for the same seed, of the wanted length, with prefixes that are really shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cupyllm.load.prompts import WORDS, BodyStyle, prompt_text, request_body
from cupyllm.simulator.workload import Request, Shape, closed_workload
from cupyllm.tokenizer import Tokenizer
from tests.golden_case import CHECKPOINT

STYLE = BodyStyle("m")


def body(request: Request, style: BodyStyle = STYLE, seed: int = 0, number: int = 0) -> dict[str, Any]:
    value = json.loads(request_body(request, style, seed=seed, number=number))
    assert isinstance(value, dict)
    return value


def test_the_same_seed_makes_the_same_bodies_and_another_seed_others() -> None:
    def bodies(seed: int) -> list[bytes]:
        requests = closed_workload(4, 30, Shape(), seed).requests
        return [request_body(request, STYLE, seed=seed, number=number) for number, request in enumerate(requests)]

    assert bodies(7) == bodies(7)
    assert len({*bodies(7), *bodies(8)}) == 60


def test_a_prompt_has_so_many_words_and_begins_like_no_other() -> None:
    texts = [prompt_text(Request(0.0, 40, 1), seed=0, number=number) for number in range(-2, 50)]
    assert {len(text.split()) for text in texts} == {40}
    assert len({text[:60] for text in texts}) == len(texts)


def test_a_shared_prefix_is_the_same_text_for_all_that_name_it() -> None:
    def words(prefix: str, number: int) -> list[str]:
        return prompt_text(Request(0.0, 30, 1, prefix, 20), seed=0, number=number).split()

    assert words("a", 1)[:20] == words("a", 2)[:20]
    assert words("a", 1)[20:] != words("a", 2)[20:]
    assert words("a", 1)[:20] != words("b", 1)[:20]


def test_both_endpoints_and_what_is_asked_of_the_server() -> None:
    request = Request(0.0, 3, 17, priority=-1)
    chat = body(request)
    assert [message["role"] for message in chat["messages"]] == ["user"]
    expected = {"model": "m", "max_tokens": 17, "ignore_eos": True, "stream": True, "priority": -1, "temperature": 0.0}
    assert expected.items() <= chat.items()
    assert chat["stream_options"] == {"include_usage": True}
    completion = body(request, BodyStyle("m", "completions"))
    assert completion["prompt"] == chat["messages"][0]["content"]
    assert "messages" not in completion
    assert "priority" not in body(Request(0.0, 3, 17))


def test_a_text_of_ones_own_and_more_fields() -> None:
    style = BodyStyle("m", text="Write a short poem.", extra={"ignore_eos": None, "top_k": 5, "temperature": 0.5})
    sent = body(Request(0.0, 99, 8), style)
    assert sent["messages"][0]["content"] == "Write a short poem."
    assert "ignore_eos" not in sent
    assert (sent["top_k"], sent["temperature"]) == (5, 0.5)


@pytest.mark.checkpoint
@pytest.mark.skipif(not CHECKPOINT, reason="set CUPYLLM_TEST_CHECKPOINT to a folder with a Qwen2.5 checkpoint")
def test_a_word_is_a_token_of_qwen() -> None:
    tokenizer = Tokenizer.from_folder(Path(CHECKPOINT))
    assert len(set(WORDS)) == len(WORDS)
    for word in WORDS:
        assert len(tokenizer.encode(f" {word}")) == 1, word
