"""Which JSON schemas are accepted: those whose every keyword is enforced or cannot change what is valid.

llguidance refuses the keywords it knows of but cannot enforce, and passes over those it does not know. Here both are
refused by name: a schema that is only half kept would be believed to be kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from cupyllm.errors import RequestError

# The automaton of a multiple has as many states as the number, and of several at once their product.
MAX_MULTIPLE = 10_000

_SCHEMAS_BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_SCHEMAS_IN_LIST = frozenset({"anyOf", "oneOf", "allOf", "prefixItems", "items"})
_ONE_SCHEMA = frozenset({"items", "additionalProperties", "additionalItems"})
_VALUES = frozenset({"type", "enum", "const", "$ref", "required", "pattern", "format", "multipleOf"})
_LIMITS = frozenset(
    {"minProperties", "maxProperties", "minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum"}
)
_BOUNDS = frozenset({"exclusiveMinimum", "exclusiveMaximum"})  # true and false in draft 4, numbers ever since
# They say something about a value, never which values are valid: JSON Schema 2020-12's, and two of OpenAPI.
_OF_SCHEMAS = frozenset({"$schema", "$id", "$anchor", "$comment", "title", "description", "default", "examples"})
_OF_USE = frozenset({"deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "contentSchema"})
_OF_OPENAPI = frozenset({"discriminator", "example"})
_ACCEPTED = frozenset().union(
    _SCHEMAS_BY_NAME, _SCHEMAS_IN_LIST, _ONE_SCHEMA, _VALUES, _LIMITS, _BOUNDS, _OF_SCHEMAS, _OF_USE, _OF_OPENAPI
)
_OPTIONS_OF_THE_LIBRARY = "x-guidance"


def check_schema(schema: Any, *, param: str, lenient: bool = False) -> None:
    """Raise RequestError, naming the keyword, for a schema that is not accepted.

    lenient: keywords that are not enforced are accepted, and whatever they ask for is not kept.
    """
    if not isinstance(schema, dict):
        raise RequestError(f"{param} must hold a JSON schema: an object", param=param)
    multiples = set()
    for path, part in _walk(schema):
        problem = _problem(part, lenient=lenient)
        if problem is not None:
            raise RequestError(f"{param}: the schema's {problem} (at {_shown(path)})", param=param)
        multiples.add(_whole_part(part.get("multipleOf")))
    if math.prod(multiples) > MAX_MULTIPLE:
        raise RequestError(f"{param}: the multipleOf values have a product above {MAX_MULTIPLE}", param=param)


def _walk(schema: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """(path, object) for the schema and every schema inside it. No recursion, so that no depth can end the process."""
    found: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while found:
        path, part = found.pop()
        if not isinstance(part, dict):
            continue
        yield path, part
        for keyword, value in part.items():
            if keyword in _SCHEMAS_BY_NAME and isinstance(value, dict):
                found += [((*path[-4:], keyword, str(name)), inner) for name, inner in value.items()]
            elif keyword in _SCHEMAS_IN_LIST and isinstance(value, list):
                found += [((*path[-4:], keyword), inner) for inner in value]
            elif keyword in _ONE_SCHEMA:
                found.append(((*path[-4:], keyword), value))


def _problem(part: dict[str, Any], *, lenient: bool) -> str | None:
    """What is wrong with a schema, those inside it aside; None if nothing is."""
    for keyword, value in part.items():
        known = lenient or keyword in _ACCEPTED or str(keyword).startswith("x-")
        if not known or keyword == _OPTIONS_OF_THE_LIBRARY:
            return f"keyword {str(keyword)[:64]!r} is not supported"
        if keyword in _BOUNDS and isinstance(value, bool):
            return f"{keyword} must be a number"
    # The library would follow the older way to write a tuple and forget the newer one.
    if "prefixItems" in part and ("additionalItems" in part or isinstance(part.get("items"), list)):
        return "prefixItems goes with items as one schema, not with a list of them or additionalItems"
    return None


def _whole_part(multiple: Any) -> int:
    """12 for 12, 1.2 and 0.012; 1 for what is no number, which the library refuses."""
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not math.isfinite(multiple):
        return 1
    mantissa = f"{multiple:.17g}".lower().split("e")[0]
    return int(mantissa.replace(".", "").replace("-", "")) or 1


def _shown(path: tuple[str, ...]) -> str:
    return ".".join(part[:32] for part in path) or "the top"
