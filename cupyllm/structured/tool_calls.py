"""The grammar of tool calls as Qwen's chat models write them:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Paris"}}
    </tool_call>

(the "Hermes" form of Qwen's chat templates). `<tool_call>` and `</tool_call>` are added tokens of Qwen's vocabularies,
and a grammar has to name such a token; in a vocabulary without them they are ordinary text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from cupyllm.errors import RequestError
from cupyllm.structured.compiler import GuideCompiler
from cupyllm.structured.grammar import MAX_SCHEMA_BYTES, NO_FORCING, Grammar, json_rule, literal
from cupyllm.token_guide import Guide

BEGIN, END = "<tool_call>", "</tool_call>"


def tool_call_guide(
    guides: GuideCompiler, tools: Sequence[dict[str, Any]], *, parallel: bool = True, param: str = "tools"
) -> Guide:
    """The guide of an answer that is one call of one of the tools or, where `parallel`, one or more calls.

    tools are OpenAI's: {"type": "function", "function": {"name", "parameters", "strict"}}; for a named tool_choice,
    that one alone. What a tool's schema says is enforced, but for keywords that cannot be; where `strict` is true these
    are refused. Raises RequestError naming `param`.
    """
    return guides.compile(tool_call_grammar(tools, guides.tokenizer.added_tokens, parallel=parallel, param=param))


def tool_call_grammar(
    tools: Sequence[dict[str, Any]], added_tokens: dict[str, int], *, parallel: bool = True, param: str = "tools"
) -> Grammar:
    """The grammar of `tool_call_guide`. added_tokens are those of the tokenizer: text -> id."""
    if not tools:
        raise RequestError(f"{param} must hold a tool to be called", param=param)
    begin, end = (mark if mark in added_tokens else literal(mark) for mark in (BEGIN, END))
    calls = [f"call_{number}" for number in range(len(tools))]
    rules = [
        f"start: call {'(' + literal(chr(10)) + ' call)*' if parallel else ''}",
        f'call: {begin} "\\n" ({" | ".join(calls)}) "\\n" {end}',
    ]
    for number, (call, tool) in enumerate(zip(calls, tools, strict=True)):
        place = f"{param}[{number}].function"
        function = tool["function"]
        head = f'{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "arguments": '
        arguments = json_rule(_schema(function, place), param=f"{place}.parameters", lenient=not function.get("strict"))
        rules += [f'{call}: {literal(head)} arguments_{number} "}}"', f"arguments_{number}: {arguments}"]
    text = NO_FORCING + "\n".join(rules) + "\n"
    if len(text) > MAX_SCHEMA_BYTES:
        raise RequestError(f"{param}: their schemas have {len(text)} bytes; at most {MAX_SCHEMA_BYTES}", param=param)
    return Grammar(text, param)


def _schema(function: dict[str, Any], place: str) -> dict[str, Any]:
    """The schema of a function's arguments, which are always an object; without parameters, an empty one."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "additionalProperties": False}
    if not isinstance(parameters, dict):
        raise RequestError(f"{place}.parameters must be a JSON schema: an object", param=f"{place}.parameters")
    return {"type": "object"} | parameters
