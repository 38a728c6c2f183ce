"""What `chat` and `generate` do with a terminal: safe text, dim text, figures, and Ctrl-C that stops an answer only."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import TextIO

# A model can write anything: what moves the cursor or changes the terminal is left out.
_CONTROLS = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t")


def printable(text: str) -> str:
    """The text without control characters, but for line breaks and tabs."""
    return text.translate(_CONTROLS)


def dim(text: str, stream: TextIO) -> str:
    """The text in a pale colour where `stream` is a terminal and NO_COLOR (no-color.org) is not set."""
    return f"\x1b[2m{text}\x1b[0m" if stream.isatty() and not os.environ.get("NO_COLOR") else text


@dataclass
class Stopwatch:
    """Times the tokens of one answer."""

    started: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0

    def note(self, num_tokens: int) -> None:
        """So many tokens have come until now."""
        if num_tokens > self.num_tokens:
            self.last_token = time.monotonic()
            self.first_token = self.first_token or self.last_token
            self.num_tokens = num_tokens

    def line(self) -> str:
        """The figures of the answer: tokens, tokens a second after the first, and the wait for the first."""
        if self.first_token is None or self.last_token is None:
            return "no tokens"
        seconds = self.last_token - self.first_token
        speed = f", {(self.num_tokens - 1) / seconds:.1f} tokens/s" if seconds > 0 and self.num_tokens > 1 else ""
        plural = "" if self.num_tokens == 1 else "s"
        wait = self.first_token - self.started
        first = f"{wait * 1e3:.0f} ms" if wait < 1 else f"{wait:.2f} s"
        return f"{self.num_tokens} token{plural}{speed}, first after {first}"


class Interrupt:
    """How often Ctrl-C was pressed."""

    num_presses = 0


@contextmanager
def interrupts(*, raising: int | None) -> Iterator[Interrupt]:
    """Within it Ctrl-C is counted, and only press number `raising`, 1 is the first, raises KeyboardInterrupt.

    Those before it cut nothing in half, such as a step of the engine; those after it do not cut short what then ends.
    With None none raises. Must be called in the main thread.
    """
    interrupt = Interrupt()

    def handle(number: int, frame: FrameType | None) -> None:
        interrupt.num_presses += 1
        if interrupt.num_presses == raising:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
