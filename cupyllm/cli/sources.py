"""Who answers `chat` and `generate`: a model in this process, or any server that speaks the OpenAI API."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from cupyllm.answer_stream import AnswerPiece
from cupyllm.cli.remote import RemoteSource
from cupyllm.config import EngineConfig, ServerConfig, load_config, parse_overrides
from cupyllm.errors import ConfigError
from cupyllm.sampling import SamplingParams

Messages = list[dict[str, Any]]
# What may be set of SamplingParams by name; the fields of a request have the same names.
SETTINGS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "max_tokens",
    "seed",
    "stop",
)
# `seed` is what it is in a request, and threads of other keys are the server's business.
_CONFIG_KEYS = tuple(field.name for field in dataclasses.fields(EngineConfig) if field.name not in ("model", "seed"))


class Source(Protocol):
    """Answers conversations and continues texts; pieces come as they are written."""

    name: str
    raises_on_interrupt: bool  # Ctrl-C may raise in the middle of it, because it only waits

    def answer(self, prompt: str | Messages, settings: dict[str, Any]) -> Iterator[AnswerPiece]:
        """Raises CupyllmError; closing the iterator ends the answer."""


class LocalSource:
    """A model in this process."""

    raises_on_interrupt = False

    def __init__(self, config: EngineConfig) -> None:
        from cupyllm.llm import LLM

        values = {field.name: getattr(config, field.name) for field in dataclasses.fields(EngineConfig)}
        self._llm = LLM(**values, show_progress=sys.stderr.isatty())
        self.name = f"{config.model} on {self._llm.engine.ops.name}"

    def answer(self, prompt: str | Messages, settings: dict[str, Any]) -> Iterator[AnswerPiece]:
        return self._llm.stream(prompt, SamplingParams(**settings))


def add_source_options(parser: argparse.ArgumentParser) -> None:
    """Describe who answers, and how; `make_source` and `read_settings` read it."""
    who = parser.add_argument_group("who answers: a model here, or with --url a server")
    who.add_argument("--model", metavar="MODEL", help='a folder, "demo" or a hub name; of a server the model\'s name')
    who.add_argument("--url", metavar="URL", help="a server that speaks the OpenAI API, such as http://127.0.0.1:8000")
    who.add_argument(
        "--api-key-env",
        metavar="NAME",
        default="CUPYLLM_API_KEY",
        help="environment variable with the key for --url (default CUPYLLM_API_KEY)",
    )
    who.add_argument("--config", metavar="FILE", type=Path, help="a config file, for a model here")
    how = parser.add_argument_group("how it answers, as in a request")
    for name in SETTINGS:
        how.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, metavar="VALUE")
    keys = parser.add_argument_group("config keys, for a model here (docs/configuration.md)")
    for name in _CONFIG_KEYS:
        keys.add_argument(f"--{name}", f"--{name.replace('_', '-')}", dest=name, metavar="VALUE")


def make_source(arguments: argparse.Namespace) -> Source:
    """Load the model, or find the server's. Raises CupyllmError."""
    given = {key: getattr(arguments, key) for key in _CONFIG_KEYS if getattr(arguments, key) is not None}
    if arguments.url is not None:
        if given or arguments.config:
            name = "config" if arguments.config else next(iter(given))
            raise ConfigError(f"--{name} is for a model here; with --url the server decides it")
        keys = os.environ.get(arguments.api_key_env, "").split(",")
        return RemoteSource(arguments.url, arguments.model, keys[0].strip() or None)
    words = [f"--{key}={value}" for key, value in given.items()]
    words += [f"--model={arguments.model}"] * (arguments.model is not None)
    return LocalSource(load_config(ServerConfig, arguments.config, parse_overrides(ServerConfig, words)))


def read_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings of the command line. Raises RequestError or ConfigError naming one that is wrong."""
    settings: dict[str, Any] = {}
    for name in SETTINGS:
        if getattr(arguments, name) is not None:
            settings = with_setting(settings, name, getattr(arguments, name))
    return settings


def with_setting(settings: dict[str, Any], name: str, text: str) -> dict[str, Any]:
    """The settings with another one, read as JSON or else as text; "default" takes one away.

    Raises RequestError or ConfigError for one that does not exist or cannot have the value.
    """
    if name not in SETTINGS:
        raise ConfigError(f"there is no setting {name!r}; there are {', '.join(SETTINGS)}")
    if text == "default":
        return {key: value for key, value in settings.items() if key != name}
    try:
        value = text if name == "stop" and text[0] not in '["' else json.loads(text)
    except ValueError:
        value = text
    changed = settings | {name: value}
    SamplingParams(**changed)
    return changed
