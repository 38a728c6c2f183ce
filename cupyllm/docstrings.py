"""The meanings of a class's fields, as its docstring lists them: one text for readers, --help and /openapi.json."""

from __future__ import annotations

import re


def field_meanings(kind: type) -> dict[str, str]:
    """Field -> meaning, from lines such as `    host, port   where to listen` and deeper ones that continue them."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in (kind.__doc__ or "").splitlines():
        entry = re.fullmatch(r" {4}(\w+(?:, \w+)*) +(.+)", line) if not line.startswith(" " * 5) else None
        if entry is not None:
            names = entry.group(1).split(", ")
            found |= dict.fromkeys(names, entry.group(2).strip())
        elif line.startswith(" " * 5):
            found |= {name: f"{found[name]} {line.strip()}" for name in names}
        elif line.strip():
            names = []
    return found
