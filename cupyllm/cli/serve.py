"""`python -m cupyllm serve`: the server, as `python server.py` starts it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def add_parser(subparsers: Any) -> None:
    """Name the subcommand in the help; its arguments are the config's keys, which the server reads itself."""
    parser = subparsers.add_parser("serve", help="serve a model over the OpenAI API", add_help=False)
    parser.set_defaults(run=lambda arguments: run([]))


def run(arguments: Sequence[str]) -> int:
    """Serve until a signal says stop; returns the exit code."""
    from cupyllm.api.server import main

    return main(arguments)
