"""/v1/responses: the request, and the chat request that asks for the same.

The conversation, the tools and the format of the answer are spelled differently here than in /v1/chat/completions; the
meaning is the same, and so is all that follows. The server keeps nothing: an answer that is to be gone on with comes
back in `input`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

from pydantic import Field

from cupyllm.api.protocol.chat import ChatTemplateKwargs
from cupyllm.api.protocol.response_input import Conversation, InputItem, Json, read_object
from cupyllm.api.protocol.shared import Ignored, NotYet, SamplingFields, ShownAs, StrictModel, Texts
from cupyllm.errors import RequestError
from cupyllm.sampling import MAX_LOGPROBS

_STATELESS = "input for what came before, since this server keeps no responses"

_LOGPROBS = "message.output_text.logprobs"  # what `include` calls them


class FunctionTool(StrictModel):
    """A function that the model may call."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class NamedFunction(StrictModel):
    """The one function that must be called."""

    type: Literal["function"]
    name: str


class AllowedTools(StrictModel):
    """Some of the tools, and whether one of them must be called."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


class TextOptions(StrictModel):
    """`format`: text, any JSON object, or what a JSON schema allows."""

    format: dict[str, Any] | None = None
    verbosity: Ignored = None


class ReasoningOptions(StrictModel):
    """`effort` says how much the model thinks. It is shown in full, so that a summary is not made."""

    effort: str | None = None
    summary: Ignored = None
    generate_summary: Ignored = None
    context: Ignored = None


class ResponseStreamOptions(StrictModel):
    """Nothing of it is needed here."""

    include_obfuscation: Ignored = None


@dataclass(frozen=True)
class ChatForm:
    """A request as a chat request. `names`: what chat calls a text of the conversation -> what it is called here."""

    body: Json
    names: dict[str, str]

    def in_own_names(self, error: RequestError) -> RequestError:
        """An error of the chat request, with the field at fault as this route calls it."""
        for name, own in [*self.names.items(), *_OWN_NAMES]:
            if error.param is not None and error.param.startswith(name):
                param = own + error.param.removeprefix(name)
                error.message = error.message.replace(error.param, param)
                error.param = param
                break
        return error


class ResponsesRequest(SamplingFields):
    """A conversation to be answered, as text or as items."""

    input: Annotated[Any, ShownAs(str | list[InputItem])]
    instructions: Annotated[str | None, Field(description="goes before everything else, as a system message")] = None
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    tools: Annotated[
        list[Any] | None,
        ShownAs(list[FunctionTool | dict[str, Any]] | None),
        Field(description="tools that the server would run are left out: it runs none"),
    ] = None
    tool_choice: Annotated[Any, ShownAs(Literal["none", "auto", "required"] | NamedFunction | AllowedTools | None)] = (
        None
    )
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, Any] | None = None

    chat_template_kwargs: ChatTemplateKwargs | None = None
    thinking_budget: Annotated[int, Field(ge=0)] | None = None
    include: Texts | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    previous_response_id: Annotated[Any, NotYet(instead=_STATELESS)] = None
    conversation: Annotated[Any, NotYet(instead=_STATELESS)] = None
    prompt: Annotated[Any, NotYet()] = None
    background: Annotated[Any, NotYet((False,))] = None
    truncation: Annotated[Any, NotYet(("disabled",))] = None
    context_management: Annotated[Any, NotYet(([],))] = None

    store: Ignored = None
    max_tool_calls: Ignored = None
    user: Ignored = None
    client_metadata: Ignored = None
    moderation: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_options: Ignored = None
    prompt_cache_retention: Ignored = None

    @property
    def wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or []) or bool(self.top_logprobs)

    def as_chat_request(self) -> ChatForm:
        """The chat request that asks for the same. Raises RequestError in this request's own names."""
        conversation = Conversation(self.instructions, self.input)
        names = dict(conversation.names)
        body: Json = {name: getattr(self, name) for name in SamplingFields.model_fields} | {
            "messages": conversation.messages,
            "thinking_budget": self.thinking_budget,
            "max_completion_tokens": self.max_output_tokens,
        }
        if self.chat_template_kwargs is not None:
            body["chat_template_kwargs"] = self.chat_template_kwargs.model_dump(exclude_none=True)
        tools, choice = self._tools_and_choice()
        if tools:
            functions = [{k: v for k, v in tool.items() if k != "type"} for tool in tools.values()]
            body["tools"] = [{"type": "function", "function": function} for function in functions]
            body |= {"tool_choice": choice, "parallel_tool_calls": self.parallel_tool_calls}
            names |= {f"tools[{i}].function": f"tools[{place}]" for i, place in enumerate(tools)}
        if self.text is not None and self.text.format is not None:
            body["response_format"] = _chat_format(self.text.format)
        if self.reasoning is not None:
            body["reasoning_effort"] = self.reasoning.effort
        if self.wants_logprobs:
            body |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        return ChatForm({name: value for name, value in body.items() if value is not None}, names)

    def function_tools(self) -> dict[int, Json]:
        """The tools that the model may be shown, by their place in `tools`."""
        tools = {}
        for place, tool in enumerate(self.tools or []):
            path = f"tools[{place}]"
            if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
                _refuse(path, "must be an object with a type")
            if tool["type"] == "function":
                tools[place] = read_object(FunctionTool, tool, path).model_dump(exclude_none=True)
        return tools

    def _tools_and_choice(self) -> tuple[dict[int, Json], Any]:
        """The tools to be shown, and tool_choice as chat spells it."""
        tools, choice = self.function_tools(), self.tool_choice
        if choice in (None, "none", "auto"):
            return tools, choice
        if not tools:
            _refuse("tool_choice", "needs tools: functions that may be called")
        if choice == "required":
            return tools, choice
        kind = choice.get("type") if isinstance(choice, dict) else None
        if kind == "function":
            name = read_object(NamedFunction, choice, "tool_choice").name
            if name not in [tool["name"] for tool in tools.values()]:
                _refuse("tool_choice.name", f"is {name!r:.80}, which is none of the function tools")
            return tools, {"type": "function", "function": {"name": name}}
        if kind == "allowed_tools":
            allowed = read_object(AllowedTools, choice, "tool_choice")
            names = [tool.get("name") for tool in allowed.tools if tool.get("type") == "function"]
            return {place: tool for place, tool in tools.items() if tool["name"] in names}, allowed.mode
        _refuse("tool_choice", "must be none, auto, required, or an object of type function or allowed_tools")


# chat's names in errors -> this route's
_OWN_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("reasoning_effort", "reasoning.effort"),
    ("max_completion_tokens", "max_output_tokens"),
    ("tool_choice.function", "tool_choice"),
    ("messages", "input"),
)


def _chat_format(given: Json) -> Json:
    if given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {key: value for key, value in given.items() if key != "type"}}


def _refuse(path: str, problem: str) -> NoReturn:
    raise RequestError(f"{path} {problem}", param=path)
