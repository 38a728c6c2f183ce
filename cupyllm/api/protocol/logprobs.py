"""Log-probabilities as the two routes show them. JSON has no -infinity, so what is impossible has -9999.0."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from cupyllm.sampling_batch import TokenLogprobs
from cupyllm.tokenizer import Tokenizer

IMPOSSIBLE = -9999.0


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]
) -> dict[str, Any] | None:
    """The `logprobs` of a chat choice, or of a piece of one; None when none were asked for."""
    if not logprobs:
        return None
    content = [
        _chat_token(tokenizer, token_id, one.logprob)
        | {"top_logprobs": [_chat_token(tokenizer, other, value) for other, value in one.top]}
        for token_id, one in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], count: int
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of a prompt, by id, it and the `count` most likely ones in its place.

    The rank counts from 1; it is null for a token that is not among the most likely ones that were asked for.
    """
    shown: list[dict[str, Any] | None] = []
    for token_id, one in zip(token_ids, logprobs, strict=True):
        if one is None:
            shown.append(None)
            continue
        top = {other: (value, rank) for rank, (other, value) in enumerate(one.top[:count], start=1)}
        ranked: dict[int, tuple[float, int | None]] = {token_id: (one.logprob, None), **top}
        shown.append(
            {
                str(other): {
                    "logprob": max(value, IMPOSSIBLE),
                    "rank": rank,
                    "decoded_token": tokenizer.token_bytes(other).decode("utf-8", "replace"),
                }
                for other, (value, rank) in ranked.items()
            }
        )
    return shown


class TextLogprobs:
    """The `logprobs` of a text choice, piece by piece, with the place of each token in the text."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def show(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None], *, is_prompt: bool = False
    ) -> dict[str, Any]:
        """Four lists of one length for the next tokens. In the text of an answer control tokens have no place."""
        hidden = frozenset() if is_prompt else self._tokenizer.special_ids
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            shown = b"" if token_id in hidden else self._tokenizer.token_bytes(token_id)
            self._offset += len(self._utf8.decode(shown))
        return {
            "tokens": [text_of(self._tokenizer, token_id) for token_id in token_ids],
            "token_logprobs": [None if one is None else max(one.logprob, IMPOSSIBLE) for one in logprobs],
            "top_logprobs": [
                None if one is None else self._top(token_id, one)
                for token_id, one in zip(token_ids, logprobs, strict=True)
            ],
            "text_offset": offsets,
        }

    def _top(self, token_id: int, one: TokenLogprobs) -> dict[str, float]:
        """The most likely tokens, and the chosen one if it is not among them."""
        shown = dict(one.top[: self._count])
        shown.setdefault(token_id, one.logprob)
        return {text_of(self._tokenizer, other): max(value, IMPOSSIBLE) for other, value in shown.items()}


def text_of(tokenizer: Tokenizer, token_id: int) -> str:
    r"""A token as text; one that is a part of a character as "bytes:\xe4", OpenAI's way, so that no two are alike."""
    token = tokenizer.token_bytes(token_id)
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _chat_token(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    token = tokenizer.token_bytes(token_id)
    return {"token": token.decode("utf-8", "replace"), "bytes": list(token), "logprob": max(logprob, IMPOSSIBLE)}
