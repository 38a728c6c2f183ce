"""JSON answers that may hold millions of numbers, written a little at a time.

Python's json writes a value in one go and lets no other thread run meanwhile, not even the event loop's: a million
numbers take a tenth of a second, and as long again where they are not whole.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response

_ITEMS_AT_ONCE = 1024


def large_json_response(body: dict[str, Any]) -> Response:
    """What errors.json_response gives for the same body. Takes time: not for the event loop."""
    return Response(_text_of(body), media_type="application/json")


def _text_of(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {_text_of(item)}" for key, item in value.items()) + "}"
    if not isinstance(value, list):
        return json.dumps(value, allow_nan=False)
    if value and isinstance(value[0], dict | list):
        return "[" + ", ".join(map(_text_of, value)) + "]"
    starts = range(0, len(value), _ITEMS_AT_ONCE)
    pieces = (json.dumps(value[start : start + _ITEMS_AT_ONCE], allow_nan=False)[1:-1] for start in starts)
    return "[" + ", ".join(pieces) + "]"
