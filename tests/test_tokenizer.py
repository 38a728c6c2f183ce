"""Encoding, decoding, the bytes of tokens, and what a model folder may get wrong."""

from __future__ import annotations

import json
import os
import unicodedata
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from cupyllm.errors import CheckpointError, RequestError
from cupyllm.tokenizer import Tokenizer
from tests.qwen_tokenizer import (
    MARK_TOKENS,
    QWEN2_TOKENS,
    SPECIAL_TOKENS,
    tokenizer_json,
    write_json,
    write_tokenizer_folder,
)

TEXTS = [
    "",
    "What is the weather in Paris?\n\n  def f(x):\treturn x",
    "你好，世界 😀 🫠 龘 🧑‍🚀 ѐ \r\n",
    "it's WE'LL 12345 ½ ٣ <b> & \\n \x00 \ufffd",
]
# Any text that UTF-8 can hold.
CHARACTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer_folder(tmp_path_factory.mktemp("qwen"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def library(folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_encoding_equals_the_librarys_and_decodes_to_the_text(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, text: str
) -> None:
    ids = tokenizer.encode(text)
    assert ids == library.encode(text).ids == tokenizer.encode(text, control_tokens=False)
    assert tokenizer.decode(ids) == text


@settings(deadline=None)
@given(text=CHARACTERS)
def test_any_text_comes_back_in_nfc(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, control_tokens=False)) == unicodedata.normalize("NFC", text)


def test_t4_no_begin_token_is_prepended_even_where_the_file_asks_for_one(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    begin = {"id": "<|endoftext|>", "ids": [content["added_tokens"][0]["id"]], "tokens": ["<|endoftext|>"]}
    single = [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {"<|endoftext|>": begin},
    }
    write_json(folder / "tokenizer.json", content)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert library.encode("the").ids[0] == begin["ids"][0], "the file should ask for a begin token"
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.encode("the") == tokenizer.encode("the", control_tokens=False) == library.encode("the").ids[1:]


def test_t5_ids_without_a_token_are_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.num_tokens == max(tokenizer.added_tokens.values()) + 1
    for token_id in (-1, tokenizer.num_tokens, tokenizer.num_tokens + 270, 2**40):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.decode([token_id, *tokenizer.encode("the"), token_id]) == "the"


def test_t5_a_hole_in_the_ids_counts_as_an_id_without_a_token(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path, layout="v5")
    content = json.loads((folder / "tokenizer.json").read_text())
    last, last_id = max(content["model"]["vocab"].items(), key=lambda item: item[1])
    content["model"]["vocab"][last] = last_id + 500
    write_json(folder / "tokenizer.json", content)
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.num_tokens == last_id + 501
    assert tokenizer.token_bytes(last_id) == tokenizer.token_bytes(last_id + 499) == b""


def test_t6_added_tokens_are_found_before_nfc_joins_characters(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<tool_call>\u0338")  # ">" and U+0338 alone compose to "≯"
    assert ids[0] == tokenizer.added_tokens["<tool_call>"]
    assert tokenizer.decode(ids) == "<tool_call>\u0338"
    for control_tokens in (True, False):
        assert tokenizer.decode(tokenizer.encode("e\u0301>\u0338", control_tokens=control_tokens)) == "é≯"


def test_t7_marks_are_added_but_not_special(tokenizer: Tokenizer) -> None:
    assert list(tokenizer.added_tokens) == QWEN2_TOKENS
    assert tokenizer.special_ids == {tokenizer.added_tokens[text] for text in SPECIAL_TOKENS}
    ids = tokenizer.encode("a" + "".join(QWEN2_TOKENS) + "b")
    assert tokenizer.decode(ids) == "a" + "".join(MARK_TOKENS) + "b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a" + "".join(QWEN2_TOKENS) + "b"


@pytest.mark.parametrize("token", QWEN2_TOKENS)
def test_t8_the_text_of_an_added_token_can_be_encoded_as_ordinary_text(tokenizer: Tokenizer, token: str) -> None:
    added, text = tokenizer.added_tokens[token], f"a{token}b"
    assert tokenizer.encode(text) == [*tokenizer.encode("a"), added, *tokenizer.encode("b")]
    ordinary = tokenizer.encode(text, control_tokens=False)
    assert not set(ordinary) & set(tokenizer.added_tokens.values())
    assert tokenizer.decode(ordinary) == text


@pytest.mark.parametrize("text", [*TEXTS, "a<|im_end|>b<tool_call>"])
def test_t9_bytes_of_tokens_join_to_the_bytes_of_the_text(tokenizer: Tokenizer, text: str) -> None:
    assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()


@settings(deadline=None)
@given(data=st.data(), skip=st.booleans())
def test_decoding_equals_the_librarys_for_any_ids(
    tokenizer: Tokenizer, library: tokenizers.Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.num_tokens + 3), max_size=12))
    assert tokenizer.decode(ids, skip_special_tokens=skip) == library.decode(ids, skip_special_tokens=skip)


def test_a_vocabulary_entry_outside_the_byte_alphabet_stands_for_its_own_text(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path, layout="v5", added=[])
    content = json.loads((folder / "tokenizer.json").read_text())
    new_id = content["model"]["vocab"]["｜x y"] = len(content["model"]["vocab"])
    write_json(folder / "tokenizer.json", content)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert Tokenizer.from_folder(folder).decode([new_id]) == library.decode([new_id]) == "｜x y"


@pytest.mark.parametrize("layout", ["v4", "v5"])
def test_t15_both_file_layouts_give_the_same_tokenizer(tokenizer: Tokenizer, tmp_path: Path, layout: str) -> None:
    other = Tokenizer.from_folder(write_tokenizer_folder(tmp_path, layout=layout))
    assert [other.encode(text) for text in TEXTS] == [tokenizer.encode(text) for text in TEXTS]
    assert (other.added_tokens, other.special_ids) == (tokenizer.added_tokens, tokenizer.special_ids)
    assert other.eos_token_id == tokenizer.added_tokens["<|im_end|>"]
    assert other.named_tokens == {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}


def test_a_folder_without_tokenizer_config_has_no_end_token(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.eos_token_id is None
    assert tokenizer.named_tokens == {}


def test_t18_digits_are_split_one_by_one_and_letters_of_every_script_are_letters(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path, layout="v5")
    content = json.loads((folder / "tokenizer.json").read_text())
    size = len(content["model"]["vocab"]) + len(content["added_tokens"])
    # "12" and "éé" as merges: the first must never apply, because the regex has split "12" before; the second must.
    e = "Ã©"
    for i, (left, right) in enumerate([("1", "2"), ("Ã", "©"), (e, e)]):
        if left + right not in content["model"]["vocab"]:
            content["model"]["vocab"][left + right] = size + i
            content["model"]["merges"].append([left, right])
    write_json(folder / "tokenizer.json", content)
    tokenizer = Tokenizer.from_folder(folder)
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("12")] == [b"1", b"2"]
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("éé")] == ["éé".encode()]


def test_at_one_place_the_longest_added_token_wins(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(write_tokenizer_folder(tmp_path, added=["<a>", "<a>b", "<c>"]))
    a, ab, c = tokenizer.added_tokens.values()
    pieces = [("x", None), ("<a>b", ab), ("<a>", a), ("<c>", c), ("y", None)]
    assert list(tokenizer.split_at_added_tokens("x<a>b<a><c>y")) == pieces
    assert tokenizer.encode("<a>b<a><c>") == [ab, a, c]
    assert list(tokenizer.split_at_added_tokens("")) == []


def test_a_tokenizer_without_added_tokens_splits_nothing(tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path, added=[])
    tokenizer = Tokenizer.from_folder(folder)
    assert list(tokenizer.split_at_added_tokens("<|im_end|>")) == [("<|im_end|>", None)]
    assert tokenizer.encode("<|im_end|>") == tokenizer.encode("<|im_end|>", control_tokens=False)


def test_a_length_limit_or_padding_in_the_file_changes_no_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = write_tokenizer_folder(tmp_path)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    content["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<|endoftext|>"}
    write_json(folder / "tokenizer.json", content)
    assert len(tokenizer.encode(TEXTS[1])) > 3
    assert Tokenizer.from_folder(folder).encode(TEXTS[1]) == tokenizer.encode(TEXTS[1])


@pytest.mark.parametrize("control_tokens", [True, False])
def test_a_lone_surrogate_is_refused_by_name(tokenizer: Tokenizer, control_tokens: bool) -> None:
    with pytest.raises(RequestError, match=r"U\+D83D"):
        tokenizer.encode(json.loads('"a\\ud83d b"'), control_tokens=control_tokens)


def test_threads_may_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    texts = [f"{text}{i}<|im_end|>" for i in range(50) for text in TEXTS]

    def work(text: str) -> tuple[list[int], list[int], str]:
        ids = tokenizer.encode(text)
        return ids, tokenizer.encode(text, control_tokens=False), tokenizer.decode(ids)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, texts)) == [work(text) for text in texts]


def _with_flag(name: str) -> dict[str, Any]:
    content = tokenizer_json()
    content["added_tokens"][0][name] = True
    return content


BROKEN: list[tuple[str, str, object, str]] = [
    ("absent", "tokenizer.json", None, r"tokenizer\.json does not exist"),
    ("not JSON", "tokenizer.json", "{", r"tokenizer\.json is not a tokenizer"),
    ("no model", "tokenizer.json", {"version": "1.0"}, r"tokenizer\.json is not a tokenizer"),
    (
        "not BPE",
        "tokenizer.json",
        {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}},
        r"tokenizer\.json: model\.type is WordLevel",
    ),
    ("no decoder", "tokenizer.json", tokenizer_json() | {"decoder": None}, r"tokenizer\.json: decoder\.type is None"),
    ("lstrip", "tokenizer.json", _with_flag("lstrip"), r"added_tokens: '<\|endoftext\|>' sets lstrip"),
    ("single_word", "tokenizer.json", _with_flag("single_word"), r"sets single_word"),
    ("config not JSON", "tokenizer_config.json", "[", r"tokenizer_config\.json is not JSON"),
    ("config a list", "tokenizer_config.json", [], r"tokenizer_config\.json holds a JSON list"),
    ("eos a number", "tokenizer_config.json", {"eos_token": 3}, r"tokenizer_config\.json: eos_token is 3"),
    ("eos unknown", "tokenizer_config.json", {"eos_token": "</s>"}, r"eos_token is '</s>', which tokenizer\.json"),
    ("decoder list", "tokenizer_config.json", {"added_tokens_decoder": [1]}, r"added_tokens_decoder is not an object"),
    (
        "other added token",
        "tokenizer_config.json",
        {"added_tokens_decoder": {"9999": {"content": "<|new|>"}}},
        r"added_tokens_decoder gives id 9999 to '<\|new\|>'",
    ),
    (
        "other id",
        "tokenizer_config.json",
        {"added_tokens_decoder": {"3": {"content": "<|im_end|>"}}},
        r"added_tokens_decoder gives id 3 to '<\|im_end\|>'",
    ),
]


@pytest.mark.parametrize(
    ("file", "content", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN]
)
def test_a_damaged_folder_is_refused_naming_file_and_key(
    folder: Path, tmp_path: Path, file: str, content: object, message: str
) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    if content is None:
        (tmp_path / file).unlink()
    elif isinstance(content, str):
        (tmp_path / file).write_text(content)
    else:
        write_json(tmp_path / file, content)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.checkpoint
def test_the_real_tokenizer_has_qwens_ids() -> None:
    path = os.environ.get("CUPYLLM_TEST_CHECKPOINT")
    if not path:
        pytest.skip("set CUPYLLM_TEST_CHECKPOINT to the folder of a Qwen checkpoint to run this")
    tokenizer = Tokenizer.from_folder(Path(path))
    assert tokenizer.added_tokens["<|endoftext|>"] == 151643
    assert tokenizer.eos_token_id in (151643, 151645)
    assert tokenizer.encode("x<|im_start|>") == [87, 151644]
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("🫠")] != ["🫠".encode()]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
