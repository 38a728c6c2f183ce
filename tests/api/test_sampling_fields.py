"""Fields that change which tokens are chosen, or add to an answer, through a live server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.live_server import MESSAGES, LiveServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def ids(server: LiveServer, path: str, **fields: Any) -> list[int]:
    base: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "return_token_ids": True}
    base |= {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
    response = server.post(path, base | fields)
    assert response.status_code == 200, response.text
    found: list[int] = response.json()["choices"][0]["token_ids"]
    return found


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_bias_forces_or_forbids_a_token(server: LiveServer, path: str) -> None:
    plain = ids(server, path)
    assert ids(server, path, logit_bias={"77": 100}) == [77] * 12
    assert plain[0] not in ids(server, path, logit_bias={str(plain[0]): -100})
    assert ids(server, path, logit_bias={}) == plain


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("field", ["presence_penalty", "frequency_penalty"])
def test_penalties_push_away_from_what_was_said_and_negative_ones_towards_it(
    server: LiveServer, path: str, field: str
) -> None:
    few = {"allowed_token_ids": list(range(60, 80))}
    plain, pushed, pulled = (len(set(ids(server, path, **few, **{field: by}))) for by in (0, 2, -2))
    assert pushed >= plain >= pulled
    assert pushed > pulled


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_only_allowed_tokens_are_written(server: LiveServer, path: str) -> None:
    assert set(ids(server, path, allowed_token_ids=[70, 71], temperature=2, seed=1)) == {70, 71}


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_bad_word_is_not_written(server: LiveServer, path: str) -> None:
    letters = server.loaded.tokenizer.encode("xyz")
    assert len(letters) == 3
    often = {"allowed_token_ids": letters, "temperature": 2, "seed": 3, "max_tokens": 200}
    text = server.loaded.tokenizer.decode(ids(server, path, **often))
    assert "xy" in text
    assert "zz" in text
    text = server.loaded.tokenizer.decode(ids(server, path, **often, bad_words=["xy"]))
    assert "xy" not in text
    assert "zz" in text


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_nothing_ends_an_answer_before_min_tokens(server: LiveServer, path: str) -> None:
    (end, *_) = server.loaded.engine.runner.model.config.end_token_ids
    ending = {"logit_bias": {str(end): 100}, "ignore_eos": False}
    assert ids(server, path, **ending) == [end]
    found = ids(server, path, **ending, min_tokens=4)
    assert len(found) == 5
    assert found.index(end) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_counts_after_min_tokens_and_can_be_kept(server: LiveServer, stream: bool) -> None:
    (a,) = server.loaded.tokenizer.encode("a")
    fields = {"logit_bias": {str(a): 100}, "stop": "aa", "max_tokens": 9, "temperature": 0, "stream": stream}
    client = server.openai()

    def text(**more: Any) -> str:
        got = client.completions.create(model="tiny", prompt=PROMPT, extra_body=more, **fields)
        return "".join(chunk.choices[0].text for chunk in got) if stream else got.choices[0].text

    assert text() == ""
    assert text(include_stop_str_in_output=True) == "aa"
    assert text(min_tokens=4) == "aaaa"
    assert text(min_tokens=4, include_stop_str_in_output=True) == "aaaaaa"


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("stream", [False, True])
def test_timings_say_where_the_time_went(server: LiveServer, path: str, stream: bool) -> None:
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": PROMPT}
    response = server.post(path, body | {"max_tokens": 5, "return_timings": True, "stream": stream})
    if stream:
        last = response.text.strip().split("\n\n")[-2]
        assert '"choices":[]' in last.replace(" ", "")
        assert "timings" in last
        assert response.text.count("timings") == 1
    else:
        timings = response.json()["timings"]
        assert list(timings) == ["queue_ms", "prefill_ms", "decode_ms", "cached_tokens", "preemptions"]
        assert all(value >= 0 for value in timings.values())
        assert sum(list(timings.values())[:3]) < 60_000


def test_55_a_suffix_is_put_behind_the_mark_it_was_trained_with(server: LiveServer) -> None:
    tokenizer = server.loaded.tokenizer
    body = {"prompt": "def f(", "suffix": "return x", "max_tokens": 2, "return_token_ids": True}
    choice = server.post(TEXT, body).json()["choices"][0]
    asked = tokenizer.decode(choice["prompt_token_ids"], skip_special_tokens=False)
    assert asked == "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>"
    assert choice["prompt_token_ids"][0] == tokenizer.added_tokens["<|fim_prefix|>"]
    assert server.post(TEXT, body | {"suffix": ""}).json()["choices"][0]["prompt_token_ids"] == tokenizer.encode(
        "def f("
    )
    refused = server.post(TEXT, body | {"echo": True})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "echo")
