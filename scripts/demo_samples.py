"""From conversations to token ids and targets: the tokenizer, the chat template, and the batches."""

from __future__ import annotations

import random
from collections.abc import Iterator

import torch
from demo_text import ENDINGS, OPENINGS, Topic, make_conversation
from jinja2 import Environment
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import Tensor

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# How Qwen cuts text before byte-pair merging; another pattern would give other token ids.
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEFAULT_SYSTEM = "You are the demo model of cupyllm."
CHAT_TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}"
    "{{ '<|im_start|>system\\n" + DEFAULT_SYSTEM + "<|im_end|>\\n' }}"
    "{%- endif -%}"
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)
IGNORED = -100  # target of a position that carries no loss
TOKENS_PER_BATCH = 4096
SAMPLES_PER_SORT = 2000
PLAIN_TEXT_SHARE = 0.04  # samples without the chat format, so that plain completions work as well


def train_tokenizer(topics: list[Topic], prompts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer of `vocab_size` ids, cut and normalised as Qwen's; special tokens come last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    split = pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),  # all 256 bytes: any text can be encoded
        show_progress=False,
    )
    tokenizer.train_from_iterator(all_texts(topics, prompts), trainer)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    return tokenizer


def all_texts(topics: list[Topic], prompts: list[str]) -> list[str]:
    """Everything that training shows, once; the words around the messages too."""
    texts = [*prompts, DEFAULT_SYSTEM, "system\n", "user\n", "assistant\n", *OPENINGS, *ENDINGS]
    for topic in topics:
        texts += [topic.answer, *topic.trained_questions()]
        for phrasings, answer in topic.follow_ups:
            texts += [answer, *phrasings]
    return texts


class SampleMaker:
    """Turns conversations and plain text into (ids, targets); targets are the next tokens, or IGNORED."""

    def __init__(self, topics: list[Topic], prompts: list[str], tokenizer: Tokenizer) -> None:
        self.topics, self.prompts, self.tokenizer = topics, prompts, tokenizer
        self.template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(CHAT_TEMPLATE)
        self.end_of_text, _, self.end_of_message = (tokenizer.token_to_id(token) for token in SPECIAL_TOKENS)

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def conversation(self, messages: list[dict[str, str]]) -> tuple[list[int], list[int]]:
        """Loss on what the assistant says and on the <|im_end|> after it."""
        ids: list[int] = []
        targets: list[int] = []
        for i, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self.encode(self.template.render(messages=messages[:i], add_generation_prompt=True))
            answer = [*self.encode(message["content"]), self.end_of_message]
            targets += [IGNORED] * (len(prompt) - len(ids)) + answer
            ids = prompt + answer
        return ids[:-1], targets[1:]

    def plain_text(self, text: str) -> tuple[list[int], list[int]]:
        """Loss on every token and on the <|endoftext|> after them."""
        ids = [*self.encode(text), self.end_of_text]
        return ids[:-1], ids[1:]

    def random_sample(self, rng: random.Random) -> tuple[list[int], list[int]]:
        if rng.random() < PLAIN_TEXT_SHARE:
            return self.plain_text(rng.choice(self.topics).answer)
        return self.conversation(make_conversation(self.topics, self.prompts, rng))

    def batches(self, rng: random.Random) -> Iterator[tuple[Tensor, Tensor]]:
        """Endless batches of about TOKENS_PER_BATCH positions; samples of like length go together."""
        while True:
            samples = sorted(
                (self.random_sample(rng) for _ in range(SAMPLES_PER_SORT)), key=lambda sample: len(sample[0])
            )
            groups: list[list] = [[]]
            for sample in samples:
                if (len(groups[-1]) + 1) * len(sample[0]) > TOKENS_PER_BATCH:
                    groups.append([])
                groups[-1].append(sample)
            rng.shuffle(groups)
            yield from map(pad, groups)


def pad(samples: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """(ids, targets), both (B, T). Padding comes last, where causal attention keeps it out of sight."""
    length = max(len(ids) for ids, _ in samples)
    ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in samples])
    return ids, torch.tensor([targets + [IGNORED] * (length - len(targets)) for _, targets in samples])
