"""Beam search over HTTP: the answers of LLM.beam_search, whatever runs beside it, and nothing that is not honoured."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from cupyllm import LLM, BeamParams, CompletionOutput
from cupyllm.startup import LoadedModel
from tests.api.faults import FaultyOps, Turnstile, pass_until, start_stream
from tests.api.live_server import (
    MAX_MODEL_LEN,
    MESSAGES,
    MODEL_NAME,
    LiveServer,
    raw_connection,
    run_server,
    wait_until,
)

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPTS = ["the weather in", "system user"]
BEAMS = {"use_beam_search": True, "max_tokens": 12}
LONG = {"prompt": "the", "temperature": 0, "max_tokens": 400, "ignore_eos": True}
Faulty = tuple[LiveServer, FaultyOps]


@pytest.fixture(scope="module")
def llm(model_folder: Path) -> LLM:
    return LLM(str(model_folder), max_model_len=MAX_MODEL_LEN, kv_cache_gib=0.02)


@pytest.fixture(scope="module")
def faulty(model_folder: Path) -> Iterator[Faulty]:
    """A server of two rows, where three may wait."""
    ops: list[FaultyOps] = []
    settings: dict[str, Any] = {"max_waiting": 3, "max_decode_batch_size": 2}
    with run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded)), **settings) as live:
        yield live, ops[0]


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    return BEAMS | ({"messages": MESSAGES} if path == CHAT else {"prompt": PROMPTS[0]}) | fields


def ask(server: LiveServer, path: str, **fields: Any) -> dict[str, Any]:
    response = server.post(path, body_for(path, **fields))
    assert response.status_code == 200, response.text
    return response.json()


def outputs(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Text and finish reason of each choice."""
    choices = answer["choices"]
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    assert all(choice["logprobs"] is None for choice in choices)
    return [(c["text"] if "text" in c else c["message"]["content"], c["finish_reason"]) for c in choices]


def search(llm: LLM, prompt: Any, n: int, **params: Any) -> list[CompletionOutput]:
    (output,) = llm.beam_search(prompt, BeamParams(**({"max_tokens": 12} | params)), n=n)
    return list(output.outputs)


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"beam_width": 1},
        {"beam_width": 6, "length_penalty": 2},
        {"beam_width": 3, "length_penalty": -1.5, "early_stopping": True},
        {"early_stopping": "never", "max_tokens": 30, "ignore_eos": True},
    ],
)
def test_the_answers_are_those_of_the_engine_best_first(
    server: LiveServer, llm: LLM, path: str, params: dict[str, Any]
) -> None:
    n = min(3, params.get("beam_width", 4))
    prompt = MESSAGES if path == CHAT else PROMPTS[0]
    expected = search(llm, prompt, n, **params)
    answer = ask(server, path, n=n, return_token_ids=True, **params)
    assert outputs(answer) == [(output.text, output.finish_reason) for output in expected]
    assert [tuple(choice["token_ids"]) for choice in answer["choices"]] == [output.token_ids for output in expected]
    prompt_ids = (answer if path == CHAT else answer["choices"][0])["prompt_token_ids"]
    found = llm.engine.add_beams(prompt_ids, BeamParams(**({"max_tokens": 12} | params)))
    while not found.done:
        llm.engine.step()
    assert [output.token_ids for output in expected] == [beam.token_ids for beam in found.finished[:n]]
    scores = [beam.score for beam in found.finished]
    assert scores == sorted(scores, reverse=True)
    assert answer["usage"]["completion_tokens"] == sum(len(output.token_ids) for output in expected)
    assert answer["usage"]["prompt_tokens"] == len(prompt_ids)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_an_end_token_ends_an_answer_and_is_not_part_of_its_text(server: LiveServer, llm: LLM, path: str) -> None:
    greedy = search(llm, MESSAGES if path == CHAT else PROMPTS[0], 1, beam_width=1)[0]
    stop = greedy.token_ids[1]
    assert stop != greedy.token_ids[0]
    fields: dict[str, Any] = {"stop_token_ids": [stop], "length_penalty": 0, "return_token_ids": True}
    answer = ask(server, path, n=2, **fields)
    ended = [choice for choice in answer["choices"] if choice["finish_reason"] == "stop"]
    assert ended
    for choice in ended:
        text = choice["text"] if path == TEXT else choice["message"]["content"]
        assert choice["token_ids"].index(stop) == len(choice["token_ids"]) - 1
        assert text == llm.tokenizer.decode(choice["token_ids"][:-1]) != llm.tokenizer.decode(choice["token_ids"])
    assert answer["usage"]["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer["choices"])


def test_ignore_eos_goes_on_after_the_models_end_token(model_folder: Path, llm: LLM) -> None:
    likely = search(llm, PROMPTS[0], 1, beam_width=1)[0].token_ids[0]

    def make_it_an_end_token(loaded: LoadedModel) -> None:
        admission = loaded.engine.admission
        admission.model_config = replace(admission.model_config, end_token_ids=(likely,))

    with run_server(model_folder, prepare=make_it_an_end_token) as server:
        fields: dict[str, Any] = {"n": 4, "length_penalty": 0}
        assert ("", "stop") in outputs(ask(server, TEXT, **fields))
        ignoring = ask(server, TEXT, **fields, ignore_eos=True)
    assert [reason for _, reason in outputs(ignoring)] == ["length"] * 4
    assert ignoring["usage"]["completion_tokens"] == 4 * 12


def test_max_tokens_has_the_defaults_of_its_route(server: LiveServer) -> None:
    prompt = [5] * (MAX_MODEL_LEN - 40)
    fields: dict[str, Any] = {"max_tokens": None, "ignore_eos": True}
    assert ask(server, TEXT, prompt=prompt, **fields)["usage"]["completion_tokens"] == 16
    assert ask(server, TEXT, prompt=[5] * (MAX_MODEL_LEN - 4), **fields)["usage"]["completion_tokens"] == 4
    content = "the weather " * 100
    usage = ask(server, CHAT, messages=[{"role": "user", "content": content}], beam_width=2, **fields)["usage"]
    assert usage["total_tokens"] == MAX_MODEL_LEN


def test_choice_p_times_n_plus_k_is_answer_k_to_prompt_p(server: LiveServer, llm: LLM) -> None:
    expected = [(o.text, o.finish_reason) for prompt in PROMPTS for o in search(llm, prompt, 3)]
    assert outputs(ask(server, TEXT, prompt=PROMPTS, n=3)) == expected


def test_searches_and_other_requests_side_by_side_get_what_they_get_alone(server: LiveServer) -> None:
    bodies = [body_for(TEXT, prompt=f"{word} {PROMPTS[0]}", n=2) for word in ("a", "the", "user")]
    bodies += [{"prompt": f"{word} the", "max_tokens": 30, "temperature": 1.2, "seed": 3} for word in ("a", "b", "c")]
    bodies += [bodies[0] | {"beam_width": 6, "length_penalty": 0}, bodies[3] | {"n": 3}]

    def answer(body: dict[str, Any]) -> list[tuple[str, str]]:
        return outputs(server.post(TEXT, body).json())

    alone = [answer(body) for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(answer, bodies * 2)) == alone * 2
    wait_until(lambda: server.worker.stats.num_live_pages == 0, "the pages are free")


def test_the_official_client_gets_the_best_beams(server: LiveServer, llm: LLM) -> None:
    create = server.openai().chat.completions.create
    extra = {"use_beam_search": True, "beam_width": 3}
    answer = create(model=MODEL_NAME, messages=MESSAGES, n=2, max_tokens=12, temperature=0, extra_body=extra)
    expected = [output.text for output in search(llm, MESSAGES, 2, beam_width=3)]
    assert [choice.message.content for choice in answer.choices] == expected


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_cached_tokens_are_counted_once_for_a_prompt(server: LiveServer, path: str) -> None:
    fields: dict[str, Any] = {"cache_salt": uuid.uuid4().hex, "n": 3}
    if path == TEXT:
        fields["prompt"] = [[5] * 40, [6] * 20]
    first, second = (ask(server, path, **fields)["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    expected = 32 + 16 if path == TEXT else (first["prompt_tokens"] - 1) // 16 * 16
    assert second["prompt_tokens_details"] == {"cached_tokens": expected}
    assert expected > 0


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_values_that_ask_for_nothing_are_accepted(server: LiveServer, path: str) -> None:
    neutral = {"stream": False, "stop": [], "temperature": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1.0}
    expected = outputs(ask(server, path))
    for top_k in (0, -1):
        assert outputs(ask(server, path, **neutral, top_k=top_k, beam_width=4, early_stopping=False)) == expected
    off = {"use_beam_search": False, "beam_width": 1, "length_penalty": 1, "early_stopping": False, "seed": 5}
    assert outputs(ask(server, path, **off)) == outputs(ask(server, path, use_beam_search=None, seed=5))


BAD_FIELDS: dict[str, list[Any]] = {
    "beam_width": [0, -1, 7, 10**30, "4", True, 1.5],
    "length_penalty": [10.5, -11, 10**400, "1", True, [1]],
    "early_stopping": ["maybe", 0, 1, 0.5, [], {}, ["never"]],
    "n": [5, 0, 17],
    "stream": [True],
    "stop": ["x", ["x"]],
    "temperature": [0.1, 1],
    "top_k": [1, 50],
    "top_p": [0.9],
    "min_p": [0.1],
    "repetition_penalty": [1.1, 0.9],
    "seed": [0, 1],
    "best_of": [1, 4],
    "max_tokens": [0, MAX_MODEL_LEN],
    "stop_token_ids": [[-1], [350]],
}


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("name", BAD_FIELDS)
def test_what_a_search_cannot_honour_is_refused_with_the_fields_name(server: LiveServer, path: str, name: str) -> None:
    for value in BAD_FIELDS[name]:
        response = server.post(path, body_for(path, **{name: value}))
        assert response.status_code == 400, (value, response.text)
        prompt = "messages" if path == CHAT else "prompt"
        assert response.json()["error"]["param"] == (prompt if value == MAX_MODEL_LEN else name)
        assert name in response.json()["error"]["message"]


@pytest.mark.parametrize("path", [CHAT, TEXT])
@pytest.mark.parametrize("field", [{"beam_width": 4}, {"length_penalty": 0}, {"early_stopping": True}])
def test_fields_of_a_search_need_one(server: LiveServer, path: str, field: dict[str, Any]) -> None:
    for fields in (field, {"use_beam_search": False} | field):
        error = server.post(path, body_for(path, **({"use_beam_search": None} | fields))).json()["error"]
        (name,) = field
        assert (error["param"], error["message"]) == (name, f"{name} needs use_beam_search to be true")


def test_the_limits_of_beams(server: LiveServer, faulty: Faulty) -> None:
    for num_prompts, width, fits in ((16, 4, True), (17, 4, False), (65, 1, True)):
        body = body_for(TEXT, prompt=["a"] * num_prompts, beam_width=width, max_tokens=1)
        response = server.post(TEXT, body)
        assert response.status_code == (200 if fits else 400), response.text
        if not fits:
            assert "17 prompts with 4 beams each are 68 sequences" in response.json()["error"]["message"]
            assert response.json()["error"]["param"] == "beam_width"
    for body, words in (
        (body_for(TEXT, stop_token_ids=[1, 2, 3]), "at most 20 are supported"),
        (body_for(TEXT, beam_width=3), "needs as many rows"),
    ):
        error = (server if "stop_token_ids" in body else faulty[0]).post(TEXT, body).json()["error"]
        assert error["param"] == "beam_width"
        assert words in error["message"]


def is_idle(server: LiveServer) -> bool:
    stats = server.worker.stats
    return (stats.num_running, stats.num_waiting, stats.num_live_pages, server.worker.num_live) == (0, 0, 0, 0)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_when_the_client_leaves_its_pages_are_free_within_two_steps(faulty: Faulty, path: str) -> None:
    server, ops = faulty
    body = body_for(path, beam_width=2, max_tokens=400, ignore_eos=True)
    with Turnstile(ops) as turnstile:
        request = httpx.Request("POST", server.url + path, json=body, headers={"host": "localhost"})
        with raw_connection(server) as connection:
            head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
            pass_until(turnstile, lambda: server.worker.stats.num_running == 2)
        wait_until(lambda: server.worker.num_live == 0, "the server has seen the client leave")
        steps = ops.num_steps
    wait_until(lambda: is_idle(server), "the pages are free")
    assert ops.num_steps - steps <= 2, "it would run 400 steps if nobody told the engine"


def test_a_failed_step_is_500_and_the_next_search_succeeds(faulty: Faulty, caplog: pytest.LogCaptureFixture) -> None:
    server, ops = faulty
    expected = outputs(ask(server, TEXT, beam_width=2))
    failing = ops.num_steps + 5

    def fail(number: int) -> None:
        if number == failing:
            raise RuntimeError("secret detail of step")

    ops.before_step = fail
    response = server.post(TEXT, body_for(TEXT, beam_width=2))
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert "secret detail of step" in caplog.text
    wait_until(lambda: is_idle(server), "the failed search has left the engine")
    assert outputs(ask(server, TEXT, beam_width=2)) == expected


@pytest.mark.parametrize("num_prompts", [1, 2])
def test_a_beam_without_finite_logits_fails_its_request_only(
    model_folder: Path, num_prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ops: list[FaultyOps] = []
    with (
        run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded))) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        neighbour = LONG | {"max_tokens": 20}
        expected = outputs(server.post(TEXT, neighbour).json())
        real = ops[0]._ops.logits

        def nan_in_the_last_row(*arguments: Any, **options: Any) -> Any:
            logits = real(*arguments, **options)
            if logits.shape[0] > 2:
                logits[-1] = float("nan")
            return logits

        with Turnstile(ops[0]) as turnstile, monkeypatch.context() as patch:
            running = pool.submit(server.post, TEXT, neighbour)
            pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
            patch.setattr(ops[0]._ops, "logits", nan_in_the_last_row)
            failed = pool.submit(server.post, TEXT, body_for(TEXT, prompt=PROMPTS[:num_prompts]))
            pass_until(turnstile, lambda: running.done() and failed.done())
        assert failed.result().status_code == 500
        assert outputs(running.result().json()) == expected
        wait_until(lambda: is_idle(server), "everything has left the engine")


def test_a_full_queue_is_429_and_searches_are_taken_all_or_none(faulty: Faulty) -> None:
    server, ops = faulty
    with ThreadPoolExecutor(8) as pool, Turnstile(ops) as turnstile:
        opened = []
        for _ in range(2):
            opened.append(start_stream(server, turnstile, pool, LONG))
            pass_until(turnstile, lambda: server.worker.stats.num_waiting == 0)
        opened += [start_stream(server, turnstile, pool, LONG) for _ in range(2)]
        two = pool.submit(server.post, TEXT, body_for(TEXT, prompt=PROMPTS, beam_width=1))
        pass_until(turnstile, two.done)
        assert two.result().status_code == 429
        assert server.worker.stats.num_waiting == 2
        opened.append(start_stream(server, turnstile, pool, LONG))
        one = pool.submit(server.post, TEXT, body_for(TEXT, beam_width=2))
        pass_until(turnstile, one.done)
        assert one.result().status_code == 429
        assert int(one.result().headers["retry-after"]) >= 1
        for response in opened:
            response.close()
    wait_until(lambda: is_idle(server), "every closed request has left the engine")


def test_a_search_of_lower_priority_runs_first(model_folder: Path) -> None:
    ops: list[FaultyOps] = []
    settings: dict[str, Any] = {"max_decode_batch_size": 1}
    with (
        run_server(model_folder, prepare=lambda loaded: ops.append(FaultyOps(loaded)), **settings) as server,
        ThreadPoolExecutor(4) as pool,
        Turnstile(ops[0]) as turnstile,
    ):
        running = start_stream(server, turnstile, pool, LONG)
        pass_until(turnstile, lambda: server.worker.stats.num_running == 1)
        usual = pool.submit(server.post, TEXT, LONG)
        pass_until(turnstile, lambda: server.worker.stats.num_waiting == 1)
        urgent = pool.submit(ask, server, TEXT, beam_width=1, priority=-1)
        pass_until(turnstile, lambda: server.worker.stats.num_waiting == 2)
        running.close()
        pass_until(turnstile, lambda: usual.done() or urgent.done())
        assert urgent.done()
        assert not usual.done()
