"""The server's command line: `--config FILE`, `--key value` for every config key, `--help`."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from cupyllm.config import EngineConfig, ServerConfig, load_config, parse_overrides
from cupyllm.errors import ConfigError

_USAGE = """\
usage: python server.py [--config FILE] [--key value ...]

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
    meanings = _meanings(EngineConfig) | _meanings(ServerConfig)
    lines = []
    for field in dataclasses.fields(ServerConfig):
        lines.append(f"  --{field.name} (default: {json.dumps(field.default)})\n      {meanings[field.name]}\n")
    return _USAGE + "".join(lines)


def _meanings(kind: type[EngineConfig]) -> dict[str, str]:
    """Key -> meaning, from lines such as `    host, port   where to listen` and the deeper ones that continue them."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (kind.__doc__ or "").splitlines():
        entry = re.fullmatch(r" {4}(\w+(?:, \w+)*) {1,}(.+)", line) if not line.startswith(" " * 5) else None
        if entry is not None:
            names = entry.group(1).split(", ")
            found |= dict.fromkeys(names, entry.group(2).strip())
        elif line.strip():
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
    return found
