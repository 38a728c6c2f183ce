"""Write docs/configuration.md from the config types: python scripts/config_docs.py > docs/configuration.md"""

from __future__ import annotations

import dataclasses
import json
import typing

from cupyllm.config import EngineConfig, ServerConfig, spell_kind
from cupyllm.docstrings import field_meanings

HEAD = """\
# Configuration

A config is one flat JSON object, such as [configs/default.json](../configs/default.json), which holds every key with
its default:

```
python server.py --config configs/default.json --port 8001 --max_decode_batch_size 64
```

Every key can stand in the file and on the command line, which wins. `--max-model-len 4096`, `--max_model_len=4096` and
`--max_model_len 4096` are the same. A value is read as JSON where the key is not a string: `--seed null`,
`--cors_origins '["https://example.com"]'`. An unknown key is an error that names the nearest known one, and a value of
the wrong kind is one that names the key. What `"auto"` became is printed at start, with the reason.

[configs/](../configs) has files for some models. This page is made by scripts/config_docs.py from the types in
[config.py](../cupyllm/config.py).
"""


def main() -> None:
    own = [field for field in dataclasses.fields(ServerConfig) if field.name not in EngineConfig.__dataclass_fields__]
    print(HEAD)
    print("## The engine\n\nFor the server, and by name for `LLM(...)` in a program.\n")
    print(table(EngineConfig, list(dataclasses.fields(EngineConfig))))
    print("\n## The server\n")
    print(table(ServerConfig, own))


def table(kind: type, fields: list[dataclasses.Field[typing.Any]]) -> str:
    """A row for each field: key, default, what it may be, meaning."""
    meanings, hints = field_meanings(kind), typing.get_type_hints(kind)
    rows = ["| key | default | kind | meaning |", "|---|---|---|---|"]
    for field in fields:
        cells = (
            f"`{field.name}`",
            f"`{json.dumps(field.default)}`",
            spell_kind(hints[field.name]),
            meanings[field.name],
        )
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
