"""Which tools are accepted, and what the chat template gets."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from cupyllm.errors import RequestError
from cupyllm.tools import MAX_TOOLS, normalise_tools


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def test_the_template_gets_name_description_and_parameters() -> None:
    schema = {"type": "object", "properties": {"z": {}, "a": {"enum": ["<tool_call>"]}}}
    given = [tool(strict=True, parameters=schema, description="d"), tool(name="g", description=None, strict=None)]
    before = copy.deepcopy(given)
    expected = [tool(description="d", parameters=schema), tool(name="g")]
    assert normalise_tools(given) == expected
    assert list(normalise_tools(given)[0]["function"]) == ["name", "description", "parameters"]
    assert given == before


def test_names_at_the_limit_and_as_many_tools_as_allowed() -> None:
    tools = [tool(name=f"{i}".rjust(64, "_")) for i in range(MAX_TOOLS)]
    assert normalise_tools(tools) == tools
    assert normalise_tools([]) == []


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        ([tool()] * (MAX_TOOLS + 1), "tools"),
        ([None], "tools[0]"),
        ([{"function": {"name": "f"}}], "tools[0].type"),
        ([tool() | {"type": "custom"}], "tools[0].type"),
        ([tool() | {"more": 1}], "tools[0].more"),
        ([{"type": "function"}], "tools[0].function"),
        ([tool(name="f g")], "tools[0].function.name"),
        ([tool(name="x" * 65)], "tools[0].function.name"),
        ([tool(name="f\n")], "tools[0].function.name"),
        ([tool(name=None)], "tools[0].function.name"),
        ([tool(), tool()], "tools[1].function.name"),
        ([tool(more=1)], "tools[0].function.more"),
        ([tool(description=["d"])], "tools[0].function.description"),
        ([tool(description="\ud800")], "tools[0].function.description"),
        ([tool(parameters=[])], "tools[0].function.parameters"),
        ([tool(parameters={"a": ["\ud800"]})], "tools[0].function.parameters"),
        ([tool(parameters={"a": {1}})], "tools[0].function.parameters"),
        ([tool(strict="yes")], "tools[0].function.strict"),
    ],
)
def test_what_is_no_tool_is_refused_by_its_path(tools: Any, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        normalise_tools(tools)
    assert caught.value.param == param
    assert caught.value.message.startswith(f"{param} ")
    assert len(caught.value.message) < 250
