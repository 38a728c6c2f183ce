"""The simulator: its cost model against hand-made sums, its plans against the real engine's, and what it shows."""

from __future__ import annotations

import itertools
import json
import math
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.cli import main
from cupyllm.config import EngineConfig
from cupyllm.device import HostDevice
from cupyllm.errors import ConfigError
from cupyllm.plan import PlannedChunk
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence
from cupyllm.simulator.cost_model import CostModel, Machine, pairs_up_to
from cupyllm.simulator.known_models import find_model
from cupyllm.simulator.report import Summary, summarise
from cupyllm.simulator.run import simulate
from cupyllm.simulator.simulation import RequestRecord, Simulation
from cupyllm.simulator.trace import chrome_trace, step_lines
from cupyllm.simulator.workload import (
    CHAT_OUTPUTS,
    CHAT_PROMPTS,
    Request,
    Shape,
    Workload,
    closed_workload,
    poisson_workload,
    read_trace,
)
from cupyllm.startup import CacheSize, size_cache
from tests.engine_case import load_model, make_engine
from tests.tiny_checkpoint import write_tiny_checkpoint

DATASHEET_H200 = Machine("h200", bandwidth=4800e9, flops=989e12, overhead_s=0.0)
DOCS = Path(__file__).parents[1] / "docs" / "simulator.md"


def cost_model(model: str = "qwen2.5-7b", machine: Machine = DATASHEET_H200) -> CostModel:
    return CostModel(find_model(model), machine)


def chunk(start: int, length: int, num_tokens: int | None = None) -> PlannedChunk:
    """Tokens [start, start + length) of a sequence that has `num_tokens` (by default no more)."""
    total = num_tokens or start + length
    return PlannedChunk(Sequence(0, [0] * total, total, SamplingParams(), 0, 1, frozenset()), start, length)


def start_simulation(
    workload: Workload, *, num_pages: int = 2000, record_pages: bool = False, **limits: Any
) -> Simulation:
    limits = {"page_size": 16, "max_waiting": 10_000, **limits}
    size = CacheSize(num_pages, num_pages * limits["page_size"], "")
    cost = cost_model("qwen2.5-0.5b", replace(DATASHEET_H200, overhead_s=100e-6))
    return Simulation(EngineConfig(**limits), size, cost, workload, record_pages=record_pages)


def simulated(workload: Workload, **limits: Any) -> Summary:
    simulation = start_simulation(workload, **limits)
    simulation.run()
    return summarise(simulation)


def longest_gap(record: RequestRecord) -> float:
    return max(after - before for before, after in itertools.pairwise(record.token_times))


# The cost model


@pytest.mark.parametrize(
    ("model", "num_params", "tied"),  # totals that Qwen published with the checkpoints
    [
        ("qwen2.5-0.5b", 494_032_768, True),
        ("qwen2.5-1.5b", 1_543_714_304, True),
        ("qwen2.5-7b", 7_615_616_512, False),
        ("qwen3-0.6b", 596_049_920, True),
        ("qwen3-8b", 8_190_735_360, False),
    ],
)
def test_weights_add_up_to_the_published_totals_and_a_step_reads_all_but_an_untied_embedding(
    model: str, num_params: int, tied: bool
) -> None:
    cost, config = cost_model(model), find_model(model)
    assert cost.held_weight_bytes == 2 * num_params
    embedding = config.vocab_size * config.hidden_size
    assert cost.step_weight_bytes == 2 * (num_params - (0 if tied else embedding))


def test_a_decode_step_of_7b_at_batch_1_takes_its_bytes_over_the_bandwidth() -> None:
    step = cost_model().step([chunk(1023, 1)])
    assert step.num_bytes == 14_141_238_272 + 1025 * 57_344  # 1024 tokens read, one of them written before
    assert step.seconds == pytest.approx(2.958e-3, rel=1e-3)
    assert step.bound == "memory"


def test_a_decode_step_of_8_rows_costs_little_more_than_one_of_1() -> None:
    cost = cost_model()
    one, eight = cost.step([chunk(1023, 1)]), cost.step([chunk(1023, 1)] * 8)
    assert eight.num_bytes - one.num_bytes == 7 * 1025 * 57_344
    assert eight.seconds / one.seconds == pytest.approx(1.029, abs=1e-3)


def test_a_prompt_takes_its_operations_over_the_peak() -> None:
    step = cost_model().step([chunk(0, 1024)])
    linear = 2 * 1024 * 6_525_621_760  # biases and norms counted: 0.01 % too many
    attention = 28 * 4 * 28 * 128 * (1024 * 1025 // 2)
    assert step.operations == pytest.approx(linear + attention + 2 * 152064 * 3584, rel=2e-4)
    assert step.seconds == pytest.approx(13.73e-3, rel=2e-3)
    assert step.bound == "compute"


def test_the_head_is_neither_read_nor_computed_when_no_row_is_sampled() -> None:
    cost = cost_model()
    middle, last = cost.step([chunk(0, 64, num_tokens=65)]), cost.step([chunk(0, 64)])
    head = 152064 * 3584
    assert last.num_bytes - middle.num_bytes == 2 * head
    assert last.operations - middle.operations == 2 * head


def test_the_overhead_comes_on_top() -> None:
    slow = cost_model(machine=replace(DATASHEET_H200, overhead_s=0.5))
    assert slow.step([chunk(9, 1)]).seconds == pytest.approx(cost_model().step([chunk(9, 1)]).seconds + 0.5)


@pytest.mark.parametrize("window", [None, 1, 3, 8])
@pytest.mark.parametrize(("start", "length"), [(0, 1), (0, 5), (2, 4), (7, 1), (9, 3)])
def test_a_chunk_costs_the_tokens_that_it_can_see(window: int | None, start: int, length: int) -> None:
    config = replace(find_model("qwen2.5-0.5b"), num_layers=2, sliding_windows=(None, window))
    cost = CostModel(config, DATASHEET_H200)
    seen = [set(range(0 if window is None else max(p - window + 1, 0), p + 1)) for p in range(start, start + length)]
    full = [set(range(p + 1)) for p in range(start, start + length)]
    pairs = sum(map(len, seen)) + sum(map(len, full))
    read = len(set.union(*seen)) + len(set.union(*full))
    step = cost.step([chunk(start, length)])
    assert pairs_up_to(start + length, window) - pairs_up_to(start, window) == sum(map(len, seen))
    assert step.operations == 4 * 14 * 64 * pairs + 2 * (cost.layer_params * length + cost.head_params)
    assert step.num_bytes == cost.step_weight_bytes + (read + 2 * length) * cost.kv_bytes_per_token // 2


def test_a_named_gpu_is_costed_at_its_attainable_share() -> None:
    machine = Machine.of_gpu("rtx4090")
    assert machine.bandwidth == pytest.approx(955e9, rel=1e-3)
    assert 0 < machine.flops < 165.2e12


# The loop


def test_it_plans_what_the_real_engine_plans(tmp_path: Path) -> None:
    """Both serve the same requests in step, through preemptions and prefix hits."""
    requests = [Request(0.0004 * i, 9 + 7 * i % 40, 5 + 11 * i % 30, "p", min(9, 2 * i)) for i in range(12)]
    limits = {"max_decode_batch_size": 5, "max_prefill_batch_size": 2, "max_step_tokens": 12, "page_size": 4}
    simulation = start_simulation(Workload(tuple(requests)), num_pages=30, **limits)
    engine = make_engine(load_model(write_tiny_checkpoint(tmp_path / "model")), num_pages=30, **limits)
    planned: dict[str, list[Any]] = {}
    for name, scheduler in (("simulation", simulation.scheduler), ("engine", engine.scheduler)):
        planned[name] = record_plans(scheduler)
    received = 0
    while len(simulation.requests) < len(requests) or simulation.has_work:
        simulation.receive()
        if not simulation.has_work:
            simulation.now += 1e-4
            continue
        for sequence in simulation.scheduler.waiting:
            if sequence.id >= received:
                params = SamplingParams(max_tokens=sequence.max_tokens, ignore_eos=True)
                engine.add([token_id % 512 for token_id in sequence.token_ids], params)
                received += 1
        simulation.step()
        engine.step()
        assert planned["simulation"][-1] == planned["engine"][-1]
    assert not engine.has_work
    assert engine.stats.num_preemptions == simulation.scheduler.num_preemptions > 0
    assert sum(record.num_cached_tokens for record in simulation.requests) > 0


def record_plans(scheduler: Any) -> list[Any]:
    plans, plan = [], scheduler.plan

    def recorded() -> Any:
        made = plan()
        plans.append([(chunk.sequence.id, chunk.start, chunk.length) for chunk in made.chunks])
        return made

    scheduler.plan = recorded
    return plans


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("num_pages", [60, 1200])
@pytest.mark.parametrize(
    "workload",
    [
        poisson_workload(200.0, 60, Shape(urgent_share=0.2, shared_prefix=40), seed=3),
        closed_workload(8, 40, Shape(shared_prefix=20), seed=4),
    ],
    ids=["poisson", "closed"],
)
def test_every_request_gets_its_tokens_in_order_of_time_and_all_pages_come_back(
    workload: Workload, num_pages: int, prefix_cache: bool
) -> None:
    short = tuple(replace(r, output_tokens=min(r.output_tokens, 300)) for r in workload.requests)
    simulation = start_simulation(
        replace(workload, requests=short), num_pages=num_pages, prefix_cache=prefix_cache, record_pages=True
    )
    while len(simulation.requests) < len(short) or simulation.has_work:
        simulation.receive()
        if not simulation.has_work:
            simulation.now = short[len(simulation.requests)].arrival_s
            continue
        step = simulation.step()
        simulation.scheduler.check_integrity()
        states = Counter[str]()
        for run in step.pages:
            states[run.state] += run.num_pages
        assert states["live"] + states["shared"] == step.num_live_pages
        assert (states["cached"], states["free"]) == (step.num_cached_pages, step.num_free_pages)
        assert sum(states.values()) == num_pages
    for before, after in itertools.pairwise(simulation.steps):
        assert before.end_s <= after.start_s
    for record in simulation.requests:
        assert not record.refused or record.request.prompt_tokens + record.request.output_tokens > num_pages * 16
        if not record.refused:
            check_record(record)
    assert simulation.scheduler.allocator.num_live == 0
    assert (simulation.scheduler.num_preemptions > 0) == (num_pages == 60)


def check_record(record: RequestRecord) -> None:
    assert len(record.token_times) == record.request.output_tokens
    assert np.all(np.diff([record.arrival_s, *record.token_times]) > 0)
    assert record.spans[0].start_s == record.arrival_s
    assert record.spans[-1].end_s == record.token_times[-1]
    for before, after in itertools.pairwise(record.spans):
        assert before.end_s == after.start_s
        # Preempted and taken back in the same plan, a request starts its prefill over without a time in the queue.
        assert before.state != after.state or before.state == "prefill"


def test_a_closed_loop_never_has_more_in_flight_than_clients() -> None:
    simulation = start_simulation(closed_workload(5, 30, Shape(), seed=0))
    simulation.run()
    times = [(record.arrival_s, record.token_times[-1]) for record in simulation.requests]
    for now, _ in times:
        assert sum(arrival <= now < end for arrival, end in times) <= 5


def test_the_same_seed_gives_the_same_run_and_another_one_another() -> None:
    def run(seed: int) -> Summary:
        return simulated(poisson_workload(20.0, 30, Shape(urgent_share=0.5), seed), num_pages=80)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_drawn_lengths_have_the_stated_means_and_stay_in_their_range() -> None:
    requests = poisson_workload(7.0, 4000, Shape(), seed=0).requests
    prompts, outputs = [r.prompt_tokens for r in requests], [r.output_tokens for r in requests]
    np.testing.assert_allclose(np.mean(prompts), CHAT_PROMPTS.mean, rtol=0.1)
    np.testing.assert_allclose(np.mean(outputs), CHAT_OUTPUTS.mean, rtol=0.1)
    assert CHAT_PROMPTS.least <= min(prompts)
    assert max(outputs) <= CHAT_OUTPUTS.most
    np.testing.assert_allclose(requests[-1].arrival_s, 4000 / 7.0, rtol=0.1)


def test_what_can_never_fit_and_what_finds_the_queue_full_is_refused() -> None:
    requests = [Request(0.0, 10, 100_000), *(Request(0.0, 10, 10) for _ in range(5))]
    simulation = start_simulation(Workload(tuple(requests)), max_waiting=3)
    simulation.run()
    assert [record.refused for record in simulation.requests] == ["too long", "", "", "", "queue full", "queue full"]
    assert (summarise(simulation).finished, summarise(simulation).refused) == (3, 3)


# What it shows


def test_eight_rows_serve_eight_clients_far_more_than_2_6_times_as_fast_as_one() -> None:
    """The seed of this project measured 2.6; a step that is bound by memory costs nearly the same for 8 rows."""
    workload = closed_workload(8, 32, Shape(prompt_tokens=128, output_tokens=200), seed=0)
    rates = [simulated(workload, max_decode_batch_size=size).requests_per_s for size in (1, 4, 8)]
    assert rates[1] / rates[0] > 3.4
    assert 6.5 < rates[2] / rates[0] < 8


def test_a_long_prompt_does_not_stall_those_that_decode() -> None:
    requests = (Request(0.0, 20, 400), Request(0.01, 20_000, 5))
    simulation = start_simulation(Workload(requests), max_step_tokens=256)
    simulation.run()
    cost = simulation.cost
    fullest = cost.step([chunk(19_744, 256), chunk(419, 1)]).seconds
    assert longest_gap(simulation.requests[0]) <= fullest
    whole_prompt = cost.step([chunk(0, 20_000)]).seconds
    assert whole_prompt > 5 * fullest


def test_a_small_cache_preempts_and_a_large_one_does_not() -> None:
    workload = closed_workload(8, 24, Shape(prompt_tokens=64, output_tokens=200), seed=0)
    small, large = simulated(workload, num_pages=60), simulated(workload)
    assert small.preemptions > 0
    assert small.page_use_max > 0.9
    assert large.preemptions == 0
    assert large.requests_per_s > small.requests_per_s


def test_a_preempted_request_is_seen_to_queue_and_to_be_computed_again() -> None:
    simulation = start_simulation(
        closed_workload(8, 24, Shape(prompt_tokens=64, output_tokens=200), seed=0), num_pages=60
    )
    simulation.run()
    states = [[span.state for span in record.spans] for record in simulation.requests if record.num_preemptions]
    assert any(found[-4:] == ["decode", "queue", "prefill", "decode"] for found in states)
    assert sum(len(step.preempted_ids) for step in simulation.steps) == simulation.scheduler.num_preemptions


def test_a_shared_prefix_is_found_and_lowers_the_time_to_the_first_token() -> None:
    workload = poisson_workload(20.0, 40, Shape(shared_prefix=2000, output_tokens=20), seed=0)
    cached, computed = simulated(workload, prefix_cache=True), simulated(workload, prefix_cache=False)
    assert cached.prefix_hit_share > 0.8
    assert computed.prefix_hit_share == 0
    assert cached.ttft is not None
    assert computed.ttft is not None
    assert cached.ttft.p50 < computed.ttft.p50 / 2


def test_urgent_requests_overtake_the_others_where_there_is_a_queue() -> None:
    workload = poisson_workload(500.0, 80, Shape(urgent_share=0.2, output_tokens=50), seed=0)
    times = simulated(workload, max_decode_batch_size=4).ttft_by_priority
    urgent, others = times[-1], times[0]
    assert urgent is not None
    assert others is not None
    assert urgent.p50 < others.p50 / 2


# Traces


def test_the_chrome_trace_has_balanced_spans_rows_of_steps_and_counters_that_add_up() -> None:
    simulation = start_simulation(closed_workload(6, 20, Shape(), seed=0), num_pages=80)
    simulation.run()
    trace = json.loads(json.dumps(chrome_trace(simulation), allow_nan=False))
    open_spans: dict[int, str] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "B":
            assert event["tid"] not in open_spans
            open_spans[event["tid"]] = event["name"]
        elif event["ph"] == "E":
            assert open_spans.pop(event["tid"]) == event["name"]
    assert not open_spans
    by_kind = {kind: [e for e in trace["traceEvents"] if e["ph"] == kind] for kind in "XCM"}
    assert len(by_kind["X"]) == len(simulation.steps)
    for before, after in itertools.pairwise(by_kind["X"]):
        assert before["ts"] + before["dur"] <= after["ts"] + 0.01
    assert {sum(e["args"].values()) for e in by_kind["C"] if e["name"] == "pages"} == {80}
    names = {event["args"]["name"] for event in by_kind["M"]}
    assert names >= {"steps", *(f"request {record.id}" for record in simulation.requests if not record.refused)}
    assert sum(len(e["args"]["preempted"]) for e in by_kind["X"]) == simulation.scheduler.num_preemptions > 0


def test_the_lines_of_steps_tell_rows_chunks_and_page_owners() -> None:
    requests = (Request(0.0, 40, 3, "p", 32), Request(0.0, 40, 3, "p", 32), Request(0.02, 40, 3, "p", 32))
    simulation = start_simulation(Workload(requests), num_pages=10, record_pages=True)
    simulation.run()
    lines = [json.loads(json.dumps(line)) for line in step_lines(simulation)]
    assert lines[0]["chunks"] == [{"request": i, "start": 0, "length": 40} for i in (0, 1)]
    assert lines[0]["pages"] == [["live", 0, 3], ["live", 1, 3], ["free", None, 4]]
    assert (lines[1]["decode_rows"], lines[1]["chunks"]) == ([0, 1], [])
    assert lines[3]["chunks"] == [{"request": 2, "start": 32, "length": 8}]
    assert lines[3]["pages"][0] == ["live", 2, 2]
    assert all(line["end_s"] > line["start_s"] for line in lines)


# The command


def run_command(capsys: pytest.CaptureFixture[str], line: str) -> str:
    assert main(["simulate", *shlex.split(line)]) == 0
    return capsys.readouterr().out


def test_the_table_has_a_column_for_each_value_compared(capsys: pytest.CaptureFixture[str]) -> None:
    line = "--concurrency 8 --requests 16 --prompt-tokens 64 --output-tokens 20 --compare max-decode-batch-size=1,4,8"
    table = run_command(capsys, line)
    columns = {text[:25].strip(): text[25:].split() for text in table.splitlines()[3:]}
    assert columns["max_decode_batch_size"] == ["1", "4", "8"]
    one, four, eight = map(float, columns["requests/s"])
    assert one < four < eight
    assert columns["requests finished"] == ["16"] * 3


def test_files_hold_the_run_that_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("json", "chrome-trace", "steps")}
    options = " ".join(f"--{name} {path}" for name, path in files.items())
    table = run_command(
        capsys, f"--poisson 30 --requests 10 --model qwen2.5-0.5b --page-size 8 --kv_cache_gib 0.05 {options}"
    )
    document = json.loads(files["json"].read_text(encoding="utf-8"))
    (run,) = document["runs"]
    assert f"requests/s                {run['summary']['requests_per_s']:>.3f}".split()[1] in table
    assert run["limits"]["page_size"] == 8
    assert len(run["requests"]) == 10
    steps = [json.loads(line) for line in files["steps"].read_text(encoding="utf-8").splitlines()]
    assert len(steps) == run["summary"]["steps"]
    assert json.loads(files["chrome-trace"].read_text(encoding="utf-8"))["traceEvents"]


def test_a_trace_file_is_served_in_order_of_arrival(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 2.5, "prompt_tokens": 30, "output_tokens": 4, "priority": 1},
        {"arrival_s": 1, "prompt_tokens": 100, "output_tokens": 5, "prefix": "a", "prefix_tokens": 64},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert read_trace(path).requests == (Request(1.0, 100, 5, "a", 64), Request(2.5, 30, 4, priority=1))
    assert run_command(capsys, f"--trace {path}").splitlines()[3].split() == ["requests", "finished", "2"]


def test_a_model_folder_and_rates_by_hand_are_taken(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", torch_dtype="bfloat16")
    line = "--concurrency 1 --requests 2 --prompt-tokens 8 --output-tokens 5"
    table = run_command(
        capsys, f"{line} --model {folder} --bandwidth-gbs 1 --tflops 2 --overhead-us 10 --kv_cache_gib 0.01"
    )
    assert "at 1 GB/s and 2 TFLOP/s, and takes 10 us besides" in table


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--poisson 1 --gpu h20", "no GPU 'h20' in the table; did you mean 'h200'"),
        ("--poisson 1 --model qwen2.5-7", "did you mean 'qwen2.5-7b'"),
        ("--poisson -3", "--poisson is '-3': expected a number above 0"),
        ("--poisson nan", "--poisson is 'nan'"),
        ("--concurrency 0", "--concurrency is '0': expected a whole number of 1 or more"),
        ("--concurrency 2.5", "--concurrency is '2.5'"),
        ("--concurrency 2 --prompt-tokens 0", "--prompt-tokens is '0'"),
        ("--concurrency 2 --output-tokens x", "--output-tokens is 'x'"),
        ("--concurrency 2 --priority 1.5", "--priority is '1.5': expected a number of 0 or more and at most 1"),
        ("--concurrency 2 --overhead-us -1", "--overhead-us is '-1'"),
        ("--concurrency 2 --page_size 0", "config key 'page_size' cannot be 0"),
        ("--concurrency 2 --prefix-cache maybe", "config key 'prefix_cache' cannot be 'maybe'"),
        ("--concurrency 2 --max_model_len 99999", "max_model_len 99999 is above the model's own limit of 32768"),
        ("--concurrency 2 --compare max_step_token=1,2", "did you mean 'max_step_tokens'"),
        ("--concurrency 2 --compare max_step_tokens", "expected a limit and its values"),
        ("--concurrency 2 --page_size 8 --compare page_size=8,16", "given together"),
        ("--concurrency 2 --compare page_size=8,16 --steps f", "leave out --compare"),
        ("--concurrency 2 --gpu rtx3060", "weights of 14.2 GiB and a cache of 2.0 GiB do not fit"),
        ("--concurrency 2 --requests 2 --json /no/such/folder/f", "/no/such/folder/f cannot be written"),
        ("", "one of --trace, --poisson and --concurrency says which requests come; found none of them"),
        ("--poisson 1 --concurrency 2", "found --poisson and --concurrency"),
        ("--trace f --seed 3", "--seed is for requests that are drawn"),
        ("--trace /no/such/file", "trace /no/such/file cannot be read"),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys: pytest.CaptureFixture[str], line: str, message: str) -> None:
    assert main(["simulate", *line.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"arrival_s": 1,', "line 2 is not JSON"),
        ("[1, 2]", "line 2 is a JSON list, not an object"),
        ('{"arrival_s": 1, "prompt_tokens": 5}', "line 2: output_tokens is missing"),
        ('{"arrival_s": -1, "prompt_tokens": 5, "output_tokens": 5}', "line 2: arrival_s is -1, out of range"),
        ('{"arrival_s": 1, "prompt_tokens": 0, "output_tokens": 5}', "line 2: prompt_tokens is 0, not a whole number"),
        ('{"arrival_s": 1, "prompt_token": 5}', "line 2 has an unknown key 'prompt_token'; did you mean 'prompt_t"),
        (
            '{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "prefix_tokens": 6}',
            "line 2: prefix_tokens is 6, more than the 5 tokens of the prompt",
        ),
        ('{"arrival_s": 1, "prompt_tokens": 5, "output_tokens": 5, "prefix": 6}', "line 2: prefix is 6, not a name"),
    ],
)  # fmt: skip
def test_a_broken_trace_line_is_named_by_its_number(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f'{{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}}\n{line}\n', encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_an_empty_trace_and_a_float32_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no requests"):
        read_trace(tmp_path / "trace.jsonl")
    with pytest.raises(ConfigError, match="float32"):
        CostModel(replace(find_model("qwen2.5-0.5b"), dtype="float32"), DATASHEET_H200)


def test_the_cache_has_the_pages_that_the_engine_would_have() -> None:
    config, cost = EngineConfig(kv_cache_gib=1.0), cost_model()
    run = simulate(config, cost, closed_workload(1, 1, Shape(4, 2), seed=0))
    assert run.simulation.size == size_cache(config, cost.config, "bfloat16", "bfloat16", HostDevice())
    assert run.simulation.size.num_pages == math.floor(2**30 / (16 * 57_344))


def commands_of_the_docs() -> list[Any]:
    """Every command in docs/simulator.md with what it shows below it."""
    blocks = DOCS.read_text(encoding="utf-8").split("```console\n$ python -m cupyllm simulate ")[1:]
    shown = (block.split("\n```", 1)[0].replace("\\\n    ", "").split("\n", 1) for block in blocks)
    return [pytest.param(line, output, id=str(number)) for number, (line, output) in enumerate(shown, start=1)]


@pytest.mark.parametrize(("line", "output"), commands_of_the_docs())
def test_the_docs_show_what_the_commands_print(capsys: pytest.CaptureFixture[str], line: str, output: str) -> None:
    assert run_command(capsys, line).strip() == output.strip()
