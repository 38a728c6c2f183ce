"""What a request says about tools: which there are, whether one must be called, and whether several may be."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from cupyllm.errors import RequestError
from cupyllm.json_checks import as_object, only_keys, refuse, text_of
from cupyllm.tools import MAX_TOOLS, NAME_PATTERN, normalise_tools, strict_names

FunctionName = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]


class ToolFunction(TypedDict):
    """A function the model may call; `parameters` is a JSON schema of its arguments."""

    name: FunctionName
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]
    strict: NotRequired[bool | None]


class Tool(TypedDict):
    """A tool the model may call. cupyllm/tools.py states the rules, and checks them."""

    type: Literal["function"]
    function: ToolFunction


class ChosenFunction(TypedDict):
    """The name of one of the tools."""

    name: FunctionName


class NamedTool(TypedDict):
    """The tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True)
class ToolUse:
    """The tools of one request.

    shown     what the chat template shows to the model: no tools where none may be called
    strict    the names of those whose schema is to be kept to the letter
    mode      "none": all text is content; "auto": the model decides; "required": it must call
    name      the one function that must be called, where mode is "required" and it was named; one call is then meant
    parallel  whether an answer may hold several calls
    """

    shown: list[dict[str, Any]] = field(default_factory=list)
    strict: frozenset[str] = frozenset()
    mode: Literal["none", "auto", "required"] = "none"
    name: str | None = None
    parallel: bool = True


def read_tool_use(tools: object, choice: object, *, parallel: bool = True) -> ToolUse:
    """`tools`, `tool_choice` and `parallel_tool_calls` of a chat request; None is absent. Raises RequestError."""
    known = [] if tools is None else normalise_tools(tools)
    if choice == "none" or (choice is None and not known):
        return ToolUse()
    if not known:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    assert isinstance(tools, list)
    use = ToolUse(known, strict_names(tools), "auto", parallel=parallel)
    if choice in (None, "auto"):
        return use
    if choice == "required":
        return replace(use, mode="required")
    name = _named(choice)
    if name not in [tool["function"]["name"] for tool in known]:
        refuse("tool_choice.function.name", f"is {name[:80]!r}, which is none of the tools")
    return replace(use, mode="required", name=name, parallel=False)


def _named(choice: object) -> str:
    if isinstance(choice, str):
        refuse("tool_choice", f"is {choice[:80]!r}; use none, auto, required or the name of a function")
    given = as_object(choice, "tool_choice")
    kind = text_of(given, "type", "tool_choice")
    if kind != "function":
        refuse("tool_choice.type", f"is {kind[:80]!r}; only 'function' is supported")
    only_keys(given, frozenset({"type", "function"}), "tool_choice", "tool_choice")
    function = as_object(given.get("function"), "tool_choice.function")
    only_keys(function, frozenset({"name"}), "tool_choice.function", "the function of tool_choice")
    return text_of(function, "name", "tool_choice.function")
