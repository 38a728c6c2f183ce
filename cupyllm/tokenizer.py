"""Text to token ids and back, as one model folder defines it.

The work is done by the `tokenizers` library (split at added tokens, NFC, split by the model's regex, byte-level BPE).
This module adds what a server needs around it: errors that name file and key, encoding in which no text can become a
control token, and the exact bytes behind every id. The chat format is chat_template.py's subject, streaming is
text_stream.py's.

Added tokens are the ids that stand outside the BPE vocabulary. Those flagged special (`<|im_end|>`) vanish when text is
decoded for people; the others (`<tool_call>`, the code-completion marks) stay, because a parser looks for them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import tokenizers

from cupyllm.errors import CheckpointError, RequestError
from cupyllm.json_object import JsonObject, read_json_object

TOKENIZER_FILE = "tokenizer.json"
CONFIG_FILE = "tokenizer_config.json"
_NAMED_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """The tokenizer of one model folder. Nothing changes after it is made, so threads may share it.

    config          tokenizer_config.json; without keys where the folder has none
    added_tokens    text -> id of every added token
    special_ids     ids of those flagged special
    named_tokens    "eos_token" and its like -> text, where the config sets them
    eos_token_id    id of the config's eos_token, or None
    num_tokens      one more than the highest id that has a token; the model may compute more logits than that
    prefix_ids, suffix_ids   what the post-processor of tokenizer.json puts around a text: nothing for chat models,
                    an end token after it for Qwen3-Embedding
    """

    def __init__(self, full: tokenizers.Tokenizer, config: JsonObject) -> None:
        self._full = full
        self._plain = _without_added_tokens(full)
        self.config = config
        added = full.get_added_tokens_decoder()
        self.added_tokens = {token.content: token_id for token_id, token in added.items()}
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.num_tokens = 1 + max(full.get_vocab(with_added_tokens=True).values(), default=-1)
        self.named_tokens = _named_tokens(config)
        self.eos_token_id = self._id_of_named("eos_token")
        self.prefix_ids, self.suffix_ids = _ids_around_text(full)
        self._added_text = {token_id: text for text, token_id in self.added_tokens.items()}
        # At one place the longest token wins, as in the library.
        longest_first = sorted(self.added_tokens, key=len, reverse=True)
        self.added_token_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read tokenizer.json and, where present, tokenizer_config.json, as transformers 4 and 5 write them.

        Raises CheckpointError when a file is missing or damaged, or holds a kind of tokenizer that is not served.
        """
        path = folder / TOKENIZER_FILE
        try:
            full = tokenizers.Tokenizer.from_buffer(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{path} does not exist; a model folder needs this file") from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
        except Exception as error:  # the library has no exception class of its own
            raise CheckpointError(f"{path} is not a tokenizer that can be read: {error}") from None
        full.no_truncation()  # a length limit saved with the tokenizer would cut prompts silently
        full.no_padding()
        _check_kind(full, path)
        config_path = folder / CONFIG_FILE
        config = read_json_object(config_path) if config_path.exists() else JsonObject(config_path, {})
        tokenizer = cls(full, config)
        tokenizer._check_added_tokens_decoder()
        return tokenizer

    def encode(self, text: str, *, control_tokens: bool = True) -> list[int]:
        """The ids of `text` alone, without `prefix_ids` and `suffix_ids`.

        With control_tokens=False the text of an added token, special or not, is ordinary text and gets ordinary ids.
        Raises RequestError when the text holds half of a surrogate pair: JSON can carry it, but it is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            bad = ord(text[error.start])
            raise RequestError(f"the text holds the lone surrogate U+{bad:04X}, which is not a character") from None
        tokenizer = self._full if control_tokens else self._plain
        # The batch form lets other threads run meanwhile; `encode` would hold them up for seconds on a long text.
        ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def with_special_tokens(self, ids: list[int]) -> list[int]:
        """The ids of a text with what the post-processor puts around it."""
        return [*self.prefix_ids, *ids, *self.suffix_ids]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, ids without a token become nothing."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skip).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token stands for, often a part of a character; b"" for an id without a token."""
        if token_id in self._added_text:
            return self._added_text[token_id].encode()
        if not 0 <= token_id < self.num_tokens:
            return b""
        token = self._full.id_to_token(token_id)
        return b"" if token is None else _bytes_of(token)

    def vocabulary_entry(self, token_id: int) -> str:
        """A token as tokenizer.json spells it, in the alphabet of byte-level BPE; "" for an id without a token."""
        return (self._full.id_to_token(token_id) or "") if 0 <= token_id < self.num_tokens else ""

    def bad_word_ids(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The token ids of each word as it is written at the start of a text and after a space."""
        spellings = (ids for word in words for ids in (self.encode(word), self.encode(f" {word.lstrip()}")))
        return tuple(dict.fromkeys(map(tuple, spellings)))

    def split_at_added_tokens(self, text: str) -> Iterator[tuple[str, int | None]]:
        """The pieces of `text` in order: (its text, its id) for an added token, (text, None) for what lies between."""
        end = 0
        for match in self.added_token_pattern.finditer(text):
            if match.start() > end:
                yield text[end : match.start()], None
            yield match.group(), self.added_tokens[match.group()]
            end = match.end()
        if end < len(text):
            yield text[end:], None

    def _id_of_named(self, key: str) -> int | None:
        if key not in self.named_tokens:
            return None
        token_id: int | None = self._full.token_to_id(self.named_tokens[key])
        if token_id is None:
            self.config.fail(key, f"is {self.named_tokens[key]!r}, which {TOKENIZER_FILE} does not have")
        return token_id

    def _check_added_tokens_decoder(self) -> None:
        """transformers 4 lists the added tokens a second time; a list that says something else is a damaged folder."""
        key = "added_tokens_decoder"
        listed = self.config.get(key, {}) or {}
        if not isinstance(listed, dict):
            self.config.fail(key, "is not an object")
        for token_id, token in listed.items():
            text = token.get("content") if isinstance(token, dict) else token
            if str(self.added_tokens.get(text) if isinstance(text, str) else None) != token_id:
                self.config.fail(key, f"gives id {token_id} to {text!r}, but {TOKENIZER_FILE} does not")


def _without_added_tokens(full: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same model and splitting rules (shared, not copied) with no added tokens."""
    plain = tokenizers.Tokenizer(full.model)
    plain.normalizer = full.normalizer
    plain.pre_tokenizer = full.pre_tokenizer
    return plain


def _ids_around_text(full: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """What encoding with special tokens puts before and after the tokens of a text."""
    encoding = full.encode("a")
    own = [place for place, is_added in enumerate(encoding.special_tokens_mask) if not is_added]
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


def _check_kind(full: tokenizers.Tokenizer, path: Path) -> None:
    if not isinstance(full.model, tokenizers.models.BPE):
        raise CheckpointError(f"{path}: model.type is {type(full.model).__name__}; only BPE is supported")
    if not isinstance(full.decoder, tokenizers.decoders.ByteLevel):
        raise CheckpointError(f"{path}: decoder.type is {type(full.decoder).__name__}; only ByteLevel is supported")
    for token in full.get_added_tokens_decoder().values():
        for flag in ("lstrip", "rstrip", "single_word"):
            if getattr(token, flag):
                raise CheckpointError(f"{path}: added_tokens: {token.content!r} sets {flag}, which is not supported")


def _named_tokens(config: JsonObject) -> dict[str, str]:
    found = {}
    for key in _NAMED_TOKENS:
        value = config.values.get(key)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[key] = text
        elif value is not None:
            config.fail(key, f"is {value!r}, neither a text nor an object with content")
    return found


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet that GPT-2 introduced.

    A byte that prints in Latin-1 is its own character; the 68 others are numbered from U+0100 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _bytes_of(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # a vocabulary entry outside the alphabet stands for its own text, as in the library
        return token.encode()
