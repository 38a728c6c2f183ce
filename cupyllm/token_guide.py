"""What may come next, decided anew after every token: grammars, thinking budgets and lists of allowed ids.

A guide belongs to one sequence and is asked in the engine thread, so it must be quick: the sampling op reads what it
allows as one bit for each token id. What takes long, such as compiling a JSON schema, happens before, in the Guide that
a request brings; each of its answers gets a guide of its own from it.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np


class TokenGuide(Protocol):
    """What one sequence may say next."""

    def allow(self, words: np.ndarray) -> bool:
        """Write what may come next, and return True; False when anything may, and nothing was written.

        words is (ceil(V / 32),) uint32; bit id % 32 of word id // 32 is set when the token may come. At least one
        token must be allowed: where nothing may follow, the end token.
        """

    def advance(self, token_id: int) -> None:
        """The token was chosen. It is one that `allow` allowed."""


class Guide(Protocol):
    """Makes the guides of a request's answers. Immutable; any thread may use it."""

    def start(self) -> TokenGuide:
        """A guide at the beginning of an answer."""
