"""The tools that a model may call, checked and in the one form that chat templates take.

A tool is {"type": "function", "function": {"name", "description", "parameters", "strict"}}. `parameters` is a JSON
schema, which the template shows to the model as it stands. `strict` is for the server: the model does not see it.
"""

from __future__ import annotations

import json
import re
from typing import Any

from cupyllm.json_checks import as_list, as_object, only_keys, refuse, text_of

MAX_TOOLS = 128
NAME_PATTERN = "[A-Za-z0-9_-]{1,64}"
_NAME = re.compile(NAME_PATTERN)
_KEYS = frozenset({"name", "description", "parameters", "strict"})


def normalise_tools(tools: object) -> list[dict[str, Any]]:
    """Fresh tools for a chat template; the given ones are left as they are.

    Raises RequestError, its `param` such as "tools[2].function.name", for what is not of the form above, for a name
    that is not 1 to 64 of A-Z, a-z, 0-9, _ and -, for a name that comes twice, and for more than MAX_TOOLS tools.
    """
    given = as_list(tools, "tools")
    if len(given) > MAX_TOOLS:
        refuse("tools", f"may hold at most {MAX_TOOLS}, not {len(given)}")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    names = [function["name"] for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            refuse(f"tools[{i}].function.name", f"is {name!r}, which is the name of another tool, too")
    return [{"type": "function", "function": function} for function in functions]


def strict_names(tools: list[Any]) -> frozenset[str]:
    """The names of the tools, of those that normalise_tools accepted, whose schema is to be kept to the letter."""
    return frozenset(tool["function"]["name"] for tool in tools if tool["function"].get("strict"))


def _function(value: object, path: str) -> dict[str, Any]:
    tool = as_object(value, path)
    kind = text_of(tool, "type", path)
    if kind != "function":
        refuse(f"{path}.type", f"is {kind!r}; only 'function' is supported")
    only_keys(tool, frozenset({"type", "function"}), path, "a tool")
    path += ".function"
    given = as_object(tool.get("function"), path)
    only_keys(given, _KEYS, path, "the function of a tool")
    name = text_of(given, "name", path)
    if not _NAME.fullmatch(name):
        refuse(f"{path}.name", f"is {name[:80]!r}; it must be 1 to 64 of the characters A-Z, a-z, 0-9, _ and -")
    function: dict[str, Any] = {"name": name}
    if "description" in given:
        function["description"] = text_of(given, "description", path)
    if "parameters" in given:
        function["parameters"] = _schema(given["parameters"], f"{path}.parameters")
    if type(given.get("strict", False)) is not bool:
        refuse(f"{path}.strict", "must be true or false")
    return function


def _schema(value: object, path: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        refuse(path, "must be a JSON schema, which is an object")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        refuse(path, f"is not JSON: {error}")
    return value
