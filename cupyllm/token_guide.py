"""What may come next, decided anew after every token: grammars, thinking budgets and lists of allowed ids.

A guide belongs to one sequence and is asked in the engine thread, so it must be quick: the sampling op reads what it
allows as one bit for each token id. What takes long, such as compiling a JSON schema, happens before, in the Guide that
a request brings; each of its answers gets a guide of its own from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np


class TokenGuide(Protocol):
    """What one sequence may say next."""

    def allow(self, words: np.ndarray) -> bool:
        """Write what may come next, and return True; False when anything may, and nothing was written.

        words is (ceil(N / 32),) uint32, all zero, where N is Tokenizer.num_tokens; bit id % 32 of word id // 32 is to
        be set when the token may come. At least one token must be allowed: where the output is complete, the end
        tokens. Raises DeadEndError, which says what to change, where the output is not complete and nothing may follow.
        That, and whatever else it raises, ends its sequence with an error.
        """

    def advance(self, token_id: int) -> None:
        """The token was chosen; it is one that `allow` allowed. Not called for the token that ends the sequence, so
        an end token comes only where the request has ignore_eos.
        """


class Guide(Protocol):
    """Makes the guides of a request's answers. Immutable; any thread may use it."""

    def start(self) -> TokenGuide:
        """A guide at the beginning of an answer."""


class AllowedIds:
    """The guide of `allowed_token_ids`: the same few tokens at every place. It is its own start."""

    def __init__(self, token_ids: Iterable[int]) -> None:
        self._ids = np.unique(np.fromiter(token_ids, np.int64))

    def start(self) -> AllowedIds:
        return self

    def allow(self, words: np.ndarray) -> bool:
        """Ids that have no token are passed over."""
        ids = self._ids[self._ids < 32 * len(words)]
        np.bitwise_or.at(words, ids // 32, np.uint32(1) << (ids % 32).astype(np.uint32))
        return True

    def advance(self, token_id: int) -> None:
        """Nothing changes."""
