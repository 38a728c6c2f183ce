"""Values of a request's JSON, checked one at a time: each has the type it should have, or is refused by its path."""

from __future__ import annotations

from typing import Any, NoReturn

from cupyllm.errors import RequestError


def as_object(value: object, path: str) -> dict[str, Any]:
    """The object without its null values."""
    if not isinstance(value, dict):
        refuse(path, f"must be an object, not {kind_of(value)}")
    return {key: item for key, item in value.items() if item is not None}


def as_list(value: object, path: str) -> list[object]:
    """The value, which is a list."""
    if not isinstance(value, list):
        refuse(path, f"must be a list, not {kind_of(value)}")
    return value


def text_of(values: dict[str, Any], key: str, path: str) -> str:
    """The string under a key of the object at `path`."""
    value = values.get(key)
    if not isinstance(value, str):
        refuse(f"{path}.{key}", "is missing" if value is None else f"must be a string, not {kind_of(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        refuse(f"{path}.{key}", f"holds the lone surrogate U+{ord(value[error.start]):04X}, which is not a character")
    return value


def only_keys(values: dict[str, Any], known: frozenset[str], path: str, of_what: str) -> None:
    """Refuse every other key."""
    for key in values:
        if key not in known:
            refuse(f"{path}.{key}", f"is not supported in {of_what}; supported: {', '.join(sorted(known))}")


def kind_of(value: object) -> str:
    """What JSON calls the value's type."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number" if isinstance(value, (int, float)) else f"a {type(value).__name__}")


def refuse(path: str, problem: str) -> NoReturn:
    """Raise the RequestError that says what is wrong with the value at `path`."""
    raise RequestError(f"{path} {problem}", param=path)
