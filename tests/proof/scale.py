"""How large the proof runs are: quick by default, large with the environment variable CUPYLLM_PROOF=long."""

from __future__ import annotations

import os

LONG = os.environ.get("CUPYLLM_PROOF") == "long"


def pick(quick: int, long: int) -> int:
    """The size of a run in the present setting."""
    return long if LONG else quick
