"""From a sequence's tokens to its text, as they arrive: decoding, stop strings, and what the sequence ended with."""

from __future__ import annotations

from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason
from cupyllm.step_result import TokenEvent
from cupyllm.text_stream import IncrementalDecoder, StopMatcher
from cupyllm.tokenizer import Tokenizer


class OutputText:
    """The text of one sequence. `push` every token event; what it returns may be shown at once.

    An end token adds no text. When a stop string is complete, `finish_reason` is set although the engine goes on: the
    caller then aborts the sequence. A stop string counts only when it begins after the first min_tokens tokens.
    """

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.finish_reason: FinishReason | None = None
        self._decoder = IncrementalDecoder(tokenizer)
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._num_unstoppable = params.min_tokens

    def push(self, event: TokenEvent) -> str:
        """The new text that is safe to show, after this token."""
        assert self.finish_reason is None, "the text has ended already"
        ends = event.finish_reason is FinishReason.STOP
        text = "" if event.token_id is None or ends else self._decoder.push(event.token_id)
        if event.finish_reason is not None:
            text += self._decoder.finish()
        if self._num_unstoppable > 0 and event.finish_reason is None:
            self._num_unstoppable -= 1
            return text
        shown = self._matcher.push(text)
        if self._matcher.matched is not None:
            self.finish_reason = FinishReason.STOP
        elif event.finish_reason is not None:
            self.finish_reason = event.finish_reason
            shown += self._matcher.finish()
        return shown
