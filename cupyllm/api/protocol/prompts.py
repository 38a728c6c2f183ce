"""The four forms in which a request gives texts: one or many, as text or as token ids."""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from pydantic import WithJsonSchema

from cupyllm.errors import RequestError

_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
Prompts = Annotated[Any, WithJsonSchema(_PROMPT_SCHEMA)]


def read_prompts(value: object, param: str) -> list[str | list[int]]:
    """The texts in field `param`. Raises RequestError naming the place of what is none."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        _refuse(param, param, "must be a string, a list of strings, a list of token ids, or a list of those")
    if not value:
        _refuse(param, param, "must not be an empty list")
    if isinstance(value[0], str):
        return [_as_text(item, place, param) for place, item in enumerate(value)]
    if isinstance(value[0], list):
        return [_as_ids(item, f"{param}[{place}]", param) for place, item in enumerate(value)]
    return [_as_ids(value, param, param)]


def _as_text(item: Any, place: int, param: str) -> str:
    if not isinstance(item, str):
        _refuse(param, f"{param}[{place}]", f"must be a string, as {param}[0] is")
    return item


def _as_ids(item: Any, place: str, param: str) -> list[int]:
    if not isinstance(item, list):
        _refuse(param, place, f"must be a list of token ids, as {param}[0] is")
    for position, token_id in enumerate(item):
        if type(token_id) is not int:
            _refuse(param, f"{place}[{position}]", "must be a token id: a whole number")
    return item


def _refuse(param: str, place: str, problem: str) -> NoReturn:
    raise RequestError(f"{place} {problem}", param=param)
