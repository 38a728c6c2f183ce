"""`python -m cupyllm generate`: the answer to one prompt, from an argument or a pipe."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from cupyllm.cli.sources import Messages, add_source_options, make_source, read_settings
from cupyllm.cli.terminal import Stopwatch, dim, interrupts, printable
from cupyllm.errors import ConfigError

_EXAMPLES = """\
examples:
  python -m cupyllm generate "What is paged attention?" --temperature 0
  cat notes.txt | python -m cupyllm generate "Sum this up in one sentence:"
  python -m cupyllm generate --raw "def fibonacci(n):" --model path/to/Qwen2.5-Coder-0.5B --max-tokens 64
  python -m cupyllm generate "Hello" --url http://127.0.0.1:8000

The answer goes to standard output, nothing else does. Figures follow on standard error where that is a terminal.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the subcommand's arguments."""
    parser = subparsers.add_parser(
        "generate",
        help="answer one prompt, from an argument or a pipe",
        description="Answer one prompt: the argument, what comes through a pipe, or the first above the second.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT")
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is, without a chat template")
    add_source_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the answer; 130 when Ctrl-C ended it. Raises CupyllmError."""
    settings = read_settings(arguments)
    prompt = _prompt(arguments)
    source, watch = make_source(arguments), Stopwatch()
    code, is_terminal = 0, sys.stdout.isatty()
    try:
        with interrupts(raising=1 if source.raises_on_interrupt else 2) as interrupt:
            for piece in source.answer(prompt, settings):
                watch.note(piece.num_tokens)
                print(printable(piece.text) if is_terminal else piece.text, end="", flush=True)
                if interrupt.num_presses:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        code = 130
    print()
    if sys.stderr.isatty():
        print(dim(f"[{watch.line()}]", sys.stderr), file=sys.stderr)
    return code


def _prompt(arguments: argparse.Namespace) -> str | Messages:
    """What is asked. Raises ConfigError when nothing is."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip("\n")
    text = "\n\n".join(part for part in (arguments.prompt, piped) if part)
    if not text:
        raise ConfigError("no prompt: give it as an argument or through a pipe")
    if arguments.raw:
        if arguments.system is not None:
            raise ConfigError("--system is for conversations; leave it out with --raw")
        return text
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    return [*system, {"role": "user", "content": text}]
