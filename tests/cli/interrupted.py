"""`python -m cupyllm ...` where Ctrl-C comes at a certain place, however fast the machine is.

python -m tests.cli.interrupted at-piece-10 chat ...   waits before piece 10 of an answer until Ctrl-C has been pressed
python -m tests.cli.interrupted after-answer chat ...  presses Ctrl-C itself, after an answer and before the next prompt
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

from cupyllm.answer_stream import AnswerPiece
from cupyllm.cli import main
from cupyllm.cli.conversation import Conversation
from cupyllm.cli.sources import LocalSource, Messages

answer, answered = LocalSource.answer, Conversation.answered
read_end, write_end = os.pipe()


def answer_until_interrupted(
    source: LocalSource, prompt: str | Messages, settings: dict[str, Any]
) -> Iterator[AnswerPiece]:
    for number, piece in enumerate(answer(source, prompt, settings)):
        if number == 10:
            os.read(read_end, 1)
        yield piece


def interrupted_after(talk: Conversation, text: str) -> None:
    answered(talk, text)
    signal.raise_signal(signal.SIGINT)


if __name__ == "__main__":
    where, *words = sys.argv[1:]
    if where == "at-piece-10":
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)  # a byte for each signal
        LocalSource.answer = answer_until_interrupted  # type: ignore[method-assign]
    else:
        Conversation.answered = interrupted_after  # type: ignore[method-assign]
    sys.exit(main(words))
