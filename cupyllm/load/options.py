"""A load's command line, and a measurement from beginning to end."""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import sys
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from cupyllm.errors import ConfigError
from cupyllm.load.client import Client, Outcome
from cupyllm.load.connection import Target
from cupyllm.load.generator import Sending, run_load
from cupyllm.load.prompts import PATHS, BodyStyle, request_body
from cupyllm.load.statistics import Goal
from cupyllm.option_values import number, whole_number
from cupyllm.simulator.workload import Workload
from cupyllm.simulator.workload_options import add_workload_options, read_workload

_KEY_ENV = "CUPYLLM_API_KEY"
_GOALS = {"ttft": "time_to_first_token", "tpot": "time_per_output_token", "e2e": "end_to_end"}
_EXTRA_HELP = """more fields of the body, such as '{"temperature": 0.7}'; null leaves one out that is sent otherwise
(ignore_eos, temperature, stream_options)"""
_GOAL_HELP = (
    "what a request must keep to count for goodput: ttft (first token), tpot (per output token), e2e (end to end)"
)


@dataclass(frozen=True)
class Load:
    """What is sent, and how. `warm_up` requests go first and are not counted; `timeout` is in seconds."""

    workload: Workload
    endpoint: str
    text: str | None
    extra: dict[str, Any]
    model: str | None  # None: the first that the server lists
    seed: int
    warm_up: int
    timeout: float
    goal: Goal | None
    api_key: str | None


def add_load_options(parser: argparse.ArgumentParser) -> None:
    """Describe the options of a load. Numbers stay text until `read_load`, which refuses them in one line."""
    add_workload_options(parser.add_argument_group("workload: one of --trace, --poisson and --concurrency"))
    group = parser.add_argument_group("requests")
    group.add_argument("--endpoint", choices=PATHS, default="chat", help="the route (default chat)")
    group.add_argument("--model", metavar="NAME", help="the model's name (default: the first the server lists)")
    group.add_argument("--prompt", metavar="TEXT", help="the prompt of all requests (default: words at random)")
    group.add_argument("--extra", metavar="JSON", help=_EXTRA_HELP)
    group.add_argument("--warm-up", metavar="N", help="requests that go first, uncounted (default 2)")
    group.add_argument("--timeout", metavar="S", help="seconds until a request counts as failed (default 600)")
    group.add_argument("--goal", metavar="NAME=MS,...", help=_GOAL_HELP)
    group.add_argument("--api-key-env", metavar="NAME", help=f"environment variable with the key (default {_KEY_ENV})")


def read_load(arguments: argparse.Namespace) -> Load:
    """The load that the options ask for. Raises ConfigError."""
    given = arguments.api_key_env
    if given is not None and not os.environ.get(given):
        raise ConfigError(f"--api-key-env: the environment variable {given} is not set")
    keys = os.environ.get(given or _KEY_ENV, "").split(",")  # as a server takes them, which has the same variable
    return Load(
        workload=read_workload(arguments),
        endpoint=arguments.endpoint,
        text=arguments.prompt,
        extra=_read_extra(arguments.extra),
        model=arguments.model,
        seed=whole_number(arguments, "seed", 0, least=0),
        warm_up=whole_number(arguments, "warm_up", 2, least=0),
        timeout=600.0 if arguments.timeout is None else number(arguments, "timeout"),
        goal=read_goal(arguments.goal),
        api_key=keys[0].strip() or None,
    )


def _read_extra(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--extra is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"--extra is {text}: expected a JSON object of fields")
    return extra


def read_goal(text: str | None) -> Goal | None:
    """From such as "ttft=500,tpot=50", milliseconds. Raises ConfigError."""
    if text is None:
        return None
    times: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            milliseconds = float(value)
        except ValueError:
            milliseconds = math.nan
        if name not in _GOALS or not 0 < milliseconds < math.inf:
            raise ConfigError(
                f"--goal {part!r}: expected {', '.join(_GOALS)} and milliseconds, such as ttft=500,tpot=50"
            )
        times[_GOALS[name]] = milliseconds / 1e3
    return Goal(**times)


def measure(url: str, load: Load, *, show_progress: bool = False) -> list[Outcome]:
    """Put the load on the server at `url`; the outcomes in the order of the requests. Raises ConfigError."""
    return asyncio.run(_measure(Target.parse(url, load.api_key), load, show_progress))


async def _measure(target: Target, load: Load, show_progress: bool) -> list[Outcome]:
    client = Client(target, timeout=load.timeout)
    style = BodyStyle(load.model or await client.first_model(), load.endpoint, load.text, load.extra)
    sendings = [
        Sending(PATHS[load.endpoint], request_body(request, style, seed=load.seed, number=number), request.arrival_s)
        for number, request in enumerate(load.workload.requests)
    ]
    # Their bodies have numbers of their own: a server that keeps prefixes must not know a counted prompt already.
    first = [
        Sending(PATHS[load.endpoint], request_body(request, style, seed=load.seed, number=-1 - number))
        for number, request in enumerate(load.workload.requests[: load.warm_up])
    ]
    await run_load(client, first, max(1, min(len(first), load.workload.concurrency or 1)))
    with tqdm(total=len(sendings), desc="requests", leave=False, disable=not show_progress, file=sys.stderr) as bar:
        outcomes = await run_load(client, sendings, load.workload.concurrency, lambda outcome: bar.update())
    await client.close()
    return outcomes
