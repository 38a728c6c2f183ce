"""What the answer to a conversation is held to: a budget of reasoning, and what follows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from cupyllm.answer_guide import thinking_guide
from cupyllm.api.protocol.thinking import Thinking
from cupyllm.api.state import ServerState
from cupyllm.errors import RequestError
from cupyllm.reasoning import ThinkTokens
from cupyllm.sampling import SamplingParams


def guide_turn(
    state: ServerState, params: SamplingParams, thinking: Thinking, prompt_ids: Sequence[int], *, beams: bool
) -> SamplingParams:
    """The same parameters with the guide that the request asks for. Raises RequestError where it cannot be had.

    A budget is an upper limit, so it asks nothing of a model that does not think.
    """
    marks = ThinkTokens.of(state.loaded.tokenizer)
    may_think = marks is not None and thinking.enable is not False
    if marks is None or not may_think or (thinking.budget is None and params.guide is None):
        return params
    if beams:
        raise RequestError(f"{thinking.budget_param} cannot be used with use_beam_search", param=thinking.budget_param)
    guide = thinking_guide(
        state.loaded.tokenizer,
        marks,
        thinking=marks.left_open(prompt_ids),
        budget=thinking.budget,
        answer=params.guide,
        end_ids=frozenset(state.loaded.engine.model.config.end_token_ids),
    )
    return replace(params, guide=guide)
