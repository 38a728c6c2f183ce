"""One answer as it is written, without a server: run the engine step by step and give the text that each step adds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cupyllm.engine import Engine
from cupyllm.errors import EngineError
from cupyllm.output import OutputText, with_bad_word_ids
from cupyllm.reasoning import ThinkTokens
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason
from cupyllm.tokenizer import Tokenizer

DAMAGED = "the model gave no finite logits; the checkpoint or its dtype is damaged"


@dataclass(frozen=True)
class AnswerPiece:
    """What is new in an answer. `num_tokens` is how many tokens there are until now, those counted that gave no text.

    `finish_reason`, "stop" or "length", is set in the last piece.
    """

    text: str
    num_tokens: int
    finish_reason: str | None = None
    reasoning: str = ""


def stream_answer(
    engine: Engine, tokenizer: Tokenizer, prompt_ids: list[int], params: SamplingParams, marks: ThinkTokens | None
) -> Iterator[AnswerPiece]:
    """Answer a prompt; with `marks` its reasoning is told apart. Closing the iterator ends the answer.

    Nobody else may use the engine meanwhile. Raises RequestError for what can never be served, DeadEndError, and
    EngineError.
    """
    sequence = engine.add(prompt_ids, with_bad_word_ids(params, tokenizer))
    text = OutputText(tokenizer, params, marks, thinking=marks is not None and marks.left_open(prompt_ids))
    num_tokens = 0
    try:
        while text.finish_reason is None:
            for event in engine.step():
                if event.sequence is not sequence or text.finish_reason is not None:
                    continue
                new = text.push(event)
                num_tokens += event.token_id is not None
                if text.finish_reason is FinishReason.ERROR:
                    raise sequence.dead_end or EngineError(DAMAGED)
                reason = None if text.finish_reason is None else text.finish_reason.value
                yield AnswerPiece(new.content, num_tokens, reason, new.reasoning)
    finally:
        engine.abort(sequence)  # the engine does not know of stop strings, nor of readers that leave
