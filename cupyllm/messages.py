"""OpenAI chat messages, checked and brought into the one form that chat templates take.

The rules; whatever they do not allow is refused with the path of the value at fault, and nothing is dropped silently:

- There is at least one message. Every message is an object with a `role`: system, developer (the same as system), user,
  assistant or tool.
- A key whose value is null counts as absent, and so does an empty `tool_calls` or `annotations` list.
- `content` is a string, or a list of parts {"type": "text", "text": ...} whose texts are joined with nothing between.
  Only an assistant message with tool calls may leave it out; it is then empty. "" is allowed everywhere.
- `name` is a string. Whether the model sees it is the template's decision; Qwen's templates do not show it.
- An assistant message may also have `reasoning_content`, a string (Qwen3's template shows that of the current turn),
  and `tool_calls`: objects of type "function" with `id`, `index` and `function`: {"name", "arguments"}.
- `arguments` is a JSON object or a string that holds one, and reaches the template as an object, because the template
  writes JSON itself. "", null and an absent key mean {}. NaN, Infinity and numbers beyond a float's range are refused.
- A tool message may have `tool_call_id`, a string. Qwen's templates tell results apart by their order alone.
"""

from __future__ import annotations

import json
import math
from typing import Any

from cupyllm.json_checks import as_list, as_object, kind_of, only_keys, refuse, text_of

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KEYS_OF_EVERY_ROLE = frozenset({"role", "content", "name"})
_MORE_KEYS = {"assistant": frozenset({"reasoning_content", "tool_calls"}), "tool": frozenset({"tool_call_id"})}
_EMPTY_MEANS_ABSENT = ("tool_calls", "annotations")


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """Fresh messages for a chat template; the given ones are left as they are.

    Raises RequestError, its `param` such as "messages[2].content", for anything that the rules above do not allow.
    """
    if not isinstance(messages, (list, tuple)):
        refuse("messages", f"must be a list of messages, not {kind_of(messages)}")
    if not messages:
        refuse("messages", "must hold at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(value: object, path: str) -> dict[str, Any]:
    given = as_object(value, path)
    given = {key: item for key, item in given.items() if not (key in _EMPTY_MEANS_ABSENT and item == [])}
    role = _ROLES.get(text_of(given, "role", path))
    if role is None:
        refuse(f"{path}.role", f"is {given['role']!r}; use one of: {', '.join(_ROLES)}")
    only_keys(given, _KEYS_OF_EVERY_ROLE | _MORE_KEYS.get(role, frozenset()), path, f"a message of role {role}")
    message: dict[str, Any] = {"role": role, "content": _content(given, path)}
    for key in ("name", "reasoning_content", "tool_call_id"):
        if key in given:
            message[key] = text_of(given, key, path)
    if "tool_calls" in given:
        calls = as_list(given["tool_calls"], f"{path}.tool_calls")
        message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def _content(message: dict[str, Any], path: str) -> str:
    path_of_content = f"{path}.content"
    content = message.get("content")
    if content is None:
        if "tool_calls" in message:
            return ""
        refuse(path_of_content, "is missing or null; only an assistant message with tool_calls may leave it out")
    if isinstance(content, str):
        return text_of(message, "content", path)
    parts = as_list(content, path_of_content)
    if not parts:
        refuse(path_of_content, "must hold at least one part")
    return "".join(_text_part(part, f"{path_of_content}[{i}]") for i, part in enumerate(parts))


def _text_part(value: object, path: str) -> str:
    part = as_object(value, path)
    kind = text_of(part, "type", path)
    if kind != "text":
        refuse(f"{path}.type", f"is {kind!r}; this model takes parts of type 'text' only")
    only_keys(part, frozenset({"type", "text"}), path, "a text part")
    return text_of(part, "text", path)


def _tool_call(value: object, path: str) -> dict[str, Any]:
    given = as_object(value, path)
    only_keys(given, frozenset({"id", "index", "type", "function"}), path, "a tool call")
    if given.get("type", "function") != "function":
        refuse(f"{path}.type", f"is {given['type']!r}; only 'function' is supported")
    path_of_function = f"{path}.function"
    function = as_object(given.get("function"), path_of_function)
    only_keys(function, frozenset({"name", "arguments"}), path_of_function, "the function of a tool call")
    name = text_of(function, "name", path_of_function)
    if not name:
        refuse(f"{path_of_function}.name", "must not be empty")
    arguments = _arguments(function.get("arguments"), f"{path_of_function}.arguments")
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if "id" in given:
        call["id"] = text_of(given, "id", path)
    return call


def _arguments(value: object, path: str) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            refuse(path, f"is not JSON: {error}")
    if not isinstance(value, dict):
        refuse(path, f"must be a JSON object, not {kind_of(value)}")
    return value


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{literal} is not a finite number")
    return number
