"""`python -m cupyllm chat`: a conversation in the terminal, with a model here or a server."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from cupyllm.cli.conversation import Conversation, carry_out
from cupyllm.cli.sources import Source, add_source_options, make_source, read_settings
from cupyllm.cli.terminal import Stopwatch, dim, interrupts, printable
from cupyllm.errors import CupyllmError

_EXAMPLES = """\
examples:
  python -m cupyllm chat
  python -m cupyllm chat --model path/to/Qwen2.5-0.5B-Instruct --system "Answer in one sentence."
  python -m cupyllm chat --url http://127.0.0.1:8000 --temperature 0.2

Within it: /help lists the commands, Ctrl-C stops an answer, Ctrl-D or /quit ends. A line that ends with \\ goes on.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the subcommand's arguments."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model here or to a server",
        description="Talk to a model in this process (the demo model when none is named), or to a server with --url.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--system", metavar="TEXT", help="a system prompt")
    add_source_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Read lines and answer them until the end; returns 0. Raises CupyllmError for what cannot be begun."""
    talk = Conversation(system=arguments.system, settings=read_settings(arguments))
    source = make_source(arguments)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):  # not on Windows, which edits lines by itself
            import readline  # noqa: F401
        print(f"{source.name}. /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends.")
    with interrupts(raising=None):  # while nothing is typed or answered there is nothing to stop
        while not talk.has_ended:
            try:
                with interrupts(raising=1):
                    line = _read()
            except EOFError:
                if sys.stdin.isatty():
                    print()  # what comes next begins a line
                break
            except KeyboardInterrupt:  # the line is given up
                print()
                continue
            _take(line, talk, source)
    return 0


def _take(line: str, talk: Conversation, source: Source) -> None:
    """Carry a command out, or answer; what goes wrong is one line, and the conversation goes on."""
    try:
        if line.startswith("/"):
            shown = carry_out(line, talk)
            if shown:
                print(shown)
        elif line.strip():
            talk.ask(line)
        if talk.is_asked:
            _answer(talk, source)
    except CupyllmError as error:
        talk.give_up()
        print(f"error: {error}", file=sys.stderr)


def _answer(talk: Conversation, source: Source) -> None:
    """Print the answer while it comes, reasoning dim. What there is when Ctrl-C stops it stays in the conversation."""
    watch, content, stopped, is_thinking = Stopwatch(), "", False, False
    try:
        with interrupts(raising=1 if source.raises_on_interrupt else 2) as interrupt:
            for piece in source.answer(talk.messages, talk.settings):
                watch.note(piece.num_tokens)
                content += piece.text
                if piece.reasoning:
                    is_thinking = True
                    print(dim(printable(piece.reasoning), sys.stdout), end="", flush=True)
                if piece.text:
                    print("\n\n" * is_thinking + printable(piece.text), end="", flush=True)
                    is_thinking = False
                if interrupt.num_presses:
                    raise KeyboardInterrupt
    except KeyboardInterrupt:
        stopped = True
    finally:
        print()
    if content:
        talk.answered(content)
    else:
        talk.give_up()
    print(dim(f"[{'stopped, ' * stopped}{watch.line()}]", sys.stdout))


def _read() -> str:
    """A line, with those that a \\ at its end joins to it. Raises EOFError at the end of the input."""
    prompt = "> " if sys.stdin.isatty() else ""
    line = input(prompt)
    while line.endswith("\\"):
        line = f"{line[:-1]}\n{input('. ' if prompt else '')}"
    return line
