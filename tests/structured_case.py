"""What tests of structured output share: a compiler over a tokenizer, and walks along a guide without a model."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np

from cupyllm.structured.compiler import GuideCompiler
from cupyllm.token_guide import Guide, TokenGuide
from cupyllm.tokenizer import Tokenizer

DEMO = Path(__file__).parents[1] / "cupyllm" / "demo"


def make_compiler(folder: Path = DEMO) -> GuideCompiler:
    tokenizer = Tokenizer.from_folder(folder)
    ends = [tokenizer.added_tokens[text] for text in ("<|im_end|>", "<|endoftext|>")]
    return GuideCompiler(tokenizer, ends, vocab_limit=tokenizer.num_tokens)


@functools.cache
def demo_compiler() -> GuideCompiler:
    return make_compiler()


def allowed(guide: TokenGuide, tokenizer: Tokenizer) -> list[int]:
    """The ids that may come next."""
    words = np.zeros(-(-tokenizer.num_tokens // 32), np.uint32)
    assert guide.allow(words)
    ids: list[int] = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    return ids


def write_something(compiler: GuideCompiler, guide: Guide, seed: int, most: int = 2000) -> tuple[str, bool]:
    """A random answer, and whether it is complete. Now and then a token that closes something is preferred, so that
    most answers end.
    """
    tokenizer, choose = compiler.tokenizer, random.Random(seed)
    ends = {tokenizer.added_tokens[text] for text in ("<|im_end|>", "<|endoftext|>")}
    closing = {
        i for i in range(tokenizer.num_tokens) if tokenizer.token_bytes(i) in (b'"', b"}", b"]", b'"}', b",")
    } | ends
    one, ids = guide.start(), list[int]()
    while len(ids) < most:
        candidates = allowed(one, tokenizer)
        assert candidates, "nothing may follow"
        preferred = [token_id for token_id in candidates if token_id in closing] if choose.random() < 0.4 else []
        token_id = choose.choice(preferred or candidates)
        if token_id in ends:
            assert set(candidates) & ends == ends, "every end token may end the output"
            return tokenizer.decode(ids, skip_special_tokens=False), True
        one.advance(token_id)
        ids.append(token_id)
    return tokenizer.decode(ids, skip_special_tokens=False), False


def accepts(compiler: GuideCompiler, guide: Guide, text: str, *, control_tokens: bool = False) -> bool:
    """Whether the guide lets a model write exactly this text and then end."""
    tokenizer, one = compiler.tokenizer, guide.start()
    for token_id in tokenizer.encode(text, control_tokens=control_tokens):
        if token_id not in allowed(one, tokenizer):
            return False
        one.advance(token_id)
    return tokenizer.added_tokens["<|im_end|>"] in allowed(one, tokenizer)
