"""The server's command line: `--config FILE`, `--key value` for every config key, `--help`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from cupyllm.config import EngineConfig, ServerConfig, load_config, parse_overrides
from cupyllm.docstrings import field_meanings
from cupyllm.errors import ConfigError

_USAGE = """\
usage: python server.py [--config FILE] [--key value ...]         (or: python -m cupyllm serve ...)

Serves a model over the OpenAI API. Settings come from FILE, a JSON object, and from the command line, which wins.

"""


def read_arguments(arguments: Sequence[str]) -> ServerConfig:
    """The settings that a command line asks for. Raises ConfigError."""
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    path = None
    if "--config" in words:
        place = words.index("--config")
        if place + 1 == len(words):
            raise ConfigError("--config needs a file")
        path = Path(words[place + 1])
        del words[place : place + 2]
    return load_config(ServerConfig, path, parse_overrides(ServerConfig, words))


def help_text() -> str:
    """The usage, and every key with its default and its meaning as the config classes' docstrings give it."""
    meanings = field_meanings(EngineConfig) | field_meanings(ServerConfig)
    lines = []
    for field in dataclasses.fields(ServerConfig):
        lines.append(f"  --{field.name} (default: {json.dumps(field.default)})\n      {meanings[field.name]}\n")
    return _USAGE + "".join(lines)
