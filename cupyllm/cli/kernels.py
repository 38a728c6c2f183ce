"""`python -m cupyllm kernels`: list the CUDA kernels, show the source of one, run one on this CPU."""

from __future__ import annotations

import argparse
import difflib
import re
import textwrap
from importlib import resources
from typing import Any

from cupyllm.cuda.loader import HEADER
from cupyllm.cuda.nvrtc import kernel_names, launch_module
from cupyllm.errors import ConfigError

_EXAMPLES = """\
examples:
  python -m cupyllm kernels
  python -m cupyllm kernels show rms_norm --with-common
  python -m cupyllm kernels run rms_norm
"""


def add_parser(subparsers: Any) -> None:
    """Describe the subcommand's arguments."""
    parser = subparsers.add_parser(
        "kernels",
        help="list, show and run the CUDA kernels; no GPU is needed",
        description="List the CUDA kernels, show the source of one, or run one on this CPU. No GPU is needed.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run_list)
    actions = parser.add_subparsers(title="actions", metavar="ACTION")
    actions.add_parser("list", help="all kernels, each with what it is for (also without an action)")
    show = actions.add_parser("show", help="print a kernel's source; its header explains it")
    show.add_argument("name", metavar="NAME")
    show.add_argument("--with-common", action="store_true", help=f"{HEADER}, which all kernels share, before it")
    show.set_defaults(run=run_show)
    execute = actions.add_parser("run", help="run a kernel on a small example under the emulator, and check it")
    execute.add_argument("name", metavar="NAME")
    execute.set_defaults(run=run_one)


def run_list(_: argparse.Namespace) -> int:
    """Print every kernel with its twin, its constant sets and its purpose."""
    for name in kernel_names():
        text, sets = _read(f"{name}.cu"), len(launch_module(name).CONSTANT_SETS)
        print(f"{name}   twin: {', '.join(twins(text))}; {sets} set{'s' if sets > 1 else ''} of constants")
        print(textwrap.fill(purpose(text), width=100, initial_indent="    ", subsequent_indent="    "))
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print a kernel's source."""
    name = known_kernel(arguments.name)
    for file in [HEADER] * arguments.with_common + [f"{name}.cu"]:
        print(_read(file), end="")
    return 0


def run_one(arguments: argparse.Namespace) -> int:
    """Run a kernel's example and print what was counted; 1 when it does not agree with its twin."""
    from cupyllm.cli.kernel_report import run_example

    text, agrees = run_example(known_kernel(arguments.name))
    print(text)
    return 0 if agrees else 1


def known_kernel(name: str) -> str:
    """The name, if a kernel has it. Raises ConfigError naming the nearest that exists."""
    names = kernel_names()
    if name not in names:
        nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)[0]
        raise ConfigError(f"there is no kernel {name!r}; did you mean {nearest!r}? All: {', '.join(names)}")
    return name


def purpose(text: str) -> str:
    """The section Purpose of a kernel's header, as one paragraph; cupyllm/cuda/README.md has the header's form."""
    return _section(text, "Purpose")


def twins(text: str) -> list[str]:
    """The ops of ReferenceOps that compute the same, as the header names them."""
    return re.findall(r"ReferenceOps\.(\w+)", _section(text, "Computes"))


def _section(text: str, label: str) -> str:
    found = re.search(rf"^// {label}\n((?://   .*\n)+)", text, re.MULTILINE)
    assert found, f"a header without {label}"
    return " ".join(line.removeprefix("//").strip() for line in found[1].splitlines())


def _read(file: str) -> str:
    return (resources.files("cupyllm.cuda") / file).read_text("utf-8")
