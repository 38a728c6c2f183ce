"""Text as it arrives, against references that see the whole text at once."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cupyllm.errors import RequestError
from cupyllm.text_stream import IncrementalDecoder, StopMatcher
from cupyllm.tokenizer import Tokenizer
from tests.proof.scale import pick
from tests.qwen_tokenizer import write_tokenizer_folder


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer_folder(tmp_path_factory.mktemp("qwen")))


def stream(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip)
    return [*(decoder.push(token_id) for token_id in ids), decoder.finish()]


@pytest.mark.parametrize("text", ["🫠🥹龘 a", "🧑‍🚀👨‍👩‍👧", "déjà vu", "你好，世界", "plain"])
def test_t9_a_character_is_shown_whole_by_the_token_that_completes_it(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    assert pieces[-1] == ""
    for n, shown in enumerate(pieces[:-1], start=1):
        so_far = b"".join(map(tokenizer.token_bytes, ids[:n]))
        certain = so_far.decode("utf-8", "ignore")  # all complete characters: nothing is held longer than needed
        assert "".join(pieces[:n]) == certain, f"after {n} tokens, {shown!r} was shown"


@settings(deadline=None, max_examples=pick(1000, 10_000))
@given(data=st.data(), skip=st.booleans())
def test_joined_pieces_equal_the_decoding_of_all_ids(tokenizer: Tokenizer, data: st.DataObject, skip: bool) -> None:
    any_id = st.integers(0, tokenizer.num_tokens + 3)
    one_byte = st.integers(0, 255)  # the first ids of the small tokenizer are single bytes: mostly broken characters
    ids = data.draw(st.lists(any_id | one_byte, max_size=20))
    assert "".join(stream(tokenizer, ids, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(deadline=None, max_examples=pick(1000, 10_000))
@given(raw=st.binary(max_size=12) | st.text(max_size=6).map(str.encode))
def test_any_bytes_one_at_a_time_equal_their_decoding(tokenizer: Tokenizer, raw: bytes) -> None:
    id_of = {tokenizer.token_bytes(i): i for i in range(256)}
    pieces = stream(tokenizer, [id_of[bytes([byte])] for byte in raw])
    assert "".join(pieces) == raw.decode("utf-8", "replace")


def test_an_unfinished_character_at_the_end_becomes_one_replacement_mark(tokenizer: Tokenizer) -> None:
    id_of = {tokenizer.token_bytes(i): i for i in range(256)}
    ids = [id_of[bytes([byte])] for byte in "a🫠".encode()[:-1]]
    assert stream(tokenizer, ids) == ["a", "", "", "", "\ufffd"]


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|><tool_call>b")
    assert "".join(stream(tokenizer, ids)) == "a<tool_call>b"
    assert "".join(stream(tokenizer, ids, skip=False)) == "a<|im_end|><tool_call>b"
    unless_asked = IncrementalDecoder(tokenizer)
    assert "".join(map(unless_asked.push, ids)) == "a<tool_call>b"


def cut_at_stop(text: str, stops: list[str], include_stop: bool) -> tuple[str, str | None]:
    """The rule of StopMatcher, on the whole text."""
    for end in range(1, len(text) + 1):
        completed = [stop for stop in stops if text[:end].endswith(stop)]
        if completed:
            stop = max(completed, key=len)
            return text[: end if include_stop else end - len(stop)], stop
    return text, None


FEW_LETTERS = st.text("ab\n", max_size=24)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


@settings(deadline=None, max_examples=pick(1000, 5000))
@given(text=FEW_LETTERS, stops=STOPS, cuts=st.lists(st.integers(0, 24)), include_stop=st.booleans())
@example(text="aabaab", stops=["aabaac", "baa"], cuts=[], include_stop=False)
def test_stop_matcher_equals_the_reference_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int], include_stop: bool
) -> None:
    expected, matched = cut_at_stop(text, stops, include_stop)
    matcher = StopMatcher(stops, include_stop)
    shown = ""
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    for begin, end in itertools.pairwise(edges):
        shown += matcher.push(text[begin:end])
        assert expected.startswith(shown), "text was shown that a stop string takes back"
        if matcher.matched is None:
            sizes = [n for n in range(end + 1) if any(len(s) > n and s.startswith(text[end - n : end]) for s in stops)]
            assert end - len(shown) == max(sizes, default=0), "not exactly the start of a stop string was held back"
    assert shown + matcher.finish() == expected
    assert matcher.matched == matched


@pytest.mark.parametrize(
    ("stop", "expected", "matched"), [("DEFGHIJ", "ABC", "DEFGHIJ"), ("DEFGHIX", "ABCDEFGHIJ", None)]
)
def test_a2_a_stop_string_across_tokens_is_never_shown_in_part(stop: str, expected: str, matched: str | None) -> None:
    matcher = StopMatcher([stop])
    pushed = [matcher.push(letter) for letter in "ABCDEFGHIJ"]
    assert pushed[3:9] == [""] * 6
    assert "".join(pushed) + matcher.finish() == expected
    assert matcher.matched == matched


def test_a2_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"


def test_the_first_completed_stop_wins_and_the_longest_of_those_completed_together() -> None:
    assert [StopMatcher(["abcd", "bc"]).push("xabcd"), StopMatcher(["bc", "abc"]).push("xabc")] == ["xa", "x"]


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["s"], include_stop=True)
    assert [matcher.push("ask"), matcher.push("more"), matcher.finish()] == ["as", "", ""]
    assert matcher.matched == "s"
