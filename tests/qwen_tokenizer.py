"""A small tokenizer folder of Qwen's kind, made for tests: the same parts as the real one, a few hundred merges.

It has Qwen's splitting regex, NFC, byte-level BPE and the added tokens of Qwen2.5 (or of Qwen3, which has four more),
in the file layout of transformers 4 or 5. The chat templates are written for these tests; they keep the control flow of
Qwen's own where a test depends on it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

SPLIT_REGEX = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL_TOKENS = [
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>"),
    *("<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>"),
    *("<|image_pad|>", "<|video_pad|>"),
]
MARK_TOKENS = [
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>"),
]
QWEN2_TOKENS = SPECIAL_TOKENS + MARK_TOKENS
QWEN3_TOKENS = [*QWEN2_TOKENS, "<tool_response>", "</tool_response>", "<think>", "</think>"]

TRAINING_TEXT = [
    "system user assistant You are a helpful assistant. What is the weather in Paris today?",
    "def function(name, arguments): return {'name': name, 'arguments': arguments}",
    "La réponse est déjà là; 你好，世界。こんにちは 1 2 3 the the there other of and in to is",
]

QWEN2_TEMPLATE = r"""
{%- set has_system = messages[0].role == 'system' %}
{{- '<|im_start|>system\n' }}{{ messages[0].content if has_system else 'Be helpful.' }}
{%- if tools %}
    {{- '\n\nTools between <tools></tools>:' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '\nCall them inside <tool_call></tool_call>.' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- for message in messages %}
    {%- if loop.first and has_system %}{% continue %}{% endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
    {%- elif message.tool_calls %}
        {{- '<|im_start|>assistant' }}{{ '\n' + message.content if message.content }}
        {%- for call in message.tool_calls %}
            {{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + (' ' + message.name if message.name else '') + '\n' }}
        {{- message.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
"""

# Reasoning is shown from the last question on only, and can be switched off.
QWEN3_TEMPLATE = r"""
{%- set ns = namespace(last_question=-1) %}
{%- for message in messages %}
    {%- if message.role == 'user' and not message.content.startswith('<tool_response>') %}
        {%- set ns.last_question = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- if tools %}
    {{- '<|im_start|>system\nTools:' }}
    {%- for tool in tools %}{{ '\n' }}{{ tool | tojson }}{% endfor %}
    {{- '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content %}
    {%- set reasoning = '' %}
    {%- if message.role == 'assistant' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
    {%- endif %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
        {%- continue %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\n' }}
    {%- if reasoning and loop.index0 > ns.last_question %}
        {{- '<think>\n' + reasoning.strip('\n') + '\n</think>\n\n' }}
    {%- endif %}
    {{- content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\n' if content or not loop.first }}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{ '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""


def tokenizer_json(added: list[str] = QWEN2_TOKENS) -> dict[str, Any]:
    """The content of tokenizer.json, merges as transformers 5 writes them."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(tokenizers.Regex(SPLIT_REGEX), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trained.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(TRAINING_TEXT, trainer)
    content: dict[str, Any] = json.loads(trained.to_str())
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    first = len(content["model"]["vocab"])
    content["added_tokens"] = [
        {"id": first + i, "content": text, **flags, "special": text in SPECIAL_TOKENS} for i, text in enumerate(added)
    ]
    return content


def write_tokenizer_folder(
    folder: Path, *, layout: str = "v4", added: list[str] = QWEN2_TOKENS, template: str | None = QWEN2_TEMPLATE
) -> Path:
    """Write tokenizer.json, tokenizer_config.json and the template, where this layout ("v4", "v5") puts them."""
    folder.mkdir(parents=True, exist_ok=True)
    content = tokenizer_json(added)
    config: dict[str, Any] = {
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "Qwen2Tokenizer",
    }
    if "<|im_end|>" in added:
        eos: dict[str, Any] = {"__type": "AddedToken", "content": "<|im_end|>", "special": True}
        config["eos_token"] = eos if layout == "v4" else eos["content"]
        config["pad_token"] = "<|endoftext|>"
    if layout == "v4":
        content["model"]["merges"] = [" ".join(pair) for pair in content["model"]["merges"]]
        config["added_tokens_decoder"] = {
            str(token["id"]): {key: value for key, value in token.items() if key != "id"}
            for token in content["added_tokens"]
        }
        if template is not None:
            config["chat_template"] = template
    elif template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    write_json(folder / "tokenizer.json", content)
    write_json(folder / "tokenizer_config.json", config)
    return folder


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
