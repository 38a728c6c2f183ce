"""The options that say which requests come: the same for a simulated engine and for a real server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from cupyllm.errors import ConfigError
from cupyllm.option_values import flag, number, whole_number
from cupyllm.simulator.workload import Shape, Workload, closed_workload, poisson_workload, read_trace

_ARRIVALS = ("trace", "poisson", "concurrency")
_DRAWN_ONLY = ("requests", "prompt_tokens", "output_tokens", "shared_prefix", "priority", "seed")


def add_workload_options(group: Any) -> None:
    """Describe the options to `group` of an argparse parser."""
    group.add_argument("--trace", metavar="FILE", help="requests as JSON lines: arrival_s, prompt_tokens, ...")
    group.add_argument("--poisson", metavar="RATE", help="requests that come at random, RATE a second on average")
    group.add_argument("--concurrency", metavar="C", help="C clients; each sends its next request after an answer")
    group.add_argument("--requests", metavar="N", help="how many requests are drawn (default 100)")
    group.add_argument("--prompt-tokens", metavar="N", help="length of every prompt (default: drawn, chat-like)")
    group.add_argument("--output-tokens", metavar="N", help="length of every answer (default: drawn, chat-like)")
    group.add_argument("--shared-prefix", metavar="N", help="tokens before every prompt that are the same for all")
    group.add_argument("--priority", metavar="SHARE", help="share of requests, 0 to 1, that go first (priority -1)")
    group.add_argument("--seed", metavar="N", help="of the random numbers (default 0)")


def read_workload(arguments: argparse.Namespace) -> Workload:
    """The workload that the options ask for. Raises ConfigError."""
    given = [f"--{name}" for name in _ARRIVALS if getattr(arguments, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) or "none of them"
        raise ConfigError(f"one of --trace, --poisson and --concurrency says which requests come; found {found}")
    if arguments.trace is not None:
        for name in _DRAWN_ONLY:
            if getattr(arguments, name) is not None:
                raise ConfigError(f"{flag(name)} is for requests that are drawn; with --trace the file says it all")
        return read_trace(Path(arguments.trace))
    num_requests, seed = whole_number(arguments, "requests", 100), whole_number(arguments, "seed", 0, least=0)
    if arguments.poisson is not None:
        return poisson_workload(number(arguments, "poisson"), num_requests, _shape(arguments), seed)
    return closed_workload(whole_number(arguments, "concurrency"), num_requests, _shape(arguments), seed)


def _shape(arguments: argparse.Namespace) -> Shape:
    return Shape(
        prompt_tokens=arguments.prompt_tokens and whole_number(arguments, "prompt_tokens"),
        output_tokens=arguments.output_tokens and whole_number(arguments, "output_tokens"),
        shared_prefix=whole_number(arguments, "shared_prefix", 0, least=0),
        urgent_share=0.0 if arguments.priority is None else number(arguments, "priority", zero=True, most=1.0),
    )
