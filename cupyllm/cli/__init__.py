"""The command line `python -m cupyllm SUBCOMMAND ...`; the server has its own, `python server.py`.

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

from cupyllm.errors import CupyllmError

_EXAMPLES = """\
examples:
  python -m cupyllm kernels             the CUDA kernels, and what each is for
  python -m cupyllm kernels show gemv   one kernel's source, which explains itself at its top
  python -m cupyllm kernels run gemv    the same kernel on this CPU: bytes moved, conflicts, error against NumPy
  python -m cupyllm gpu-check --quick   on a GPU: are the kernels right there, and how fast are they
"""


def subcommands() -> tuple[ModuleType, ...]:
    """The modules of all subcommands, in the order of the help."""
    from cupyllm.cli import gpu_check, kernels, simulate

    return kernels, simulate, gpu_check


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="python -m cupyllm",
        description="Tools around the engine. To serve a model: python server.py --help",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parsers = parser.add_subparsers(title="subcommands", metavar="SUBCOMMAND", required=True)
    for module in subcommands():
        module.add_parser(parsers)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Run a command line; returns its exit code: 2 after one line on standard error that says what is wrong."""
    parsed = make_parser().parse_args(arguments)
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
