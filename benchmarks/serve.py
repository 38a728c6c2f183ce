"""Requests and tokens a second, and how long clients wait: a load on any server that speaks the OpenAI API.

    python benchmarks/serve.py --url http://127.0.0.1:8000 --concurrency 8 --requests 64
    python benchmarks/serve.py --config configs/default.json --poisson 2 --requests 100 --goal ttft=500,tpot=50
    python benchmarks/serve.py --config configs/default.json --article

--url measures a server that runs; --config starts ours in a process of its own (`--set KEY=VALUE` changes a key of it),
and ends it. Lengths are chat-like unless they are given, and drawn by --seed, so that every server gets the same
requests. --article is the load of the article that this project began with: 50 requests "Write a short poem.", 128
tokens each, from 8 clients, with max_decode_batch_size and max_prefill_batch_size 1, 4 and 8, one server for each.

Rows are serve.NAME.FIGURE; NAME is --name, by default the load ("closed8", "open2"), in --article "article.batch8".
docs/benchmarks.md says what each figure means.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from record import Row, finish
from servers import own_server

from cupyllm.config import ServerConfig, load_config
from cupyllm.errors import ConfigError, CupyllmError
from cupyllm.hub import resolve_model
from cupyllm.load.client import Outcome
from cupyllm.load.options import Load, add_load_options, measure, read_load
from cupyllm.load.roofline import roofline_tokens_per_s
from cupyllm.load.statistics import LoadSummary, figure_rows, summarise, table_column
from cupyllm.model_config import ModelConfig, read_model_config
from cupyllm.option_values import number, whole_number
from cupyllm.percentiles import side_by_side
from cupyllm.simulator.known_models import find_model

ARTICLE_LIMITS = (1, 4, 8)


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    try:
        rows = run(options)
    except CupyllmError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finish(rows, options.json)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="where the server is")
    parser.add_argument("--config", metavar="FILE", help="start our server with this config instead")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="another value of the config")
    parser.add_argument("--article", action="store_true", help="the load of the article, needs --config")
    parser.add_argument("--rounds", metavar="N", help="how often the load is put (default 1)")
    parser.add_argument("--name", help="what the rows are called")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    add_load_options(parser)
    roofline = parser.add_argument_group(
        "roofline: with --concurrency and --bandwidth-gbs, the share of what the machine allows"
    )
    roofline.add_argument("--bandwidth-gbs", metavar="X", help="GB/s that can be read from memory, as measured")
    roofline.add_argument("--tflops", metavar="X", help="rate of matrix products (default: only bytes count)")
    roofline.add_argument("--sizes-of", metavar="MODEL", help="a known model or a folder (default: that of --config)")
    return parser


def run(options: argparse.Namespace) -> list[Row]:
    """Measure, print a column for each server, and return the rows."""
    if (options.url is None) == (options.config is None):
        raise ConfigError("one of --url and --config says which server is measured")
    rounds = whole_number(options, "rounds", 1)
    if options.article:
        return article(options, rounds)
    load = read_load(options)
    name = options.name or load_name(options)
    if options.url is not None:
        return report(options, load, {name: measured(options.url, load, rounds)})
    with own_server(server_arguments(options)) as server:
        return report(options, load, {name: measured(server.url, load, rounds)})


def article(options: argparse.Namespace, rounds: int) -> list[Row]:
    if options.config is None:
        raise ConfigError("--article starts a server for each batch limit: give --config")
    given = [name for name in ("trace", "poisson", "concurrency", "prompt") if getattr(options, name) is not None]
    if given:
        raise ConfigError(f"--article says which requests come; leave out --{' and --'.join(given)}")
    options.concurrency, options.prompt = "8", "Write a short poem."
    options.requests, options.output_tokens = options.requests or "50", options.output_tokens or "128"
    load = read_load(options)
    runs = {}
    for limit in ARTICLE_LIMITS:
        limits = ["--max_decode_batch_size", str(limit), "--max_prefill_batch_size", str(limit)]
        with own_server([*server_arguments(options), *limits]) as server:
            runs[f"{options.name or 'article'}.batch{limit}"] = measured(server.url, load, rounds)
    return report(options, load, runs)


def server_arguments(options: argparse.Namespace) -> list[str]:
    words = ["--config", options.config]
    for assignment in options.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise ConfigError(f"--set {assignment!r}: expected KEY=VALUE")
        words += [f"--{key}", value]
    return words


def load_name(options: argparse.Namespace) -> str:
    if options.trace is not None:
        return f"trace.{Path(options.trace).stem}"
    return f"closed{options.concurrency}" if options.concurrency else f"open{options.poisson}"


def measured(url: str, load: Load, rounds: int) -> list[list[Outcome]]:
    return [measure(url, load, show_progress=sys.stderr.isatty()) for _ in range(rounds)]


def report(options: argparse.Namespace, load: Load, runs: dict[str, list[list[Outcome]]]) -> list[Row]:
    """Print a column for each name, of its last round, and make the rows of all rounds."""
    columns, rows = {}, []
    for name, rounds in runs.items():
        summaries = [summarise(outcomes, load.goal) for outcomes in rounds]
        rooflines = [roofline(options, load, outcomes) for outcomes in rounds]
        columns[name] = table_column(summaries[-1], rooflines[-1])
        rows += figure_rows(f"serve.{name}", summaries)
        rows += roofline_rows(f"serve.{name}.roofline_share", summaries, rooflines)
    print(side_by_side(list(columns.values()), ["", *columns]), end="\n\n")
    return rows


def roofline_rows(name: str, summaries: list[LoadSummary], rooflines: list[float | None]) -> list[Row]:
    known = [limit for limit in rooflines if limit is not None]
    if len(known) < len(summaries):
        return []
    return [Row(name, "tokens/s", [run.output_tokens_per_s for run in summaries], "roofline of the requests", known)]


def roofline(options: argparse.Namespace, load: Load, outcomes: list[Outcome]) -> float | None:
    """Output tokens/s that the stated rates allow; None without them, and in an open loop, where arrivals decide."""
    concurrency = load.workload.concurrency
    if options.bandwidth_gbs is None or concurrency is None:
        return None
    bandwidth = number(options, "bandwidth_gbs") * 1e9
    flops = float("inf") if options.tflops is None else number(options, "tflops") * 1e12
    return roofline_tokens_per_s(outcomes, concurrency, sizes(options), bandwidth=bandwidth, flops=flops)


def sizes(options: argparse.Namespace) -> ModelConfig:
    if options.sizes_of is not None:
        return find_model(options.sizes_of)
    if options.config is None:
        raise ConfigError("--bandwidth-gbs needs the sizes of the model: give --sizes-of")
    given = dict(assignment.split("=", 1) for assignment in options.set)
    model = given.get("model") or load_config(ServerConfig, Path(options.config)).model
    return read_model_config(resolve_model(model))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
