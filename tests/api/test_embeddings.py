"""/v1/embeddings. Numbers in names are those of the HTTP contract's statements."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import tokenizers
from tokenizers import processors

from cupyllm import LLM
from tests.api.faults import FaultyOps, Turnstile
from tests.api.live_server import MAX_MODEL_LEN, MODEL_NAME, LiveServer, run_server, wait_until, write_model_folder
from tests.api.test_bad_bodies import V, assert_error
from tests.test_embedding import INPUTS, mode, write_recipe

PATH = "/v1/embeddings"
C = 64


def ask(server: LiveServer, given: Any, **fields: Any) -> dict[str, Any]:
    response = server.post(PATH, {"input": given} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def vectors(answer: dict[str, Any]) -> np.ndarray:
    return np.array([entry["embedding"] for entry in answer["data"]], np.float32)


@pytest.fixture(scope="module")
def expected(model_folder: Path) -> np.ndarray:
    return LLM(str(model_folder), max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.02).embed(INPUTS, show_progress=False)


def test_shape_of_an_answer(server: LiveServer, expected: np.ndarray) -> None:
    answer = ask(server, INPUTS)
    assert set(answer) == {"object", "data", "model", "usage"}
    assert (answer["object"], answer["model"]) == ("list", MODEL_NAME)
    assert [(entry["object"], entry["index"]) for entry in answer["data"]] == [("embedding", i) for i in range(4)]
    count = sum(len(server.loaded.tokenizer.encode(text)) for text in INPUTS)
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
    np.testing.assert_allclose(vectors(answer), expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors(answer), axis=1), 1, rtol=1e-5)


def test_all_forms_of_input_give_the_same(server: LiveServer, expected: np.ndarray) -> None:
    ids = [server.loaded.tokenizer.encode(text) for text in INPUTS]
    for given, rows in ((INPUTS[0], [0]), (INPUTS, [0, 1, 2, 3]), (ids[1], [1]), (ids, [0, 1, 2, 3])):
        np.testing.assert_allclose(vectors(ask(server, given)), expected[rows], atol=1e-6)


def test_69_base64_is_little_endian_float32(server: LiveServer, expected: np.ndarray) -> None:
    answer = ask(server, INPUTS, encoding_format="base64")
    found = [np.frombuffer(base64.b64decode(entry["embedding"]), "<f4") for entry in answer["data"]]
    np.testing.assert_array_equal(found, vectors(ask(server, INPUTS, encoding_format="float")))
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_69_the_official_client_reads_vectors(server: LiveServer, expected: np.ndarray, options: Any) -> None:
    """Without an encoding_format the client asks for base64 and decodes it."""
    answer = server.openai().embeddings.create(model=MODEL_NAME, input=INPUTS, **options)
    embeddings = [entry.embedding for entry in answer.data]
    if options.get("encoding_format") == "base64":
        embeddings = [np.frombuffer(base64.b64decode(one), "<f4") for one in embeddings]
    np.testing.assert_allclose(embeddings, expected, atol=1e-6)


@pytest.mark.parametrize("dimensions", [1, 8, C])
def test_dimensions_cut_and_normalise(server: LiveServer, dimensions: int) -> None:
    (whole,), (cut,) = vectors(ask(server, "a")), vectors(ask(server, "a", dimensions=dimensions))
    np.testing.assert_allclose(cut, whole[:dimensions] / np.linalg.norm(whole[:dimensions]), rtol=1e-5)


def test_a_list_may_be_longer_than_the_queue(model_folder: Path, expected: np.ndarray) -> None:
    with run_server(model_folder, max_waiting=3, max_prefill_batch_size=2) as live:
        found = vectors(ask(live, INPUTS * 5))
        np.testing.assert_allclose(found, np.tile(expected, (5, 1)), atol=1e-6)
        assert live.worker.num_live == live.worker.stats.num_live_pages == 0


def test_embeddings_and_answers_share_a_batch(server: LiveServer, expected: np.ndarray) -> None:
    body = {"prompt": INPUTS[0], "temperature": 0, "max_tokens": 30, "ignore_eos": True}
    alone = server.post("/v1/completions", body).json()["choices"][0]["text"]
    with ThreadPoolExecutor(8) as pool:
        texts = [pool.submit(server.post, "/v1/completions", body) for _ in range(4)]
        found = [pool.submit(ask, server, INPUTS) for _ in range(4)]
        assert {text.result().json()["choices"][0]["text"] for text in texts} == {alone}
        for answer in found:
            np.testing.assert_allclose(vectors(answer.result()), expected, atol=1e-6)


@pytest.fixture(scope="module")
def recipe_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like Qwen3-Embedding's, but with another recipe: mean pooling, not normalised."""
    folder = write_model_folder(tmp_path_factory.mktemp("recipe"))
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    end = ("<|endoftext|>", library.token_to_id("<|endoftext|>"))
    library.post_processor = processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[end])
    library.save(str(folder / "tokenizer.json"))
    modules = [{"path": "", "type": "x.Transformer"}, {"path": "1_Pooling", "type": "x.Pooling"}]
    return write_recipe(folder, modules, **mode("mean_tokens"))


@pytest.fixture(scope="module")
def recipe_server(recipe_folder: Path) -> Iterator[LiveServer]:
    with run_server(recipe_folder) as live:
        yield live


def test_the_checkpoints_recipe_is_followed(recipe_server: LiveServer) -> None:
    tokenizer = recipe_server.loaded.tokenizer
    ids = [*tokenizer.encode("a b"), tokenizer.added_tokens["<|endoftext|>"]]
    (text,), (as_ids,) = vectors(ask(recipe_server, "a b")), vectors(ask(recipe_server, ids))
    np.testing.assert_array_equal(text, as_ids)
    assert abs(np.linalg.norm(text) - 1) > 0.01
    (bare,) = vectors(ask(recipe_server, "a b", add_special_tokens=False))
    np.testing.assert_array_equal(bare, vectors(ask(recipe_server, ids[:-1]))[0])
    assert np.abs(bare - text).max() > 0.01
    assert ask(recipe_server, "")["usage"]["prompt_tokens"] == 1, "an empty text has its end token"
    assert ask(recipe_server, "a b")["usage"]["prompt_tokens"] == len(ids)


def test_a_recipe_that_is_not_supported_is_refused_and_all_else_works(tmp_path: Path) -> None:
    folder = write_recipe(write_model_folder(tmp_path), **mode("cls_token"))
    with run_server(folder) as live:
        response = live.post(PATH, {"input": "a"})
        assert "the pooling 'cls'" in assert_error(response.status_code, response.json(), param="model")
        assert live.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200


BAD: list[tuple[dict[str, Any], str | None]] = [
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": 5}, "input"),
    ({"input": ""}, "input"),
    ({"input": ["a", ""]}, "input[1]"),
    ({"input": ["a", 5]}, "input"),
    ({"input": [[5], "a"]}, "input"),
    ({"input": [[5], []]}, "input[1]"),
    ({"input": [V + 100000]}, "input"),
    ({"input": [-1]}, "input"),
    ({"input": "\ud800"}, "input"),
    ({"input": ["a", "1 " * 600]}, "input[1]"),
    ({"input": ["a"] * 2049}, "input"),
    ({"encoding_format": "int8"}, "encoding_format"),
    ({"dimensions": 0}, "dimensions"),
    ({"dimensions": C + 1}, "dimensions"),
    ({"dimensions": "8"}, "dimensions"),
    ({"add_special_tokens": 1}, "add_special_tokens"),
    ({"priority": 2**31}, "priority"),
    ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
    ({"stream": True}, None),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_62_what_cannot_be_embedded_is_refused(server: LiveServer, fields: dict[str, Any], param: str | None) -> None:
    body = json.dumps({"input": "a"} | fields)
    response = server.http.post(server.url + PATH, content=body, headers={"content-type": "application/json"})
    assert_error(response.status_code, response.json(), param=param)


def test_28_a_text_that_is_too_long_is_refused_with_the_code(server: LiveServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        server.openai().embeddings.create(model=MODEL_NAME, input="1 " * 600)
    assert caught.value.code == "context_length_exceeded"


def test_61_only_the_served_model_embeds(server: LiveServer) -> None:
    assert server.post(PATH, {"input": "a", "model": "other"}).status_code == 404


def test_a_failed_step_and_a_client_that_leaves_leave_nothing(model_folder: Path) -> None:
    ops: list[FaultyOps] = []
    with run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded)), max_step_tokens=32) as live:

        def fail(number: int) -> None:
            raise RuntimeError("boom")

        ops[0].before_step = fail
        assert live.post(PATH, {"input": INPUTS}).status_code == 500
        with Turnstile(ops[0]) as turnstile, ThreadPoolExecutor(1) as pool:
            future = pool.submit(live.post, PATH, {"input": INPUTS}, timeout=0.5)
            wait_until(lambda: turnstile.num_arrived > 0, "the engine has begun")
            assert future.exception() is not None
        wait_until(lambda: live.worker.num_live == live.worker.stats.num_live_pages == 0, "the request is gone")
        assert vectors(ask(live, INPUTS)).shape == (4, C)
