"""One simulation from settings to figures, and what is said and written about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cupyllm.config import EngineConfig
from cupyllm.device import HostDevice
from cupyllm.errors import ConfigError
from cupyllm.simulator.cost_model import CostModel
from cupyllm.simulator.report import Summary, summarise
from cupyllm.simulator.simulation import RequestRecord, Simulation
from cupyllm.simulator.workload import Workload
from cupyllm.startup import size_cache

LIMITS = (
    "kv_cache_gib",
    "page_size",
    "max_model_len",
    "max_decode_batch_size",
    "max_prefill_batch_size",
    "max_step_tokens",
    "max_waiting",
    "prefix_cache",
)  # the keys of EngineConfig that a simulation depends on


@dataclass(frozen=True)
class Run:
    """A simulation that has run, and its figures."""

    simulation: Simulation
    summary: Summary


def simulate(config: EngineConfig, cost: CostModel, workload: Workload, *, record_pages: bool = False) -> Run:
    """Serve `workload` under the limits of `config`. Raises ConfigError where model and cache do not fit the machine.

    Of `config` only `LIMITS` count: the model and its dtype are those of `cost`.
    """
    size = size_cache(config, cost.config, cost.config.dtype, cost.config.dtype, HostDevice())
    cache_bytes = size.num_pages * config.page_size * cost.kv_bytes_per_token
    if cost.held_weight_bytes + cache_bytes > cost.machine.memory_bytes:
        raise ConfigError(
            f"weights of {_gib(cost.held_weight_bytes)} and a cache of {_gib(cache_bytes)} do not fit the "
            f"{_gib(cost.machine.memory_bytes)} that are usable on {cost.machine.name}; lower kv_cache_gib, or choose "
            "another GPU or model"
        )
    simulation = Simulation(config, size, cost, workload, record_pages=record_pages)
    simulation.run()
    return Run(simulation, summarise(simulation))


def headline(model: str, cost: CostModel, runs: Sequence[Run]) -> str:
    """What was simulated, in two lines: the cost of a step's fixed parts, and the caches."""
    machine = cost.machine
    sizes = [run.simulation.size.num_pages for run in runs]
    pages = " / ".join(map(str, dict.fromkeys(sizes)))
    page_sizes = " / ".join(map(str, dict.fromkeys(run.simulation.config.page_size for run in runs)))
    return (
        f"{model} on {machine.name}: a step reads {cost.step_weight_bytes / 1e9:.3f} GB of weights and "
        f"{cost.kv_bytes_per_token:,} bytes for each token in the cache,\n"
        f"at {machine.bandwidth / 1e9:.0f} GB/s and {machine.flops / 1e12:.0f} TFLOP/s, and takes "
        f"{machine.overhead_s * 1e6:g} us besides; {pages} pages of {page_sizes} tokens"
    )


def as_json(model: str, cost: CostModel, runs: Sequence[Run]) -> dict[str, Any]:
    """Settings, figures and the times of every request, for programs."""
    return {
        "model": model,
        "machine": {field.name: getattr(cost.machine, field.name) for field in dataclasses.fields(cost.machine)},
        "step_weight_bytes": cost.step_weight_bytes,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
        "runs": [
            {
                "limits": {key: getattr(run.simulation.config, key) for key in LIMITS},
                "num_pages": run.simulation.size.num_pages,
                "max_model_len": run.simulation.size.max_model_len,
                "summary": dataclasses.asdict(run.summary),
                "requests": [_request_as_json(record) for record in run.simulation.requests],
            }
            for run in runs
        ],
    }


def _request_as_json(record: RequestRecord) -> dict[str, Any]:
    return {
        "id": record.id,
        **dataclasses.asdict(record.request),
        "arrival_s": record.arrival_s,  # in a closed loop the request itself has none
        "refused": record.refused or None,
        "first_run_s": record.first_run_s,
        "token_times_s": record.token_times,
        "cached_tokens": record.num_cached_tokens,
        "preemptions": record.num_preemptions,
    }


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"
