"""A JSON file that must hold one object, read with checks of type and range.

The files of a model folder come from other people's programs: each reader here either returns a value of the type it
promises or raises CheckpointError naming file and key. What the keys mean is the callers' subject.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, cast

from cupyllm.errors import CheckpointError

_MAX_INT = 2**31 - 1  # sizes, positions and token ids are int32 on the device


@dataclass(frozen=True)
class JsonObject:
    """The keys and values of a file, or of an object inside it. A null value counts as an absent one."""

    file: Path
    values: dict[str, Any]
    where: str = ""  # "rope_scaling." for an object inside the file

    def fail(self, key: str, problem: str) -> NoReturn:
        """Raise the CheckpointError that says what is wrong with a key."""
        raise CheckpointError(f"{self.file}: {self.where}{key} {problem}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        """The value or, where it is absent, the default; without a default an absent value is refused."""
        if self.has(key):
            return self.values[key]
        if default is None:
            self.fail(key, "is null" if key in self.values else "is missing")
        return default

    def integer(self, key: str, *, default: int | None = None, at_least: int = 1) -> int:
        value = self.get(key, default)
        if type(value) is not int or not at_least <= value <= _MAX_INT:
            self.fail(key, f"is {value!r}, not a whole number from {at_least} to {_MAX_INT}")
        return value

    def number(
        self,
        key: str,
        *,
        default: float | None = None,
        at_least: float = -math.inf,
        above: float = -math.inf,
        at_most: float = math.inf,
    ) -> float:
        value = self.get(key, default)
        if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
            self.fail(key, f"is {value!r}, not a finite number")
        if not above < value <= at_most or value < at_least:
            self.fail(key, f"is {value!r}, out of range: {max(at_least, above):g} to {at_most:g}")
        return float(value)

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.get(key, default)
        if type(value) is not bool:
            self.fail(key, f"is {value!r}, neither true nor false")
        return value

    def choice(self, key: str, choices: Iterable[str], default: str | None = None) -> str:
        value = self.get(key, default)
        if value not in tuple(choices):
            self.fail(key, f"is {value!r}, which is not supported; supported: {', '.join(choices)}")
        return cast(str, value)


def read_json_object(path: Path) -> JsonObject:
    """The object in a file. Raises CheckpointError when the file is absent, unreadable, not JSON or not an object."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist; a model folder needs this file") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a JSON {type(values).__name__}, not an object")
    return JsonObject(path, values)
