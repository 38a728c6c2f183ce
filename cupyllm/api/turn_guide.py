"""What the answer to a conversation is held to: a budget of reasoning, calls of tools, and what else follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

from cupyllm.answer_guide import CallsGuide, thinking_guide
from cupyllm.api.protocol.thinking import Thinking
from cupyllm.api.protocol.tools import ToolUse
from cupyllm.api.state import ServerState
from cupyllm.errors import RequestError
from cupyllm.reasoning import ThinkTokens
from cupyllm.sampling import SamplingParams
from cupyllm.structured.grammar import library_is_missing
from cupyllm.structured.tool_calls import tool_call_guide
from cupyllm.token_guide import Guide
from cupyllm.tool_calls import OPENING


def guide_turn(
    state: ServerState,
    params: SamplingParams,
    tools: ToolUse,
    thinking: Thinking,
    prompt_ids: Sequence[int],
    *,
    beams: bool,
) -> SamplingParams:
    """The same parameters with the guide that the request asks for; `params.guide` is that of the content.

    Raises RequestError for what cannot be kept. Compiles grammars, which may take a second.
    """
    answer, param = _answer_guide(state, params.guide, tools)
    marks = ThinkTokens.of(state.loaded.tokenizer)
    if marks is None or thinking.enable is False or (answer is None and thinking.budget is None):
        guide = answer  # a budget is an upper limit: it asks nothing of a model that does not think
    else:
        param = param if answer is not None else thinking.budget_param
        guide = thinking_guide(
            state.loaded.tokenizer,
            marks,
            thinking=marks.left_open(prompt_ids),
            budget=thinking.budget,
            answer=answer,
            end_ids=frozenset(state.loaded.engine.runner.model.config.end_token_ids),
        )
    if guide is not None and beams:
        raise RequestError(f"{param} cannot be used with use_beam_search", param=param)
    return replace(params, guide=guide)


def _answer_guide(state: ServerState, content: Guide | None, tools: ToolUse) -> tuple[Guide | None, str]:
    """The guide of what follows the reasoning, and the field that asks for it."""
    if tools.mode == "required":
        if content is not None:
            raise RequestError(
                "tool_choice cannot demand a call where the form of the content is given", param="tool_choice"
            )
        return _calls(state, tools, "tool_choice"), "tool_choice"
    if tools.mode == "none" or not (tools.strict or content is not None):
        return content, "response_format"
    opening = state.loaded.tokenizer.added_tokens.get(OPENING)
    if opening is None and tools.strict:
        raise RequestError(f"this model has no token {OPENING}, so strict cannot be kept; leave it out", param="tools")
    if opening is None:
        return content, "response_format"
    return CallsGuide(opening, content, _calls(state, tools, "strict")), "response_format" if content else "tools"


def _calls(state: ServerState, tools: ToolUse, what: str) -> Guide:
    if find_spec("llguidance") is None:
        missing = library_is_missing(what)
        missing.param = "tools" if what == "strict" else what
        raise missing
    known = [
        {**tool, "function": tool["function"] | {"strict": tool["function"]["name"] in tools.strict}}
        for tool in tools.shown
    ]
    number = next((i for i, tool in enumerate(known) if tool["function"]["name"] == tools.name), None)
    if number is None:
        return tool_call_guide(state.loaded.guides, known, parallel=tools.parallel)
    try:
        return tool_call_guide(state.loaded.guides, [known[number]], parallel=tools.parallel)
    except RequestError as error:  # the tool that was chosen is the only one there
        error.message, error.param = (
            text.replace("tools[0]", f"tools[{number}]") for text in (error.message, error.param or "")
        )
        raise
