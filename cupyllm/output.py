"""From a sequence's tokens to its text, as they arrive: decoding, stop strings, and what the sequence ended with."""

from __future__ import annotations

from dataclasses import replace

from cupyllm.errors import RequestError
from cupyllm.reasoning import AnswerDecoder, NewText, ThinkTokens
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason
from cupyllm.step_result import TokenEvent
from cupyllm.text_stream import StopMatcher
from cupyllm.tokenizer import Tokenizer


class OutputText:
    """The text of one sequence. `push` every token event; what it returns may be shown at once.

    An end token adds no text. When a stop string is complete, `finish_reason` is set although the engine goes on: the
    caller then aborts the sequence. A stop string counts only when it begins after the first min_tokens tokens, and in
    the content, not in the reasoning. Without `marks` all text is content; `thinking` says that the prompt has begun
    the reasoning.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, marks: ThinkTokens | None = None, *, thinking: bool = False
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self._decoder = AnswerDecoder(tokenizer, marks, thinking=thinking)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._num_unstoppable = params.min_tokens

    @property
    def num_reasoning_tokens(self) -> int:
        return self._decoder.num_reasoning_tokens

    def push(self, event: TokenEvent) -> NewText:
        """The new text that is safe to show, after this token."""
        assert self.finish_reason is None, "the text has ended already"
        ends = event.finish_reason is FinishReason.STOP
        new = NewText() if event.token_id is None or ends else self._decoder.push(event.token_id)
        if event.finish_reason is not None:
            new += self._decoder.finish()
        if self._num_unstoppable > 0:
            self._num_unstoppable -= 1
            self.finish_reason = event.finish_reason
            return new
        shown = self._matcher.push(new.content)
        if self._matcher.matched is not None:
            self.finish_reason = FinishReason.STOP
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            shown += self._matcher.finish()
        return NewText(shown, new.reasoning)


def with_bad_word_ids(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The same parameters, with the token ids of their bad words. Raises RequestError for what is no text."""
    try:
        return replace(params, bad_word_ids=tokenizer.bad_word_ids(params.bad_words)) if params.bad_words else params
    except RequestError as error:
        error.param = "bad_words"
        raise
