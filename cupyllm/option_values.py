"""Options of a command line that stay text until they are used, so that a wrong one is refused in one line."""

from __future__ import annotations

import argparse
import math

from cupyllm.errors import ConfigError


def whole_number(arguments: argparse.Namespace, name: str, default: int = 0, *, least: int = 1) -> int:
    """An option as a whole number; the default where it is not given."""
    text = getattr(arguments, name)
    if text is None:
        return default
    if not text.isascii() or not text.isdigit() or len(text) > 18 or int(text) < least:
        raise ConfigError(f"{flag(name)} is {text!r}: expected a whole number of {least} or more")
    return int(text)


def number(arguments: argparse.Namespace, name: str, *, zero: bool = False, most: float = math.inf) -> float:
    """An option as a finite number above 0, or of 0 too."""
    text = getattr(arguments, name)
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and (value > 0 or (zero and value == 0)) and value <= most):
        at_most = "" if most == math.inf else f" and at most {most:g}"
        raise ConfigError(
            f"{flag(name)} is {text!r}: expected a number {'of 0 or more' if zero else 'above 0'}{at_most}"
        )
    return value


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")
