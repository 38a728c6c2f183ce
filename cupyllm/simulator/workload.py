"""Which requests come, and when: drawn at random by a seed, or read from a file. Knows nothing of engines.

Lengths that are not given are drawn like those of chats: log-normal, with the means that the vLLM paper (Kwon et al.,
2023, figure 11) gives for ShareGPT, 161 prompt and 338 output tokens. The spreads (sigma of the logarithm) are ours.
"""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

from cupyllm.errors import CheckpointError, ConfigError
from cupyllm.json_object import JsonObject
from cupyllm.simulator.cost_model import nearest


@dataclass(frozen=True)
class Request:
    """One request. Those that name the same `prefix` begin with the same `prefix_tokens` tokens."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0
    priority: int = 0  # lower runs first


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival. With `concurrency`, a request comes when fewer than that many are unfinished."""

    requests: tuple[Request, ...]
    concurrency: int | None = None


@dataclass(frozen=True)
class LogNormal:
    """Whole numbers whose logarithm is normal with spread `sigma`; those out of `least` to `most` are moved there."""

    mean: float  # of the values, not of their logarithm
    sigma: float
    least: int
    most: int

    def draw(self, random_source: random.Random) -> int:
        value = random_source.lognormvariate(math.log(self.mean) - self.sigma**2 / 2, self.sigma)
        return min(max(round(value), self.least), self.most)


CHAT_PROMPTS = LogNormal(mean=161, sigma=1.0, least=4, most=4096)
CHAT_OUTPUTS = LogNormal(mean=338, sigma=0.8, least=1, most=4096)


@dataclass(frozen=True)
class Shape:
    """What requests look like. None draws a length; `urgent_share` of them get priority -1.

    `shared_prefix` tokens, the same for all, come before the tokens of each prompt.
    """

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    shared_prefix: int = 0
    urgent_share: float = 0.0


def poisson_workload(rate: float, num_requests: int, shape: Shape, seed: int) -> Workload:
    """Requests that come independently of each other, `rate` a second on average."""
    random_source = random.Random(seed)
    gaps = [random_source.expovariate(rate) for _ in range(num_requests)]
    return Workload(tuple(_draw_request(arrival, shape, random_source) for arrival in itertools.accumulate(gaps)))


def closed_workload(concurrency: int, num_requests: int, shape: Shape, seed: int) -> Workload:
    """`concurrency` clients, each of which sends its next request when its last is answered."""
    random_source = random.Random(seed)
    return Workload(tuple(_draw_request(0.0, shape, random_source) for _ in range(num_requests)), concurrency)


def read_trace(path: Path) -> Workload:
    """Requests from a file of JSON lines, one object a request, its keys the fields of `Request`.

    arrival_s, prompt_tokens and output_tokens must be given. Raises ConfigError naming the line and the key.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path} cannot be read: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"trace {path} holds no requests")
    requests = [_read_request(path, number, line) for number, line in lines]
    return Workload(tuple(sorted(requests, key=lambda request: request.arrival_s)))


class PromptWriter:
    """Makes token ids for requests: equal where a prefix is shared, and nowhere else, so that no hit is an accident."""

    def __init__(self) -> None:
        self._fresh: Iterator[int] = itertools.count()
        self._prefixes: dict[str, list[int]] = {}

    def next_id(self) -> int:
        """A token id that has not been given out before."""
        return next(self._fresh)

    def prompt(self, request: Request) -> list[int]:
        prefix = self._prefixes.setdefault(request.prefix, [])
        prefix.extend(itertools.islice(self._fresh, max(request.prefix_tokens - len(prefix), 0)))
        own = request.prompt_tokens - request.prefix_tokens
        return prefix[: request.prefix_tokens] + list(itertools.islice(self._fresh, own))


def _draw_request(arrival_s: float, shape: Shape, random_source: random.Random) -> Request:
    # All three are drawn in any case, so that fixing one of them leaves the others as they were.
    prompt, output = CHAT_PROMPTS.draw(random_source), CHAT_OUTPUTS.draw(random_source)
    urgent = random_source.random() < shape.urgent_share
    own = prompt if shape.prompt_tokens is None else shape.prompt_tokens
    return Request(
        arrival_s,
        prompt_tokens=shape.shared_prefix + own,
        output_tokens=output if shape.output_tokens is None else shape.output_tokens,
        prefix_tokens=shape.shared_prefix,
        priority=-1 if urgent else 0,
    )


def _read_request(path: Path, number: int, line: str) -> Request:
    where = f"trace {path} line {number}"
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{where} is a JSON {type(values).__name__}, not an object")
    known = [field.name for field in fields(Request)]
    for key in values:
        if key not in known:
            raise ConfigError(f"{where} has an unknown key {key!r}; {nearest(key, known)}")
    try:
        return _check_request(JsonObject(path, values, f"line {number}: "))
    except CheckpointError as error:
        raise ConfigError(f"trace {error}") from None


def _check_request(values: JsonObject) -> Request:
    prompt_tokens = values.integer("prompt_tokens")
    prefix_tokens = values.integer("prefix_tokens", default=0, at_least=0)
    prefix = values.get("prefix", "")
    if not isinstance(prefix, str):
        values.fail("prefix", f"is {prefix!r}, not a name in quotes")
    if prefix_tokens > prompt_tokens:
        values.fail("prefix_tokens", f"is {prefix_tokens}, more than the {prompt_tokens} tokens of the prompt")
    return Request(
        arrival_s=values.number("arrival_s", at_least=0.0),
        prompt_tokens=prompt_tokens,
        output_tokens=values.integer("output_tokens"),
        prefix=prefix,
        prefix_tokens=prefix_tokens,
        priority=values.integer("priority", default=0, at_least=-(2**31)),
    )
