"""The bundled demo model: its folder is what it says it is, and a chat with it gives right answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from safetensors import safe_open

import cupyllm
from cupyllm import LLM, SamplingParams

DEMO = Path(cupyllm.__file__).parent / "demo"
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
GREEDY = SamplingParams(temperature=0, max_tokens=160)

# question -> words that a right answer holds
TRAINED_QUESTIONS = {
    "What is paged attention?": ["pages", "fixed size", "page table"],
    "What is the KV cache?": ["keys and values", "every layer"],
    "Explain continuous batching.": ["every step", "waiting"],
    "What is the difference between prefill and decode?": ["compute", "memory bandwidth"],
    "What does temperature 0 mean?": ["most likely token"],
    "What is RMSNorm?": ["mean", "squares"],
    "How does RoPE work?": ["rotated", "distance"],
    "What is GQA?": ["share", "key/value head"],
    "Why is decode memory bound?": ["weight", "bandwidth"],
    "What is speculative decoding?": ["draft", "one pass"],
    "What is a warp?": ["32 threads"],
    "What is TTFT?": ["first token"],
    "When is a sequence preempted?": ["youngest", "pages are freed"],
    "How do I start the server?": ["python server.py --config configs/default.json"],
    "How do I use a real Qwen model?": ['"model"', "Qwen/Qwen2.5-0.5B-Instruct"],
    "Who are you?": ["demo model", "4 million parameters"],
    "Hello": ["Hello", "cupyllm"],
    "Write a short poem.": ["page", "\n"],
    "What is the weather like?": ["cannot know the weather"],
}
UNSEEN_QUESTIONS = {
    "what is paged attention good for": ["pages", "page table"],
    "Please tell me what the KV cache is.": ["keys and values"],
    "which command starts the server please": ["python server.py"],
    "Can you tell me what top-p sampling does?": ["probabilities", "at least p"],
}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", device="reference", kv_cache_gib=0.1)


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def read_json(name: str) -> dict[str, Any]:
    return json.loads((DEMO / name).read_text(encoding="utf-8"))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def answers(llm: LLM) -> Callable[[str], Any]:
    """Greedy answers to all single questions, made in one batch."""
    questions = [*TRAINED_QUESTIONS, *UNSEEN_QUESTIONS]
    outputs = llm.chat([[user(question)] for question in questions], GREEDY, show_progress=False)
    return {question: output.outputs[0] for question, output in zip(questions, outputs, strict=True)}.__getitem__


def test_folder_holds_five_files_of_at_most_ten_megabytes() -> None:
    assert {path.name for path in DEMO.iterdir()} == FILES
    assert sum(path.stat().st_size for path in DEMO.iterdir()) <= 10_000_000


def test_config_is_a_qwen2_with_grouped_heads_of_size_64() -> None:
    config = read_json("config.json")
    assert (config["model_type"], config["architectures"]) == ("qwen2", ["Qwen2ForCausalLM"])
    assert config["hidden_size"] / config["num_attention_heads"] == 64
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert config["tie_word_embeddings"] is True


def test_weights_are_bf16_tensors_of_the_shapes_in_the_config() -> None:
    config = read_json("config.json")
    width, kv_width = config["hidden_size"], config["num_key_value_heads"] * 64
    with safe_open(DEMO / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        assert {piece.get_dtype() for piece in slices.values()} == {"BF16"}
        assert len(slices) == 12 * config["num_hidden_layers"] + 2  # no lm_head: the head is tied
        assert slices["model.embed_tokens.weight"].get_shape() == [config["vocab_size"], width]
        assert slices["model.layers.0.self_attn.k_proj.weight"].get_shape() == [kv_width, width]
        assert slices["model.layers.0.self_attn.k_proj.bias"].get_shape() == [kv_width]


def test_vocabulary_fits_the_config_and_ends_with_the_special_tokens(tokenizer: tokenizers.Tokenizer) -> None:
    size = tokenizer.get_vocab_size()
    assert 1000 <= size == read_json("config.json")["vocab_size"]
    ends = [tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")]
    assert read_json("generation_config.json")["eos_token_id"] == ends
    assert sorted([*ends, tokenizer.token_to_id("<|im_start|>")]) == list(range(size - 3, size))


@pytest.mark.parametrize(
    "text",
    ["".join(map(chr, range(256))), "Déjà vu, 你好 🙂\u200d x\t=\r\n  123;", "\U0010ffff\u0800\u00e9"],
    ids=["first 256 code points", "mixed text", "long code points"],
)
def test_any_text_encodes_and_decodes_back(tokenizer: tokenizers.Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_every_byte_is_a_token(tokenizer: tokenizers.Tokenizer) -> None:
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    assert len(alphabet) == 256
    assert all(tokenizer.token_to_id(letter) is not None for letter in alphabet)


@pytest.mark.parametrize("question", [*TRAINED_QUESTIONS, *UNSEEN_QUESTIONS])
def test_greedy_answer_holds_the_key_words_and_ends_by_itself(answers: Callable[[str], Any], question: str) -> None:
    answer = answers(question)
    missing = [word for word in {**TRAINED_QUESTIONS, **UNSEEN_QUESTIONS}[question] if word not in answer.text]
    assert not missing, answer.text
    assert answer.finish_reason == "stop"


def test_answers_stay_right_in_a_longer_conversation_with_a_system_prompt(llm: LLM) -> None:
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    for question, word in [
        ("What is a page?", "fixed number"),
        ("Thanks!", "welcome"),
        ("And what is a slot?", "page_size"),
    ]:
        messages.append(user(question))
        text = llm.chat(messages, GREEDY, show_progress=False)[0].outputs[0].text
        assert word in text
        messages.append({"role": "assistant", "content": text})


def test_without_sampling_parameters_the_answer_is_the_greedy_one(llm: LLM, answers: Callable[[str], Any]) -> None:
    question = "What is the KV cache?"
    params = [SamplingParams(seed=seed, max_tokens=160) for seed in range(3)]
    outputs = llm.chat([[user(question)]] * 3, params, show_progress=False)
    assert {output.outputs[0].text for output in outputs} == {answers(question).text}


def test_plain_text_is_continued_and_ends_by_itself(llm: LLM) -> None:
    output = llm.generate("The KV cache stores", GREEDY, show_progress=False)[0].outputs[0]
    assert "keys and values of all earlier tokens" in output.text
    assert output.finish_reason == "stop"
