"""The command line `python -m cupyllm SUBCOMMAND ...`.

Each subcommand is one module here with two functions: `add_parser(subparsers)` describes its arguments, and sets
`run` to the function that does the work and returns the exit code. Adding one is writing the module and naming it in
`subcommands`.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from cupyllm.cli import serve
from cupyllm.errors import CupyllmError

_EXAMPLES = """\
examples:
  python -m cupyllm chat                talk to the bundled demo model
  python -m cupyllm chat --url http://127.0.0.1:8000      talk to a server
  python -m cupyllm generate "What is a page?"            one answer; also from a pipe
  python -m cupyllm serve --config configs/default.json   what python server.py does
  python -m cupyllm doctor              what this machine can run, and what to install
  python -m cupyllm bench --url http://127.0.0.1:8000     how fast a server is
  python -m cupyllm kernels             the CUDA kernels, and what each is for
  python -m cupyllm kernels show gemv   one kernel's source, which explains itself at its top
  python -m cupyllm kernels run gemv    the same kernel on this CPU: bytes moved, conflicts, error against NumPy
  python -m cupyllm gpu-check --quick   on a GPU: are the kernels right there, and how fast are they
"""


def subcommands() -> tuple[ModuleType, ...]:
    """The modules of all subcommands, in the order of the help."""
    from cupyllm.cli import bench, chat, doctor, generate, gpu_check, kernels, serve, simulate

    return serve, chat, generate, doctor, bench, kernels, simulate, gpu_check


class CommandParser(argparse.ArgumentParser):
    """Says in one line what is wrong, without the usage of some thirty options in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}; {self.prog} --help lists what it takes\n")


def make_parser() -> CommandParser:
    """The parser of the whole command line."""
    parser = CommandParser(
        prog="python -m cupyllm",
        description="Serve a model, talk to one, and look inside.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", dest="subcommand", required=True)
    for module in subcommands():
        module.add_parser(parsers)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit code: 2 after one line on standard error that says what is wrong,
    or after the help where there is nothing to run.
    """
    if arguments[:1] == ["serve"]:  # reads its own arguments: argparse cannot pass options on as they are
        return serve.run(arguments[1:])
    parser = make_parser()
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        name = f"{parser.prog} {parsed.subcommand}"
        print(f"error: {name} does not take {unknown[0]!r}; {name} --help lists what it takes", file=sys.stderr)
        return 2
    try:
        code = int(parsed.run(parsed))
        sys.stdout.flush()
    except CupyllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    return code
