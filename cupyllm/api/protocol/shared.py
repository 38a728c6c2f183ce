"""What chat and text completions share: how a body is read, the fields of both, and how they become SamplingParams.

Every field stands in a model below with one of three fates, and docs/api.md has the same table:

    honoured                 a plain field
    accepted, no effect      marked NoEffect: it cannot change the answer, clients send it all the same
    not supported yet        marked NotYet: only values that ask for nothing are accepted

null counts as absent everywhere. Types are strict: "5", true and 1.5 are not whole numbers. Ranges are checked where
the values are used (SamplingParams, Engine.check), so that a program that uses LLM gets the same errors.
"""

from __future__ import annotations

import difflib
import logging
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    model_validator,
)

from cupyllm.api.protocol.structured import Choices, JsonSchema, ResponseFormat, StructuredOutputs
from cupyllm.errors import RequestError
from cupyllm.sampling import MAX_LOGIT_BIASES, MAX_LOGPROBS, MAX_STOP_STRINGS, SamplingParams

log = logging.getLogger(__name__)

MAX_SALT_CHARACTERS = 256
# The fields that have the same name and meaning in SamplingParams.
_SAMPLING_FIELDS = (
    *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("logit_bias", "allowed_token_ids", "bad_words", "seed", "n", "min_tokens", "ignore_eos"),
    *("stop", "include_stop_str_in_output", "stop_token_ids", "prompt_logprobs"),
)


@dataclass(frozen=True, eq=False)  # typing caches Annotated by equality, and (0,) equals (False,)
class NotYet:
    """Marks a field that is not supported yet. Values in `neutral` ask for nothing and are accepted.

    `instead` names the field that does what this one did.
    """

    neutral: tuple[Any, ...] = ()
    instead: str = ""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"enum": [*self.neutral, None], "description": "not supported yet: only what asks for nothing"}


def asks_for_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a value is one of `neutral`; 0 and 0.0 are the same, but not false."""
    return (isinstance(value, bool), value) in [(isinstance(same, bool), same) for same in neutral]


@dataclass(frozen=True)
class NoEffect:
    """Marks a field that is accepted and changes nothing."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {"description": "accepted, without effect"}


@dataclass(frozen=True)
class ShownAs:
    """Marks a field that is checked elsewhere, and gives the type that says what is accepted there."""

    kind: Any

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        shown: dict[str, Any] = handler(TypeAdapter(self.kind).core_schema)
        return shown


# Of a million wrong items only the first is looked at: pydantic would make an error of each.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Ignored = Annotated[Any, NoEffect()]
StopStrings = Annotated[
    Any,
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "maxItems": MAX_STOP_STRINGS},
            ]
        }
    ),
]
EarlyStopping = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"const": "never"}]})]


LogitBias = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "patternProperties": {"^[0-9]{1,10}$": {"type": "number", "minimum": -100, "maximum": 100}},
            "additionalProperties": False,
            "maxProperties": MAX_LOGIT_BIASES,
        }
    ),
]


class StrictModel(BaseModel):
    """A JSON object with known keys only and no conversions between types."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """Of many unknown keys one is enough to be refused by."""
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        unknown = next(name for name in value if name not in cls.model_fields)
        return {name: item for name, item in value.items() if name in cls.model_fields or name == unknown}


class StreamOptions(StrictModel):
    """`include_usage`: one more chunk at the end of a stream, with the token counts. With `continuous_usage_stats`, as
    vLLM has it, every chunk has those so far.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Ignored = None


class SamplingFields(StrictModel):
    """The fields that say how an answer is generated, on every route that generates."""

    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: LogitBias = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: StopStrings = None
    include_stop_str_in_output: bool = False
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool = False
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    structured_outputs: Annotated[Any, ShownAs(StructuredOutputs)] = None
    guided_json: Annotated[Any, ShownAs(JsonSchema)] = None
    guided_regex: str | None = None
    guided_choice: Annotated[Any, ShownAs(Choices)] = None
    guided_grammar: str | None = None


class SharedRequest(SamplingFields):
    """The fields that /v1/chat/completions and /v1/completions have in common."""

    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    return_token_ids: bool = False
    return_timings: bool = False
    n: int = 1
    use_beam_search: bool = False
    beam_width: int | None = None
    length_penalty: float | None = None
    early_stopping: EarlyStopping = None
    response_format: Annotated[Any, ShownAs(ResponseFormat)] = None

    user: Ignored = None
    metadata: Ignored = None
    store: Ignored = None
    service_tier: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    prompt_cache_retention: Ignored = None

    @property
    def output_limit(self) -> int | None:
        """max_completion_tokens, else max_tokens, else None."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def continuous_usage(self) -> bool:
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_logprobs(self) -> int | None:
        """How many of the most likely tokens are wanted beside each chosen one; None when no log-probabilities are."""
        return None

    def sampling_params(self, max_tokens: int | None) -> SamplingParams:
        """The sampling the request asks for. Raises RequestError naming the field."""
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs cannot be used with stream", param="prompt_logprobs")
        given = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        return SamplingParams(**given, max_tokens=max_tokens, logprobs=self.num_logprobs)


RequestT = TypeVar("RequestT", bound=StrictModel)


def read_request(kind: type[RequestT], body: dict[str, Any], *, strict: bool) -> RequestT:
    """Check a JSON object against a model. Raises RequestError, its `param` the field at fault.

    Unknown fields are refused, or, when not `strict`, dropped and logged.
    """
    fields = {name: value for name, value in body.items() if value is not None}
    unknown = [name for name in fields if name not in kind.model_fields]
    if unknown and strict:
        raise RequestError(f"Unrecognized request argument supplied: {_quote_unknown(unknown[0], kind)}")
    for name in unknown:
        log.info("ignored the unknown field %.64r", name)
        del fields[name]
    for name, value in fields.items():
        for mark in kind.model_fields[name].metadata:
            if isinstance(mark, NotYet) and not asks_for_nothing(value, mark.neutral):
                raise RequestError(_not_supported(name, mark), param=name)
    try:
        request = kind.model_validate(fields)
    except ValidationError as error:
        raise as_request_error(error) from None
    if isinstance(request, SharedRequest) and request.stream_options is not None and not request.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")
    return request


# pydantic's name of a problem -> ours; braces stand for the limit that was crossed.
_EXPECTED = {
    "missing": "is required",
    "string_type": "must be a string",
    "string_unicode": "must not hold half of a surrogate pair",
    "string_too_short": "must have {min_length} or more characters",
    "string_too_long": "must have at most {max_length} characters",
    "greater_than_equal": "must be {ge} or more",
    "less_than": "must be below {lt}",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "model_type": "must be an object",
    "extra_forbidden": "is not known",
}


def as_request_error(error: ValidationError, path: str = "") -> RequestError:
    """The first of pydantic's complaints about the object at `path`, "" for the body."""
    first = error.errors(include_url=False, include_input=False)[0]
    for part in first["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part[:64]}" if path else part
    if first["type"] in _EXPECTED:
        expected = _EXPECTED[first["type"]].format(**first.get("ctx", {}))
    else:
        expected = "cannot be used: " + first["msg"]
    return RequestError(f"{path} {expected}", param=path)


def _quote_unknown(name: str, kind: type[StrictModel]) -> str:
    near = difflib.get_close_matches(name[:64], kind.model_fields, n=1)
    return name[:64] + (f"; did you mean {near[0]}?" if near else "")


def _not_supported(name: str, mark: NotYet) -> str:
    accepted = f"; only {mark.neutral[0]!r} is accepted" if mark.neutral else ""
    return f"{name} is not supported; use {mark.instead}" if mark.instead else f"{name} is not supported yet{accepted}"
