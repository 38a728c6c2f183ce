"""What a caller asks for, as the text of a grammar in llguidance's variant of Lark's syntax.

Nothing is compiled here; compiler.py does that, and its cache knows a grammar by its text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cupyllm.errors import RequestError
from cupyllm.structured.json_schema import check_schema

MAX_SCHEMA_BYTES = 128 * 1024
MAX_GRAMMAR_BYTES = 64 * 1024
MAX_CHOICES = 4096
# Between two parts of a JSON text: one blank, or a line break and an indentation. JSON allows any number of blanks, and
# a model that has nothing to say would write them to the end.
_JSON_BLANKS = r" |\r?\n[ \t]{0,32}"
# Without it the library works out the text that must come next at once, which for `(a{1000}){1000}` takes a second.
NO_FORCING = '%llguidance {"no_forcing": true}\n'
_OPTIONS = re.compile(r"%llguidance\s*\{\s*[^}\s]")


@dataclass(frozen=True)
class Grammar:
    """text: the grammar. param: the request's field it came from, which errors name.

    has_own_lines: the text is the caller's, so that a place in it means something to them.
    """

    text: str
    param: str
    has_own_lines: bool = False


def grammar_of(specs: Iterable[tuple[str, Any, str]]) -> Grammar | None:
    """The grammar of the one spec that is given; None where none is.

    specs are (kind, spec, param), where a spec of None is not given; kinds are "json", "json_object", "regex", "choice"
    and "grammar". Raises RequestError when several are given, and for one that cannot be used.
    """
    given = [one for one in specs if one[1] is not None]
    if not given:
        return None
    (kind, spec, param), *others = given
    if others:
        second = others[0][2]
        raise RequestError(f"{second} cannot be used with {param}: only one can decide", param=second)
    return _MAKERS[kind](spec, param)


def json_schema_grammar(schema: Any, param: str = "json_schema") -> Grammar:
    """JSON that is valid by `schema`, its keys in the schema's order. Raises RequestError for a schema that is not
    accepted: see check_schema.
    """
    return Grammar(f"{NO_FORCING}start: {json_rule(schema, param=param)}\n", param)


def json_rule(schema: Any, *, param: str, lenient: bool = False) -> str:
    """The part of a rule that stands for JSON by `schema`. Raises what json_schema_grammar raises."""
    check_schema(schema, param=param, lenient=lenient)
    if 2 * _num_items(schema) > MAX_SCHEMA_BYTES:  # so that no million of them is written out for nothing
        raise RequestError(f"{param}: the schema has more than {MAX_SCHEMA_BYTES} bytes", param=param)
    options = {"x-guidance": {"whitespace_pattern": _JSON_BLANKS, "lenient": lenient}}
    try:
        text = json.dumps(options | schema, allow_nan=False)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{param} does not hold JSON: {error}", param=param) from None
    if len(text) > MAX_SCHEMA_BYTES:
        raise RequestError(f"{param}: the schema has {len(text)} bytes; at most {MAX_SCHEMA_BYTES}", param=param)
    return f"%json {text}"


def json_object_grammar(wanted: Any = True, param: str = "json_object") -> Grammar:
    """Any JSON object."""
    if wanted is not True:
        raise RequestError(f"{param} must be true, or absent", param=param)
    return json_schema_grammar({"type": "object"}, param)


def regex_grammar(regex: Any, param: str = "regex") -> Grammar:
    """Text that a regular expression matches from its beginning to its end, in the syntax of Rust's regex crate."""
    _check_text(regex, param)
    # A rule's regular expression stands between slashes, on one line.
    escaped = re.sub(r"\\.|/|\n", lambda found: _escaped_for_slashes(found.group()), regex, flags=re.DOTALL)
    return Grammar(f"{NO_FORCING}start: /{escaped}/\n", param)


def choice_grammar(choices: Any, param: str = "choice") -> Grammar:
    """One of several texts."""
    if not isinstance(choices, Sequence) or isinstance(choices, str | bytes) or not 1 <= len(choices) <= MAX_CHOICES:
        raise RequestError(f"{param} must be a list of 1 to {MAX_CHOICES} strings", param=param)
    for choice in choices:
        _check_text(choice, param)
    _check_text("".join(choices), param)
    return Grammar(f"{NO_FORCING}start: CHOICE\nCHOICE: {' | '.join(map(literal, choices))}\n", param)


def user_grammar(text: Any, param: str = "grammar") -> Grammar:
    """A grammar in Lark's syntax, with a rule `start`, or in GBNF, with a rule `root` (llama.cpp, xgrammar)."""
    _check_text(text, param)
    if _OPTIONS.search(text):
        raise RequestError(f"{param}: options of %llguidance are not supported", param=param)
    if "::=" in text:
        return Grammar(NO_FORCING + _lark_of_gbnf(text, param), param)
    return Grammar(f"{text}\n{NO_FORCING}", param, has_own_lines=True)


_MAKERS: Mapping[str, Callable[[Any, str], Grammar]] = {
    "json": json_schema_grammar,
    "json_object": json_object_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": user_grammar,
}


def literal(text: str) -> str:
    """A text as a rule writes it."""
    return json.dumps(text).replace("\x7f", "\\u007f")


def library_is_missing(param: str) -> RequestError:
    return RequestError(f"{param} needs `pip install 'cupyllm[structured]'`", param=param)


def _escaped_for_slashes(part: str) -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(part, part)


def _check_text(text: Any, param: str) -> None:
    if not isinstance(text, str) or not text:
        raise RequestError(f"{param} must be text, and not empty", param=param)
    try:
        length = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{param} must not hold half of a surrogate pair", param=param) from None
    if length > MAX_GRAMMAR_BYTES:
        raise RequestError(f"{param} has {length} bytes; at most {MAX_GRAMMAR_BYTES}", param=param)


def _num_items(value: Any) -> int:
    """How many items all lists and objects of a JSON value hold, or some number above MAX_SCHEMA_BYTES."""
    count, found = 0, [value]
    while found and count <= MAX_SCHEMA_BYTES:
        container = found.pop()
        count += len(container)
        if count <= MAX_SCHEMA_BYTES:
            items = container.values() if isinstance(container, dict) else container
            found += [item for item in items if isinstance(item, dict | list)]
    return count


def _lark_of_gbnf(text: str, param: str) -> str:
    try:
        from llguidance.gbnf_to_lark import gbnf_to_lark
    except ImportError:
        raise library_is_missing(param) from None
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise RequestError(f"{param} is nested too deeply", param=param) from None
    except Exception as error:  # the converter raises plain Exceptions
        raise RequestError(f"{param} cannot be used: {str(error)[:300]}", param=param) from None
