"""`python -m cupyllm bench`: requests and tokens a second of a server, and how long its clients wait."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cupyllm.errors import ConfigError
from cupyllm.load.options import Load, add_load_options, measure, read_load
from cupyllm.load.statistics import summarise, table_column
from cupyllm.percentiles import side_by_side

_EXAMPLES = """\
examples:
  python -m cupyllm bench                                   the demo model, 8 clients, 100 requests
  python -m cupyllm bench --url http://127.0.0.1:8000 --poisson 2 --requests 50 --goal ttft=500,tpot=50
  python -m cupyllm bench --config configs/qwen2.5-0.5b-instruct.json --set max_decode_batch_size=4 --concurrency 4

In the repository, benchmarks/serve.py does the same with a record of the figures and a roofline.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the subcommand's arguments."""
    parser = subparsers.add_parser(
        "bench",
        help="requests and tokens a second of a server, and how long clients wait",
        description="Put a load on a server that speaks the OpenAI API (--url), or on one that is started for it.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--url", metavar="URL", help="where the server is; without it one is started")
    parser.add_argument("--config", metavar="FILE", help="the config of the server that is started")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="another value of its config")
    add_load_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; 1 when a request failed. Raises ConfigError for what cannot be measured."""
    if arguments.trace is None and arguments.poisson is None:
        arguments.concurrency = arguments.concurrency or "8"
    load = read_load(arguments)
    if arguments.url is not None:
        if arguments.config is not None or arguments.set:
            raise ConfigError("--config and --set are for a server that is started; leave them out with --url")
        return _report(arguments.url, load)
    with _started(_server_arguments(arguments)) as url:
        return _report(url, load)


def _report(url: str, load: Load) -> int:
    summary = summarise(measure(url, load, show_progress=sys.stderr.isatty()), load.goal)
    print(side_by_side([table_column(summary)]))
    return 1 if summary.errors else 0


def _server_arguments(arguments: argparse.Namespace) -> list[str]:
    words = [] if arguments.config is None else ["--config", arguments.config]
    for assignment in arguments.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r}: expected KEY=VALUE")
        words.append(f"--{key}={value}")
    return words


@contextmanager
def _started(arguments: Sequence[str]) -> Iterator[str]:
    """A server of ours in a process of its own, on a free port; its URL. It is told to stop afterwards."""
    command = [sys.executable, "-m", "cupyllm", "serve", *arguments, "--port", "0", "--log_level", "warning"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = next((line.split()[1] for line in process.stdout if line.startswith("url ")), None)
            if url is None:
                raise ConfigError("the server could not be started; the line above says why")
            yield url
        finally:
            process.terminate()
