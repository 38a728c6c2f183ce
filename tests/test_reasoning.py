"""Telling reasoning from the answer by tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from cupyllm.reasoning import AnswerDecoder, NewText, ThinkTokens
from cupyllm.tokenizer import Tokenizer
from tests.qwen_tokenizer import QWEN3_TOKENS, write_tokenizer_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer_folder(tmp_path_factory.mktemp("qwen3"), added=QWEN3_TOKENS))


def read(tokenizer: Tokenizer, *texts: str, thinking: bool = False) -> tuple[str, str, int]:
    """Reasoning, content and the number of reasoning tokens. Of texts, those that are marks become marks."""
    decoder = AnswerDecoder(tokenizer, ThinkTokens.of(tokenizer), thinking=thinking)
    ids = [i for text in texts for i in tokenizer.encode(text, control_tokens=text in QWEN3_TOKENS)]
    news = [*(decoder.push(token_id) for token_id in ids), decoder.finish()]
    return "".join(n.reasoning for n in news), "".join(n.content for n in news), decoder.num_reasoning_tokens


@pytest.mark.parametrize(
    ("texts", "reasoning", "content"),
    [
        (["<think>", "\nwhy\n\nso\n", "</think>", "\n\nBecause.\n"], "why\n\nso", "Because.\n"),
        (["<think>", "\n\n", "</think>", "\n\n", "Yes"], "", "Yes"),
        (["<think>", "</think>"], "", ""),
        (["<think>", "\nnever done\n"], "never done", ""),
        (["<think>", "a </think> b <think>", "</think>", "c"], "a </think> b <think>", "c"),
        (["<think>", "a", "</think>", "b", "<think>", "c", "</think>"], "a", "b<think>c</think>"),
        (["text ", "<think>", "a", "</think>"], "", "text <think>a</think>"),
        (["</think>", "a"], "", "</think>a"),
        (["<think>", "a", "<think>", "b", "</think>", "c"], "a<think>b", "c"),
        (["<think>", "😀", "</think>", "🫠"], "😀", "🫠"),
        (["\n\nno reasoning\n"], "", "\n\nno reasoning\n"),
    ],
)
def test_reasoning_is_what_stands_between_the_first_marks(
    tokenizer: Tokenizer, texts: list[str], reasoning: str, content: str
) -> None:
    assert read(tokenizer, *texts)[:2] == (reasoning, content)


def test_reasoning_that_the_prompt_has_opened_goes_on(tokenizer: Tokenizer) -> None:
    assert read(tokenizer, "\nwhy\n", "</think>", "\n\nBecause.", thinking=True)[:2] == ("why", "Because.")
    assert read(tokenizer, "<think>", "why", "</think>", "a", thinking=True)[:2] == ("why", "a")


def test_reasoning_tokens_are_counted_with_their_marks(tokenizer: Tokenizer) -> None:
    inner = len(tokenizer.encode("why so"))
    assert read(tokenizer, "<think>", "why so", "</think>", "Because.")[2] == inner + 2
    assert read(tokenizer, "why so", "</think>", "Because.", thinking=True)[2] == inner + 1
    assert read(tokenizer, "<think>", "why so")[2] == inner + 1
    assert read(tokenizer, "why so")[2] == 0


def test_a_prompt_is_open_where_its_last_mark_opens(tokenizer: Tokenizer) -> None:
    marks = ThinkTokens.of(tokenizer)
    assert marks is not None
    for prompt, expected in [
        ("assistant\n", False),
        ("assistant\n<think>\n", True),
        ("<think>\n\n</think>\n\n", False),
        ("<think>a</think>b assistant\n<think>\n", True),
    ]:
        assert marks.left_open(tokenizer.encode(prompt)) is expected


def test_a_model_without_the_marks_has_no_reasoning(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer_folder(tmp_path))
    assert ThinkTokens.of(tokenizer) is None
    text = "<think>\na</think>\n\nb"
    assert read(tokenizer, text)[:2] == ("", text)


def test_line_breaks_are_held_only_until_more_reasoning_comes(tokenizer: Tokenizer) -> None:
    decoder = AnswerDecoder(tokenizer, ThinkTokens.of(tokenizer), thinking=True)
    newline, letter = tokenizer.encode("\n")[0], tokenizer.encode("a")[0]
    shown = [decoder.push(token_id) for token_id in (newline, letter, newline, letter)]
    assert shown == [NewText(), NewText(reasoning="a"), NewText(), NewText(reasoning="\na")]
