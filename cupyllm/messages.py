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
from typing import Any, NoReturn

from cupyllm.errors import RequestError

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_KEYS_OF_EVERY_ROLE = frozenset({"role", "content", "name"})
_MORE_KEYS = {"assistant": frozenset({"reasoning_content", "tool_calls"}), "tool": frozenset({"tool_call_id"})}
_EMPTY_MEANS_ABSENT = ("tool_calls", "annotations")


def normalise_messages(messages: object) -> list[dict[str, Any]]:
    """Fresh messages for a chat template; the given ones are left as they are.

    Raises RequestError, its `param` such as "messages[2].content", for anything that the rules above do not allow.
    """
    if not isinstance(messages, (list, tuple)):
        _refuse("messages", f"must be a list of messages, not {_kind(messages)}")
    if not messages:
        _refuse("messages", "must hold at least one message")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(value: object, path: str) -> dict[str, Any]:
    given = _object(value, path)
    given = {key: item for key, item in given.items() if not (key in _EMPTY_MEANS_ABSENT and item == [])}
    role = _ROLES.get(_text(given, "role", path))
    if role is None:
        _refuse(f"{path}.role", f"is {given['role']!r}; use one of: {', '.join(_ROLES)}")
    _only_keys(given, _KEYS_OF_EVERY_ROLE | _MORE_KEYS.get(role, frozenset()), path, f"a message of role {role}")
    message: dict[str, Any] = {"role": role, "content": _content(given, path)}
    for key in ("name", "reasoning_content", "tool_call_id"):
        if key in given:
            message[key] = _text(given, key, path)
    if "tool_calls" in given:
        calls = _list(given["tool_calls"], f"{path}.tool_calls")
        message["tool_calls"] = [_tool_call(call, f"{path}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return message


def _content(message: dict[str, Any], path: str) -> str:
    path_of_content = f"{path}.content"
    content = message.get("content")
    if content is None:
        if "tool_calls" in message:
            return ""
        _refuse(path_of_content, "is missing or null; only an assistant message with tool_calls may leave it out")
    if isinstance(content, str):
        return _text(message, "content", path)
    parts = _list(content, path_of_content)
    if not parts:
        _refuse(path_of_content, "must hold at least one part")
    return "".join(_text_part(part, f"{path_of_content}[{i}]") for i, part in enumerate(parts))


def _text_part(value: object, path: str) -> str:
    part = _object(value, path)
    kind = _text(part, "type", path)
    if kind != "text":
        _refuse(f"{path}.type", f"is {kind!r}; this model takes parts of type 'text' only")
    _only_keys(part, frozenset({"type", "text"}), path, "a text part")
    return _text(part, "text", path)


def _tool_call(value: object, path: str) -> dict[str, Any]:
    given = _object(value, path)
    _only_keys(given, frozenset({"id", "index", "type", "function"}), path, "a tool call")
    if given.get("type", "function") != "function":
        _refuse(f"{path}.type", f"is {given['type']!r}; only 'function' is supported")
    path_of_function = f"{path}.function"
    function = _object(given.get("function"), path_of_function)
    _only_keys(function, frozenset({"name", "arguments"}), path_of_function, "the function of a tool call")
    name = _text(function, "name", path_of_function)
    if not name:
        _refuse(f"{path_of_function}.name", "must not be empty")
    arguments = _arguments(function.get("arguments"), f"{path_of_function}.arguments")
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    if "id" in given:
        call["id"] = _text(given, "id", path)
    return call


def _arguments(value: object, path: str) -> dict[str, Any]:
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        try:
            value = json.loads(value, parse_float=_finite, parse_constant=_finite)
        except (ValueError, RecursionError) as error:
            _refuse(path, f"is not JSON: {error}")
    if not isinstance(value, dict):
        _refuse(path, f"must be a JSON object, not {_kind(value)}")
    return value


def _finite(literal: str) -> float:
    number = float(literal)
    if not math.isfinite(number):
        raise ValueError(f"{literal} is not a finite number")
    return number


def _object(value: object, path: str) -> dict[str, Any]:
    """The object without its null values."""
    if not isinstance(value, dict):
        _refuse(path, f"must be an object, not {_kind(value)}")
    return {key: item for key, item in value.items() if item is not None}


def _list(value: object, path: str) -> list[object]:
    if not isinstance(value, list):
        _refuse(path, f"must be a list, not {_kind(value)}")
    return value


def _text(values: dict[str, Any], key: str, path: str) -> str:
    value = values.get(key)
    if not isinstance(value, str):
        _refuse(f"{path}.{key}", "is missing" if value is None else f"must be a string, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        _refuse(f"{path}.{key}", f"holds the lone surrogate U+{ord(value[error.start]):04X}, which is not a character")
    return value


def _only_keys(values: dict[str, Any], known: frozenset[str], path: str, of_what: str) -> None:
    for key in values:
        if key not in known:
            _refuse(f"{path}.{key}", f"is not supported in {of_what}; supported: {', '.join(sorted(known))}")


def _kind(value: object) -> str:
    """What JSON calls the value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else f"a {type(value).__name__}")


def _refuse(path: str, problem: str) -> NoReturn:
    raise RequestError(f"{path} {problem}", param=path)
