"""/tokenize and /detokenize. Numbers in names are those of the HTTP contract's statements."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from tests.api.live_server import MAX_MODEL_LEN, MESSAGES, LiveServer, run_server, write_model_folder
from tests.api.test_bad_bodies import V, assert_error

TEXTS = ["the weather", "<|im_start|>user\n", "  déjà\n\n你好 \U0001fae0 e\u0301", "", "a<|fim_prefix|>b"]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def tokenize(server: LiveServer, **fields: Any) -> Any:
    response = server.post("/tokenize", fields)
    assert response.status_code == 200, response.text
    return response.json()


def detokenize(server: LiveServer, tokens: list[int]) -> str:
    response = server.post("/detokenize", {"tokens": tokens})
    assert response.status_code == 200, response.text
    assert set(response.json()) == {"prompt"}
    return response.json()["prompt"]


@pytest.fixture(scope="module")
def library(model_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_70_a_text_becomes_the_ids_of_the_library(server: LiveServer, library: tokenizers.Tokenizer, text: str) -> None:
    expected = library.encode(text)
    answer = tokenize(server, prompt=text)
    assert answer == {"count": len(expected.ids), "max_model_len": MAX_MODEL_LEN, "tokens": expected.ids}
    assert tokenize(server, content=text, model="tiny") == answer
    assert tokenize(server, prompt=text, return_token_strs=True) == answer | {"token_strs": expected.tokens}


@pytest.mark.parametrize("text", TEXTS)
def test_70_detokenize_gives_the_text_back(server: LiveServer, library: tokenizers.Tokenizer, text: str) -> None:
    tokens = tokenize(server, prompt=text)["tokens"]
    assert detokenize(server, tokens) == library.decode(tokens, skip_special_tokens=False)
    assert detokenize(server, tokens) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("fields", [{}, {"chat_template_kwargs": {"enable_thinking": False}}])
def test_70_messages_become_the_ids_of_the_chat_route(server: LiveServer, fields: dict[str, Any]) -> None:
    body = {"messages": MESSAGES, "max_tokens": 1, "return_token_ids": True}
    answer = server.post("/v1/chat/completions", body | fields).json()
    assert tokenize(server, messages=MESSAGES, **fields)["tokens"] == answer["prompt_token_ids"]


def test_70_a_prompt_becomes_the_ids_of_the_completions_route(server: LiveServer) -> None:
    body = {"prompt": TEXTS[1:3], "max_tokens": 1, "return_token_ids": True}
    choices = server.post("/v1/completions", body).json()["choices"]
    assert [tokenize(server, prompt=text)["tokens"] for text in TEXTS[1:3]] == [c["prompt_token_ids"] for c in choices]


def test_70_without_the_generation_prompt_the_conversation_ends(server: LiveServer) -> None:
    text = detokenize(server, tokenize(server, messages=MESSAGES, add_generation_prompt=False)["tokens"])
    assert text == f"<|im_start|>user\n{MESSAGES[0]['content']}<|im_end|>\n"
    whole = detokenize(server, tokenize(server, messages=MESSAGES, add_generation_prompt=True)["tokens"])
    assert whole == text + "<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def embedding_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Its tokenizer ends every text with an end token, as Qwen3-Embedding's does; its template shows tools."""
    folder = write_model_folder(tmp_path_factory.mktemp("embedding"))
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    template = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", end)])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    config["chat_template"] = "{{ tools | tojson if tools }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    with run_server(folder) as live:
        yield live


@pytest.mark.parametrize("text", TEXTS)
def test_70_special_tokens_are_those_of_the_tokenizer(embedding_server: LiveServer, text: str) -> None:
    library = tokenizers.Tokenizer.from_file(str(embedding_server.loaded.folder / "tokenizer.json"))
    without, with_end = library.encode(text, add_special_tokens=False).ids, library.encode(text).ids
    assert len(with_end) == len(without) + 1
    assert tokenize(embedding_server, prompt=text)["tokens"] == with_end
    assert tokenize(embedding_server, prompt=text, add_special_tokens=False)["tokens"] == without


def test_70_tools_reach_the_template_and_special_tokens_are_added_on_demand(embedding_server: LiveServer) -> None:
    asked = {"messages": MESSAGES, "tools": TOOLS}
    tokens = tokenize(embedding_server, **asked)["tokens"]
    assert detokenize(embedding_server, tokens) == json.dumps(TOOLS) + "|" + MESSAGES[0]["content"]
    end = embedding_server.loaded.tokenizer.added_tokens["<|endoftext|>"]
    assert tokenize(embedding_server, **asked, add_special_tokens=True)["tokens"] == [*tokens, end]


BAD = [
    ({}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "a", "content": "a"}, "content"),
    ({"prompt": "a", "messages": MESSAGES}, "messages"),
    ({"prompt": ["a"]}, "prompt"),
    ({"prompt": "\ud800"}, "prompt"),
    ({"content": 5}, "content"),
    ({"prompt": "a", "tools": TOOLS}, "tools"),
    ({"prompt": "a", "add_generation_prompt": True}, "add_generation_prompt"),
    ({"prompt": "a", "chat_template_kwargs": {}}, "chat_template_kwargs"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": "a"}] * 2049}, "messages"),
    ({"messages": MESSAGES, "chat_template_kwargs": {"foo": 1}}, "chat_template_kwargs.foo"),
    ({"messages": MESSAGES, "tools": ["f"]}, "tools[0]"),
    ({"messages": MESSAGES, "continue_final_message": True}, "continue_final_message"),
    ({"prompt": "a", "continue_final_message": True}, "continue_final_message"),
    ({"prompt": "a", "return_token_strs": "yes"}, "return_token_strs"),
    ({"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
    ({"prompt": "a", "with_pieces": True}, None),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_62_what_cannot_be_tokenized_is_refused(server: LiveServer, fields: dict[str, Any], param: str | None) -> None:
    response = server.http.post(
        server.url + "/tokenize", content=json.dumps(fields), headers={"content-type": "application/json"}
    )
    assert_error(response.status_code, response.json(), param=param)


@pytest.mark.parametrize(
    ("tokens", "param"),
    [
        *((None, "tokens"), ("5", "tokens"), ([-1], "tokens[0]"), ([5, V], "tokens[1]"), ([2**70], "tokens[0]")),
        *(([True], "tokens[0]"), ([1.0], "tokens[0]"), ([[5]], "tokens[0]")),
    ],
)
def test_62_what_is_no_token_id_is_refused(server: LiveServer, tokens: Any, param: str) -> None:
    response = server.post("/detokenize", {"tokens": tokens})
    assert_error(response.status_code, response.json(), param=param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_61_only_the_served_model_tokenizes(server: LiveServer, path: str) -> None:
    body = {"prompt": "a", "model": "other"} if path == "/tokenize" else {"tokens": [1], "model": "other"}
    response = server.post(path, body)
    assert_error(response.status_code, response.json(), expected=404, param=None)


def test_no_tokens_are_no_text(server: LiveServer) -> None:
    assert detokenize(server, []) == ""
    assert tokenize(server, prompt="") == {"count": 0, "max_model_len": MAX_MODEL_LEN, "tokens": []}
