"""Text for prompts of a wanted length, and the bodies of requests.

The length is that in words, every one a single token with the space before it in the vocabularies of Qwen, GPT-4 and
Llama 3; the server's own count of the tokens is kept with the outcome, and templates add to it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cupyllm.simulator.workload import Request

_MOST_USED_NOUNS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education"
)
WORDS = tuple(_MOST_USED_NOUNS.split())
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


@dataclass(frozen=True)
class BodyStyle:
    """How requests are written. `text`, where given, is the prompt of all; a field of `extra` that is None is left out.

    `endpoint` is a key of `PATHS`. Answers are greedy and go on to their length, unless `extra` says otherwise.
    """

    model: str
    endpoint: str = "chat"
    text: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def request_body(request: Request, style: BodyStyle, *, seed: int, number: int) -> bytes:
    """The JSON of a streamed request, the same for the same arguments."""
    text = prompt_text(request, seed=seed, number=number) if style.text is None else style.text
    prompt = {"messages": [{"role": "user", "content": text}]} if style.endpoint == "chat" else {"prompt": text}
    body: dict[str, Any] = {
        "model": style.model,
        **prompt,
        "max_tokens": request.output_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **({"priority": request.priority} if request.priority else {}),
        **style.extra,
    }
    return json.dumps({key: value for key, value in body.items() if value is not None}).encode()


def prompt_text(request: Request, *, seed: int, number: int) -> str:
    """Words at random: the request's shared prefix, the same for all that name it, and then its own."""
    shared = _words(f"{seed} prefix {request.prefix}", request.prefix_tokens)
    return " ".join(shared + _words(f"{seed} request {number}", request.prompt_tokens - request.prefix_tokens))


def _words(seed: str, count: int) -> list[str]:
    return random.Random(seed).choices(WORDS, k=count)
