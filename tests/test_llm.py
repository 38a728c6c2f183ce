"""cupyllm without a server: prompts in every form, stop strings, defaults of the checkpoint, and refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cupyllm import LLM, BeamParams, SamplingParams
from cupyllm.errors import ConfigError, DeviceError, EngineError, RequestError
from tests.qwen_tokenizer import QWEN2_TOKENS, tokenizer_json, write_tokenizer_folder
from tests.tiny_checkpoint import write_json, write_tiny_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llm") / "model"
    vocab_size = max(token["id"] for token in tokenizer_json(QWEN2_TOKENS)["added_tokens"]) + 1
    write_tiny_checkpoint(folder, vocab_size=vocab_size + 20)
    return write_tokenizer_folder(folder)


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), kv_cache_gib=0.01)


def text_of(llm: LLM, prompt: Any, params: SamplingParams = GREEDY) -> str:
    return llm.generate(prompt, params)[0].outputs[0].text


def test_one_prompt_or_many_as_text_or_ids_are_the_same_prompts(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the weather")
    expected = llm.generate("the weather", GREEDY)
    assert expected[0].prompt_token_ids == tuple(ids)
    assert len(expected[0].outputs[0].token_ids) == 16
    assert llm.generate(ids, GREEDY) == expected
    assert llm.generate(["the weather"], GREEDY) == llm.generate([ids], GREEDY) == expected


def test_answers_come_in_the_order_of_the_prompts_also_beyond_the_waiting_limit(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_gib=0.01, max_waiting=2, max_decode_batch_size=3)
    prompts = [f"number {n} " * (1 + n % 4) for n in range(12)]
    together = llm.generate(prompts, GREEDY, show_progress=False)
    assert together == [llm.generate(prompt, GREEDY)[0] for prompt in prompts]


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    short, long = llm.generate(["a", "a"], [SamplingParams(max_tokens=1, temperature=0.0), GREEDY], show_progress=False)
    assert (len(short.outputs[0].token_ids), len(long.outputs[0].token_ids)) == (1, 16)
    with pytest.raises(RequestError, match="1 sampling params were given for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_a_stop_string_ends_an_answer_that_got_two_tokens_in_one_step(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_gib=0.01, overlap=True, max_waiting=1)
    first = text_of(llm, "the weather", replace(GREEDY, max_tokens=1))
    params = [replace(GREEDY, stop=(first,)), replace(GREEDY, presence_penalty=1.0)]
    stopped, penalised = llm.generate(["the weather", "a"], params, show_progress=False)
    assert (stopped.outputs[0].text, stopped.outputs[0].finish_reason) == ("", "stop")
    assert len(penalised.outputs[0].token_ids) == 16


def test_a_stop_string_in_the_last_token_does_not_count_before_min_tokens(llm: LLM) -> None:
    (a,) = llm.tokenizer.encode("a")
    params = replace(GREEDY, logit_bias={a: 100}, stop=("a",), max_tokens=3, min_tokens=3)
    (output,) = llm.generate("the weather", params)[0].outputs
    assert (output.text, output.finish_reason) == ("aaa", "length")


def test_a_stop_string_cuts_the_text_and_frees_the_pages(llm: LLM) -> None:
    whole = text_of(llm, "the weather")
    stop = whole[5:8]
    output = llm.generate("the weather", SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, stop=(stop,)))
    assert output[0].outputs[0].text == whole[: whole.index(stop)]
    assert output[0].outputs[0].finish_reason == "stop"
    assert llm.engine.stats.num_live_pages == 0


def test_chat_renders_the_template_for_one_conversation_or_many(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hello"}]
    assert llm.chat_template is not None
    (output,) = llm.chat(conversation, GREEDY)
    assert output.prompt_token_ids == tuple(llm.chat_template.encode(conversation))
    other = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    assert llm.chat([conversation, other], GREEDY, show_progress=False) == [output, output]


def test_logprobs_are_given_for_every_token_when_asked(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
    answer = llm.generate("the", params)[0].outputs[0]
    assert answer.logprobs is not None
    assert [len(entry.top) for entry in answer.logprobs] == [2] * 4
    assert [entry.top[0] for entry in answer.logprobs] == [
        (token, pytest.approx(entry.logprob)) for token, entry in zip(answer.token_ids, answer.logprobs, strict=True)
    ]
    assert llm.generate("the", GREEDY)[0].outputs[0].logprobs is None


def test_n_answers_to_a_prompt_are_those_of_n_seeds(llm: LLM) -> None:
    params = SamplingParams(temperature=1.2, max_tokens=12, ignore_eos=True, seed=2**64 - 2, n=4)
    many = llm.generate(["the weather", "a"], params, show_progress=False)
    seeds = [2**64 - 2, 2**64 - 1, 0, 1]
    for prompt, output in zip(["the weather", "a"], many, strict=True):
        alone = [llm.generate(prompt, replace(params, n=1, seed=seed))[0].outputs[0] for seed in seeds]
        assert list(output.outputs) == alone
        assert len({answer.text for answer in alone}) == 4
    assert llm.engine.stats.num_live_pages == 0


def test_n_answers_without_a_seed_differ_and_greedy_ones_do_not(llm: LLM) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    assert len(set(llm.chat(chat, SamplingParams(temperature=1.5, max_tokens=20, n=3))[0].outputs)) == 3
    assert len(set(llm.chat(chat, replace(GREEDY, n=3))[0].outputs)) == 1


def test_answers_queue_beyond_the_waiting_limit_and_stop_one_by_one(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_gib=0.01, max_waiting=4, max_decode_batch_size=3)
    hot = SamplingParams(temperature=1.2, max_tokens=12, ignore_eos=True, seed=1, n=3)
    whole = llm.generate(["a", "b", "c"], hot, show_progress=False)
    stop = whole[1].outputs[2].text[2:5]
    cut = llm.generate(["a", "b", "c"], replace(hot, stop=(stop,)), show_progress=False)
    for before, after in zip(whole, cut, strict=True):
        assert [answer.text for answer in after.outputs] == [a.text.partition(stop)[0] for a in before.outputs]
    with pytest.raises(RequestError, match="n is 5, but at most 4"):
        llm.generate("a", replace(hot, n=5))


@pytest.mark.parametrize("n", [0, -1, 17, 1.0, True, "2"])
def test_n_is_a_whole_number_from_1_to_16(n: Any) -> None:
    with pytest.raises(RequestError, match="n must be a whole number from 1 to 16") as caught:
        SamplingParams(n=n)
    assert caught.value.param == "n"


def test_generation_config_gives_the_defaults_unless_told_not_to(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    advice = {"eos_token_id": [1], "do_sample": False, "repetition_penalty": 1.3}
    write_json(copy / "generation_config.json", advice)
    with_advice, without = (
        LLM(str(copy), kv_cache_gib=0.01),
        LLM(str(copy), kv_cache_gib=0.01, generation_config="none"),
    )
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=16, ignore_eos=True)
    unnamed = SamplingParams(max_tokens=16, ignore_eos=True)
    assert text_of(with_advice, "the weather", unnamed) == text_of(without, "the weather", penalised)
    assert without.engine.admission.defaults.temperature == 1.0


def test_ids_without_a_token_are_never_generated(llm: LLM) -> None:
    hot = SamplingParams(temperature=2.0, max_tokens=60, ignore_eos=True, seed=3)
    outputs = llm.generate(["a"] * 8, hot, show_progress=False)
    assert max(max(output.outputs[0].token_ids) for output in outputs) < llm.tokenizer.num_tokens
    assert llm.engine.runner.model.config.vocab_size == llm.tokenizer.num_tokens + 20


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(["fine", ""], GREEDY)
    assert not llm.engine.has_work
    assert text_of(llm, "fine")


@pytest.mark.parametrize(
    ("config", "error", "message"),
    [
        ({"kv_cache_gib": 1e-9}, ConfigError, "holds no page"),
        ({"kv_cache_gib": 1e6}, ConfigError, "no room for a cache of 1000000 GiB; lower kv_cache_gib"),
        ({"max_model_len": 2048}, ConfigError, "above the model's own limit of 1024"),
        ({"kv_cache_gib": 0.0001, "max_model_len": 1000}, ConfigError, "set kv_cache_gib to .* or lower max_model_len"),
        ({"dtype": "float16", "device": "reference"}, ConfigError, "dtype"),
        ({"pagesize": 4}, ConfigError, "did you mean 'page_size'"),
    ],
)
def test_what_cannot_start_says_why(folder: Path, config: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises((error, DeviceError), match=message):
        LLM(str(folder), **config)


def test_a_context_that_the_cache_cannot_hold_is_lowered_when_auto(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_gib=0.0001)
    page_bytes = 16 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, head size, float32
    assert llm.engine.max_model_len == int(0.0001 * 2**30) // page_bytes * 16 == 208


def test_an_auto_cache_is_what_the_weights_leave_of_the_free_memory(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr("cupyllm.device.HostDevice.free_bytes", lambda self: 2 * 2**20)
    llm = LLM(str(folder), kv_cache_gib="auto")
    weights = sum(
        array.nbytes
        for array in (
            llm.engine.runner.model.weights.embedding,
            llm.engine.runner.model.weights.final_norm,
            *(a for layer in llm.engine.runner.model.weights.layers for a in vars(layer).values() if a is not None),
        )
    )
    assert llm.engine.runner.cache.num_pages == int(0.9 * 2 * 2**20 - weights) // 8192
    monkeypatch.setattr("cupyllm.device.HostDevice.free_bytes", lambda self: weights)
    with pytest.raises(ConfigError, match=r"no memory is left for the cache \(auto: 90% of"):
        LLM(str(folder), kv_cache_gib="auto")


BEAMS = BeamParams(beam_width=3, max_tokens=10, ignore_eos=True)


def test_beam_search_takes_text_ids_and_conversations_one_or_many(llm: LLM) -> None:
    ids = llm.tokenizer.encode("the weather")
    (expected,) = llm.beam_search("the weather", BEAMS, n=3)
    assert expected.prompt_token_ids == tuple(ids)
    assert [len(answer.token_ids) for answer in expected.outputs] == [10] * 3
    assert len(set(expected.outputs)) == 3
    assert llm.beam_search(ids, BEAMS, n=3) == llm.beam_search([ids], BEAMS, n=3) == [expected]
    conversation = [{"role": "user", "content": "Hello"}]
    (chat,) = llm.beam_search(conversation, BEAMS)
    assert llm.chat_template is not None
    assert chat.prompt_token_ids == tuple(llm.chat_template.encode(conversation))
    mixed = llm.beam_search(["the weather", conversation, ids], BEAMS, show_progress=False)
    assert mixed[1] == chat
    assert mixed[0] == mixed[2]
    assert mixed[0].outputs == expected.outputs[:1]


def test_a_single_beam_is_greedy(llm: LLM) -> None:
    (greedy,) = llm.generate("the weather", replace(GREEDY, max_tokens=10))
    (one,) = llm.beam_search("the weather", replace(BEAMS, beam_width=1))
    assert one.outputs[0].token_ids == greedy.outputs[0].token_ids
    assert (one.outputs[0].text, one.outputs[0].finish_reason) == (greedy.outputs[0].text, "length")


def test_an_end_token_ends_a_beam_and_adds_no_text(llm: LLM) -> None:
    first = llm.generate("the weather", GREEDY)[0].outputs[0].token_ids[0]
    ends = replace(BEAMS, stop_token_ids=(first,), length_penalty=0.0)
    answers = llm.beam_search("the weather", ends, n=3)[0].outputs
    assert ("", (first,), "stop") in [(answer.text, answer.token_ids, answer.finish_reason) for answer in answers]


def test_searches_queue_beyond_the_waiting_limit_and_give_answers_in_order(folder: Path) -> None:
    llm = LLM(str(folder), kv_cache_gib=0.01, max_waiting=1, max_decode_batch_size=3)
    prompts = [f"number {n} " * (1 + n % 3) for n in range(7)]
    together = llm.beam_search(prompts, BEAMS, n=2, show_progress=False)
    assert together == [llm.beam_search(prompt, BEAMS, n=2)[0] for prompt in prompts]
    assert llm.engine.stats.num_live_pages == 0


def test_generation_config_does_not_apply_to_beams(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    advice = {"eos_token_id": [1], "do_sample": True, "temperature": 0.5, "top_k": 2, "repetition_penalty": 1.9}
    write_json(copy / "generation_config.json", advice)
    with_advice = LLM(str(copy), kv_cache_gib=0.01)
    without = LLM(str(copy), kv_cache_gib=0.01, generation_config="none")
    assert with_advice.engine.admission.defaults.repetition_penalty == 1.9
    assert with_advice.beam_search("the the the", BEAMS, n=3) == without.beam_search("the the the", BEAMS, n=3)


@pytest.mark.parametrize(
    ("prompts", "params", "n", "param"),
    [
        ("a", BEAMS, 4, "n"),
        ("a", BEAMS, 0, "n"),
        ("a", BEAMS, True, "n"),
        (["fine", ""], BEAMS, 1, "prompt"),
        (["fine", [5] * 1020], BEAMS, 1, "prompt"),
        ("a", replace(BEAMS, stop_token_ids=(-1,)), 1, "stop_token_ids"),
        ("a", replace(BEAMS, max_tokens=-1), 1, "max_tokens"),
        ("a", replace(BEAMS, stop_token_ids=(1, 2, 3, 4, 5, 6)), 1, "beam_width"),
    ],
)
def test_a_refused_search_leaves_nothing_behind(llm: LLM, prompts: Any, params: Any, n: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.beam_search(prompts, params, n=n, show_progress=False)
    assert caught.value.param == param
    assert not llm.engine.has_work


def test_a_search_without_finite_logits_is_an_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llm.engine.ops.logits

    def nan(*arguments: Any, **options: Any) -> Any:
        return real(*arguments, **options) * float("nan")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.ops, "logits", nan)
        with pytest.raises(EngineError, match="no finite logits"):
            llm.beam_search("the weather", BEAMS)
    assert not llm.engine.has_work
    assert llm.beam_search("the weather", BEAMS)


def test_a_stream_is_the_same_answer_in_pieces(llm: LLM) -> None:
    pieces = list(llm.stream("the weather", GREEDY))
    assert "".join(piece.text for piece in pieces) == text_of(llm, "the weather")
    assert [piece.num_tokens for piece in pieces] == list(range(1, 17))
    assert [piece.finish_reason for piece in pieces] == [None] * 15 + ["length"]
    chat = [{"role": "user", "content": "the weather"}]
    assert "".join(piece.text for piece in llm.stream(chat, GREEDY)) == llm.chat(chat, GREEDY)[0].outputs[0].text


def test_a_stream_ends_at_a_stop_string_or_when_it_is_closed_and_leaves_nothing_behind(llm: LLM) -> None:
    whole = text_of(llm, "the weather")
    params = replace(GREEDY, stop=(whole[3:6],))
    pieces = list(llm.stream("the weather", params))
    assert "".join(piece.text for piece in pieces) == whole[: whole.index(whole[3:6])]
    assert pieces[-1].finish_reason == "stop"
    stream = llm.stream("the weather", GREEDY)
    next(stream)
    assert llm.engine.stats.num_live_pages > 0
    stream.close()
    assert llm.engine.stats.num_live_pages == 0
    assert not llm.engine.has_work


def test_a_stream_of_what_never_fits_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="tokens"):
        next(llm.stream(list(range(5)) * 10_000))
