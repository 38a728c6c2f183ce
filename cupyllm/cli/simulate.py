"""`python -m cupyllm simulate`: what a workload would see of the engine on some GPU, without the GPU and the model."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from cupyllm.config import EngineConfig, load_config, parse_overrides
from cupyllm.errors import ConfigError
from cupyllm.option_values import number
from cupyllm.simulator.cost_model import GPUS, CostModel, Machine, nearest
from cupyllm.simulator.known_models import find_model, known_model_names
from cupyllm.simulator.report import table
from cupyllm.simulator.run import LIMITS, as_json, headline, simulate
from cupyllm.simulator.trace import chrome_trace, step_lines
from cupyllm.simulator.workload_options import add_workload_options, read_workload

_EXAMPLES = """\
examples:
  python -m cupyllm simulate --concurrency 8 --requests 64 --compare max_decode_batch_size=1,4,8
  python -m cupyllm simulate --model qwen2.5-7b --gpu h100 --poisson 20 --requests 500 --kv_cache_gib 8
  python -m cupyllm simulate --poisson 5 --requests 50 --chrome-trace trace.json    (open in ui.perfetto.dev)

docs/simulator.md explains the cost model and goes through three examples.
"""


def add_parser(subparsers: Any) -> None:
    """Describe the subcommand's arguments. Numbers stay text here, so that `run` can refuse them in one line."""
    parser = subparsers.add_parser(
        "simulate",
        help="what a workload would see of the engine on some GPU; no GPU and no model are needed",
        description="Run the engine's scheduler and page allocator with a model that computes nothing and a clock that "
        "a cost model of a GPU moves on.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    add_workload_options(parser.add_argument_group("workload: one of --trace, --poisson and --concurrency"))
    _add_hardware(parser.add_argument_group("model and GPU"))
    limits = parser.add_argument_group("the engine's limits, with the names of the config and its defaults")
    for key in LIMITS:
        limits.add_argument(f"--{key}", f"--{key.replace('_', '-')}", dest=key, metavar="VALUE")
    limits.add_argument("--compare", metavar="KEY=A,B,...", help="one run, and one column, for each value of a limit")
    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="settings, figures and times of every request")
    output.add_argument("--chrome-trace", metavar="FILE", help="steps, requests and pages over time, for Perfetto")
    output.add_argument("--steps", metavar="FILE", help="JSON lines, one a step, with the use of every page")


def run(arguments: argparse.Namespace) -> int:
    """Simulate and print; returns 0. Raises ConfigError or CheckpointError for what cannot be simulated."""
    configs = list(_configs(arguments))
    cost = CostModel(find_model(arguments.model), _machine(arguments))
    workload = read_workload(arguments)
    runs = [simulate(config, cost, workload, record_pages=bool(arguments.steps)) for config in configs]
    print(headline(arguments.model, cost, runs))
    print()
    print(table([one.summary for one in runs], _heads(arguments)))
    if arguments.json:
        _write(arguments.json, [as_json(arguments.model, cost, runs)])
    if arguments.chrome_trace:
        _write(arguments.chrome_trace, [chrome_trace(runs[0].simulation)])
    if arguments.steps:
        _write(arguments.steps, step_lines(runs[0].simulation))
    return 0


def _add_hardware(group: Any) -> None:
    models = ", ".join(known_model_names())
    group.add_argument("--model", default="qwen2.5-7b", help=f"{models} (default qwen2.5-7b), or a model's folder")
    group.add_argument("--gpu", default="h200", help=f"{', '.join(name for name, _ in GPUS)} (default h200)")
    group.add_argument("--bandwidth-gbs", metavar="X", help="attainable memory bandwidth, instead of the GPU's")
    group.add_argument("--tflops", metavar="X", help="attainable rate of matrix products, instead of the GPU's")
    group.add_argument("--overhead-us", metavar="X", help="what every step takes besides (default 200)")


def _configs(arguments: argparse.Namespace) -> Iterator[EngineConfig]:
    """The limits of each run."""
    given = {key: value for key in LIMITS if (value := getattr(arguments, key)) is not None}
    if arguments.compare is None:
        yield _config(given)
        return
    if arguments.chrome_trace or arguments.steps:
        raise ConfigError("--chrome-trace and --steps show one run; leave out --compare")
    key, values = _compared(arguments.compare)
    if key in given:
        raise ConfigError(f"--{key} and --compare {key}=... are given together; keep one of them")
    for value in values:
        yield _config({**given, key: value})


def _config(given: dict[str, str]) -> EngineConfig:
    words = [f"--{key}={value}" for key, value in given.items()]
    return load_config(EngineConfig, overrides=parse_overrides(EngineConfig, words))


def _compared(text: str) -> tuple[str, list[str]]:
    key, equals, values = text.partition("=")
    key = key.replace("-", "_")
    if not equals or not all(values.split(",")):
        raise ConfigError(f"--compare {text!r}: expected a limit and its values, such as max_step_tokens=128,512")
    if key not in LIMITS:
        raise ConfigError(f"--compare: there is no limit {key!r}; {nearest(key, list(LIMITS))}")
    return key, values.split(",")


def _heads(arguments: argparse.Namespace) -> list[str]:
    if arguments.compare is None:
        return []
    key, values = _compared(arguments.compare)
    return [key, *values]


def _machine(arguments: argparse.Namespace) -> Machine:
    machine = Machine.of_gpu(arguments.gpu)
    if arguments.bandwidth_gbs is not None:
        machine = dataclasses.replace(machine, bandwidth=number(arguments, "bandwidth_gbs") * 1e9)
    if arguments.tflops is not None:
        machine = dataclasses.replace(machine, flops=number(arguments, "tflops") * 1e12)
    if arguments.overhead_us is not None:
        machine = dataclasses.replace(machine, overhead_s=number(arguments, "overhead_us", zero=True) * 1e-6)
    return machine


def _write(file: str, objects: Iterable[Any]) -> None:
    try:
        with Path(file).open("w", encoding="utf-8") as stream:
            for one in objects:
                stream.write(json.dumps(one) + "\n")
    except OSError as error:
        raise ConfigError(f"{file} cannot be written: {error.strerror}") from None
