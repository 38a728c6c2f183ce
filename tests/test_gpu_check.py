"""`python -m cupyllm gpu-check` without a GPU: its parts over the emulator, its arithmetic with given times."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cupyllm.cli import main
from cupyllm.cuda.emulator import LaunchReport
from cupyllm.cuda.examples import GuardedHost
from cupyllm.cuda.loader import DeviceFacts, KernelLoader, emulated_loader, source_of
from cupyllm.cuda.nvrtc import Nvrtc, kernel_names, launch_module
from cupyllm.device import HostDevice
from cupyllm.errors import DeviceError
from cupyllm.figures import Row
from cupyllm.gpu_check import gpu as gpu_module
from cupyllm.gpu_check.correctness import check_kernels, first_variants, variants
from cupyllm.gpu_check.decode import decode_engine, decode_rows, needed_bytes
from cupyllm.gpu_check.environment import look_around
from cupyllm.gpu_check.gpu import CupyGpu, Elapsed, Launch
from cupyllm.gpu_check.kernels import KernelCase, bare_product, kernel_rows, pool_sizes
from cupyllm.gpu_check.limits import Limits, measure_limits
from cupyllm.gpu_check.linear_cases import linear_cases
from cupyllm.gpu_check.measure import Arrays, Pool, copies_for, measure
from cupyllm.gpu_check.other_cases import attention_cases, row_cases, sampling_cases
from cupyllm.gpu_check.plan import FULL, QUICK, CheckPlan
from cupyllm.gpu_check.probes import probe_source, read_all
from cupyllm.gpu_check.report import Report
from cupyllm.gpu_check.run import Check
from cupyllm.gpu_check.sanitizer import sanitize
from cupyllm.gpu_check.small_models import answers, compare, small_engine, small_model
from cupyllm.model_config import ModelConfig
from cupyllm.ops.reference import ReferenceOps
from cupyllm.plan import PlannedChunk
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence as TokenSequence
from cupyllm.simulator.cost_model import CostModel, Machine
from cupyllm.simulator.known_models import find_model

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")
LIMITS = Limits(bandwidth=2e12, flops=4e14, rows=())
TINY_PLAN = CheckPlan(
    models=(),
    variants=1,
    sanitizer_s=0.0,
    repeats=1,
    matrix_size=32,
    prompt_rows=70,
    decode_attention=((2, 40),),
    prefill_attention=((20, 40),),
    batch_sizes=(1, 3),
    prompt_tokens=20,
    steps=2,
    total_s=1e9,
)


@dataclass
class EmulatedGpu:
    """Launches run under the emulator; how long they took is made up: `milliseconds` for each."""

    loader: KernelLoader = field(default_factory=emulated_loader)
    milliseconds: Iterator[float] = field(default_factory=lambda: itertools.repeat(1.0))
    device: Any = field(default_factory=HostDevice)
    cache_bytes: int = 2048
    has_cublas: bool = True
    host_bound: bool = False

    def time(self, launches: Sequence[Launch]) -> Elapsed:
        for launch in launches:
            launch()
        return Elapsed(sum(next(self.milliseconds) for _ in launches) / 1e3, self.host_bound)

    def matmul(self, a: np.ndarray, b: np.ndarray, out: np.ndarray) -> None:
        out[...] = a.astype(np.float32) @ b.astype(np.float32)

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        target[...] = source

    def read(self, array: np.ndarray) -> None:
        array.sum()

    def release(self) -> None:
        pass


@dataclass
class SilentBackend:
    """Compiles nothing and launches nothing: for what is asked of a GPU of some size, not what it computes."""

    facts: DeviceFacts
    compiled: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    null: Any = None

    def compile(self, name: str, source: str, options: tuple[str, ...]) -> Callable[..., None]:
        self.compiled.append((name, options))
        return lambda grid, block, args, *, shared_mem=0: None

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        return np.zeros(shape, dtype)

    zeros = empty

    def capture(self, run: Callable[[], None]) -> tuple[Callable[[], None], int]:
        run()
        return lambda: None, 0


def silent_gpu(num_multiprocessors: int = 132) -> EmulatedGpu:
    facts = DeviceFacts("silent", 90, num_multiprocessors, max_shared_memory=227 * 1024)
    return EmulatedGpu(KernelLoader(SilentBackend(facts)))


def all_cases(config: ModelConfig, plan: CheckPlan = TINY_PLAN) -> list[KernelCase]:
    decodes, prefills = plan.decode_attention, plan.prefill_attention
    return [
        *linear_cases("tiny", config, prompt_rows=plan.prompt_rows),
        *attention_cases("tiny", config, decodes=decodes, prefills=prefills),
        *row_cases("tiny", config),
        *sampling_cases("tiny", config),
    ]


# ---- correctness ------------------------------------------------------------------------------------------------


def test_every_kernel_has_variants_and_every_case_of_speed_is_one_of_them() -> None:
    assert sorted(variants(132)) == kernel_names()
    assert sorted({case.kernel for case in all_cases(find_model("qwen2.5-7b"))}) == kernel_names()


@pytest.mark.parametrize("num_multiprocessors", [28, 132])
def test_the_variants_bring_about_every_set_of_constants_on_small_and_large_gpus(num_multiprocessors: int) -> None:
    backend = SilentBackend(DeviceFacts("silent", 90, num_multiprocessors, max_shared_memory=227 * 1024))
    for _ in check_kernels(KernelLoader(backend), GuardedHost(), variants(num_multiprocessors)):
        pass
    wanted = {
        (name, tuple(sorted(f"-D{key}={value}" for key, value in constants.items())))
        for name in kernel_names()
        for constants in launch_module(name).CONSTANT_SETS
    }
    assert wanted <= set(backend.compiled)


@needs_gxx
def test_the_first_variants_of_all_kernels_agree_under_the_emulator() -> None:
    loader = emulated_loader()
    rows = list(check_kernels(loader, GuardedHost(), first_variants(loader.facts.num_multiprocessors)))
    assert {row.name: row.value for row, agrees in rows if not agrees} == {}
    assert {row.name.split("[")[0] for row, _ in rows} == {f"correct.{kernel}" for kernel in kernel_names()}


@needs_gxx
def test_a_broken_kernel_is_named_with_its_error_and_the_check_goes_on() -> None:
    def broken(name: str) -> str:
        return source_of(name).replace("+ I + i]", "+ i]")

    chosen = {"silu_mul": [{}], "rms_norm": [{}]}
    (silu, silu_agrees), (_, norm_agrees) = check_kernels(emulated_loader(source=broken), GuardedHost(), chosen)
    assert not silu_agrees
    assert norm_agrees
    assert silu.name == "correct.silu_mul"
    assert silu.value > float(silu.limit.removeprefix("<= "))


def test_a_launch_that_fails_is_named() -> None:
    with pytest.raises(DeviceError, match=re.escape("correct.copy_pages[D=60] cannot be run: copy_pages: D is 60")):
        list(check_kernels(silent_gpu().loader, GuardedHost(), {"copy_pages": [{"D": 60}]}))


def test_models_are_compared_by_log_probability_and_token_and_nan_is_an_error() -> None:
    config = small_model("qwen3")
    reference = answers(small_engine(config, ReferenceOps(), HostDevice(), "float32"))
    assert compare(reference, reference, 0.01) == (0.0, True)
    first = reference[0][0]

    def with_first(**changes: Any) -> dict[int, Any]:
        return reference | {0: [replace(first, **changes), *reference[0][1:]]}

    (token, value), *others = first.logprobs.top
    shifted = replace(first.logprobs, top=((token, value + 0.25), *others))
    error, same = compare(with_first(logprobs=shifted), reference, 0.01)
    assert error == pytest.approx(0.25)
    assert same
    assert compare(with_first(token_id=token + 1), reference, 1e-6) == (0.0, False)
    assert compare(with_first(logprobs=replace(shifted, top=((token, np.nan), *others))), reference, 0.01)[0] == np.inf
    assert not compare(with_first(logprobs=None, token_id=None), reference, 0.01)[1]
    assert not compare(reference | {0: reference[0][:-1]}, reference, 0.01)[1]


# ---- timing and shares ------------------------------------------------------------------------------------------


def test_runs_alternate_with_the_peers_after_one_that_does_not_count() -> None:
    gpu, order = silent_gpu(), []
    # two sides of four launches each: a first run of both, then two that count
    gpu.milliseconds = iter([100.0] * 8 + [1.0] * 4 + [2.0] * 4 + [3.0] * 4 + [4.0] * 4)
    own, peer = [lambda: order.append("own")], [lambda: order.append("peer")]
    timing = measure(gpu, own, peer, repeats=2)
    assert timing.runs == pytest.approx([1e-3, 3e-3])
    assert timing.peer_runs == pytest.approx([2e-3, 4e-3])
    assert [side for side, _ in itertools.groupby(order)] == ["own", "peer"] * 3
    assert timing.rates(6.0) == pytest.approx([6000, 2000])


def test_arrays_rotate_until_they_are_four_caches_and_at_most_128_times() -> None:
    mib = 2**20
    assert copies_for(200 * mib, 50 * mib) == 1
    assert copies_for(199 * mib, 50 * mib) == 2
    assert copies_for(10 * mib, 50 * mib) == 20
    assert copies_for(1, 50 * mib) == 128


def test_a_pool_gives_different_memory_until_it_begins_again() -> None:
    pool = Pool(silent_gpu(), 1024, np.float16)
    first, second, third = pool.take(2, 200), pool.take(300), pool.take(400)
    assert first.shape == (2, 200)
    assert not np.shares_memory(first, second)
    assert np.shares_memory(first, third), "400 more do not fit behind"
    assert np.isfinite(pool.take(1024)).all()
    assert pool.take(1024).std() > 0.5
    halves = Pool(silent_gpu(), 1100, np.float32).halves()
    assert [half.size for half in halves] == [512, 512]
    assert not np.shares_memory(*halves)
    with pytest.raises(DeviceError, match="1025 numbers was asked of a pool of 1024"):
        pool.take(1025)


def test_cases_of_the_7b_model_have_its_bytes_and_operations() -> None:
    config = find_model("qwen2.5-7b")
    cases = {f"{case.kernel}.{case.shape}": case for case in all_cases(config, FULL)}
    down = cases["gemv.tiny.down.T1"]
    assert down.num_bytes == 2 * 3584 * 18944 + 4 * (18944 + 3584 + 3584)  # weight, x, residual, y
    assert down.product == (1, 3584, 18944)
    assert cases["skinny_gemm.tiny.gate_up.T8"].product == (8, 2 * 18944, 3584)
    assert cases["tile_gemm.tiny.gate_up.T2048"].operations == 2 * 2048 * 2 * 18944 * 3584
    assert "tile_gemm.tiny.head.T2048" not in cases
    weights = {layer: cases[f"gemv.tiny.{layer}.T1"].product for layer in ("qkv", "o", "gate_up", "down", "head")}
    matrices = sum(2 * product.N * product.K * (1 if name == "head" else 28) for name, product in weights.items())
    vectors = 2 * 28 * (4608 + 2 * 3584) + 2 * 3584  # biases and norms
    step = CostModel(config, Machine("any", 1.0, 1.0, 0.0)).step_weight_bytes
    assert matrices + vectors == step, "together the layers are the model"
    decode = cases["paged_attention_decode.tiny.S8.context4096"]
    assert decode.num_bytes == 8 * (2 * 2 * 4 * 128 * 4096 + 2 * 4 * 28 * 128 + 4 + 4 * 256)
    prefill = cases["paged_attention_prefill.tiny.T512.context8192"]
    pairs = sum(position + 1 for position in range(8192 - 512, 8192))
    assert prefill.operations == 4 * 28 * 128 * pairs


def test_a_rate_is_beside_the_limit_of_its_kind_and_a_time_beside_cublas() -> None:
    gpu = silent_gpu()
    gpu.milliseconds = itertools.cycle([2.0, 2.0, 2.0, 2.0, 1.0, 1.0, 1.0, 1.0])
    config = find_model("qwen2.5-0.5b")
    arrays = Arrays.make(gpu, 896 * 896, 2048 * 4864)
    cases = {f"{case.kernel}.{case.shape}": case for case in linear_cases("small", config, prompt_rows=2048)}
    gemv, host_bound = kernel_rows(arrays, LIMITS, cases["gemv.small.o.T1"], repeats=3)
    assert not host_bound
    assert [row.name for row in gemv] == ["gemv.small.o.T1.time", "gemv.small.o.T1.rate"]
    assert gemv[0] == Row("gemv.small.o.T1.time", "us", [2000.0] * 3, "cuBLAS, bare product", [1000.0] * 3)
    num_bytes = 2 * 896 * 896 + 4 * 3 * 896
    assert gemv[1].runs == pytest.approx([num_bytes / 2e-3 / 1e9] * 3)
    assert gemv[1].ratio == pytest.approx(num_bytes / 2e-3 / 2e12)
    gpu.has_cublas, gpu.host_bound = False, True
    gpu.milliseconds = itertools.repeat(0.5)
    (time, rate), host_bound = kernel_rows(
        arrays, replace(LIMITS, flops=None), cases["tile_gemm.small.o.T2048"], repeats=1
    )
    assert host_bound
    assert (time.peer, rate.peer, rate.unit) == (None, None, "TFLOP/s")
    assert rate.value == pytest.approx(2 * 2048 * 896 * 896 / 0.5e-3 / 1e12)


def test_limits_are_the_faster_of_copy_and_read_and_the_rate_of_products() -> None:
    gpu = silent_gpu()
    gpu.milliseconds = iter([9.0] * 4 + [2.0] * 8 + [9.0] * 4 + [0.5] * 8 + [9.0] * 4 + [4.0] * 8)
    arrays = Arrays.make(gpu, 4096, 64)
    limits = measure_limits(arrays, matrix_size=16, repeats=2)
    assert [row.name for row in limits.rows] == ["limit.copy", "limit.read", "limit.matmul.float16"]
    assert limits.rows[0].value == pytest.approx(2 * 4096 / 2e-3 / 1e9), "bytes read and bytes written"
    assert limits.bandwidth == pytest.approx(4096 / 0.5e-3)
    assert limits.flops == pytest.approx(2 * 16**3 / 4e-3)
    gpu.has_cublas, gpu.milliseconds = False, itertools.repeat(1.0)
    assert measure_limits(arrays, matrix_size=16, repeats=1).flops is None


@pytest.mark.parametrize("name", FULL.models)
def test_the_pools_hold_every_case_of_a_model(name: str) -> None:
    gpu, cases = silent_gpu(), all_cases(find_model(name), FULL)
    arrays = Arrays.make(gpu, 1, 1)
    sizes = pool_sizes(cases, cache_bytes=2**20)
    for pool, size, dtype in zip((arrays.elements, arrays.floats), sizes, (np.float16, np.float32), strict=True):
        pool._array = np.empty(size, dtype)  # never touched, so that it takes no memory
    for case in cases:
        case.make(arrays)
        if case.product is not None:
            bare_product(arrays, case.product)


# ---- decoding ---------------------------------------------------------------------------------------------------


def test_the_floor_of_decoding_is_the_sum_of_its_steps() -> None:
    config, gpu = small_model("qwen2"), silent_gpu()
    ticks = itertools.count()
    engine = decode_engine(gpu, config, batch_size=3, context=100)
    rows = list(
        decode_rows(
            engine,
            "tiny",
            LIMITS,
            batch_sizes=(1, 3),
            prompt_tokens=20,
            steps=4,
            runs=2,
            clock=lambda: next(ticks) * 0.5,
        )
    )
    assert [row.name for row in rows] == ["decode.tiny.batch1", "decode.tiny.batch3"]
    assert rows[1].runs == [3 * 4 / 0.5] * 2, "12 tokens between two readings of the clock"
    cost = CostModel(config, Machine("measured", LIMITS.bandwidth, 4e14, 0.0))

    def step(context: int) -> float:
        sequence = TokenSequence(0, [0] * context, 1, SamplingParams(), 0, 1, frozenset())
        return cost.step([PlannedChunk(sequence, context - 1, 1)]).seconds

    # The prompt gave one token, the step in which its row began another; then each step gives one more.
    for run, floor in enumerate(rows[0].peer_runs):
        expected = sum(step(22 + 4 * run + k) for k in range(4))
        assert floor == pytest.approx(4 / expected)
    assert not engine.has_work


def test_a_model_needs_memory_for_weights_and_cache() -> None:
    config = find_model("qwen2.5-7b")
    needed = needed_bytes(config, batch_size=64, context=1024)
    assert needed == 15_231_233_024 + 2 * (2 * 28 + 1) * 3584 + 64 * 1024 * 57_344 + 2 * 2**30  # norms are float32


# ---- the whole, its report and its limits of time and memory ----------------------------------------------------


def make_check(
    gpu: EmulatedGpu, report: Report, plan: CheckPlan = TINY_PLAN, clock: Callable[[], float] | None = None
) -> Check:
    readings = itertools.count()
    return Check(gpu, plan, report, clock or (lambda: float(next(readings))), 0.0, {"tiny": small_model("qwen2")})


@needs_gxx
def test_the_whole_check_runs_under_the_emulator_and_writes_what_benchmarks_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(tmp_path / "gpu.json", {"gpu": "none, emulated"})
    assert make_check(EmulatedGpu(), report).run(GuardedHost())
    record = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert set(record) == {"machine", "versions", "commit", "command", "rows", "notes"}
    assert record["machine"]["gpu"] == "none, emulated"
    rows = {row["name"]: row for row in record["rows"]}
    assert len(rows) == len(record["rows"]), "names are unique"
    for name in ("correct.gemv[dtype=bfloat16 around=residual]", "limit.read", "argmax.tiny.R64.time"):
        assert name in rows
    for kind, dtype in itertools.product(("qwen2", "qwen3"), ("bfloat16", "float16")):
        assert f"correct.model[{kind} dtype={dtype}]" in rows
    rate = rows["skinny_gemm.tiny.qkv.T8.rate"]
    assert set(rate) == {"name", "unit", "runs", "value", "peer", "peer_runs", "peer_value", "ratio", "limit"}
    assert rate["ratio"] == pytest.approx(rate["value"] / rate["peer_value"])
    assert rows["decode.tiny.batch3"]["ratio"] > 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    import report as results

    text = results.section("gpu", record)
    assert "| decode.tiny.batch3 |" in text
    assert "**no**" not in text


def test_what_the_time_does_not_allow_is_left_out_and_said() -> None:
    report = Report()
    make_check(silent_gpu(), report, replace(TINY_PLAN, total_s=-1.0)).run(GuardedHost())
    assert [row.name.split(".")[0] for row in report.rows] == ["correct", "limit", "limit", "limit"]
    assert [note.split(" are left out")[0] for note in report.notes[:-1]] == [
        "other variants of kernels",
        "the other kernels",
        "decoding with tiny",
    ]
    assert report.notes[-1].startswith("took ")


@pytest.mark.parametrize("free", [10**6, 3 * 10**7])
def test_shapes_and_models_that_do_not_fit_are_left_out_and_said(free: int) -> None:
    gpu, report = silent_gpu(), Report()
    gpu.device = SimpleNamespace(free_bytes=lambda: free, upload=lambda host: host)
    check = make_check(gpu, report)
    check.models = {"tiny": small_model("qwen2"), "qwen2.5-0.5b": find_model("qwen2.5-0.5b")}
    if free == 10**6:
        with pytest.raises(DeviceError, match=r"the shapes of tiny need twice"):
            check._time_kernels()
    else:
        check._time_kernels()
        assert {row.name.split(".")[1] for row in report.rows if row.name.startswith("gemv")} == {"tiny"}
        check._decode("tiny", small_model("qwen2"), LIMITS)
        assert "decoding with tiny is left out: it needs 2.0 GiB, 0.0 GiB are free" in report.notes[-1]
    assert "kernels on the shapes of qwen2.5-0.5b are left out: 0.0 GiB are free" in report.notes[0]


def test_a_run_that_breaks_off_has_written_what_it_found(tmp_path: Path) -> None:
    report = Report(tmp_path / "gpu.json")
    check = make_check(silent_gpu(), report, replace(TINY_PLAN, variants=1))
    check.report.add(Row("limit.copy", "GB/s", [1.0]))
    check.gpu.loader = None  # type: ignore[assignment]
    with pytest.raises(AttributeError):
        check.run(GuardedHost())
    assert json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))["rows"][0]["name"] == "limit.copy"


def test_a_row_that_does_not_hold_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report()
    report.add(Row("correct.a", "of row", [0.5], limit="<= 0.1"), holds=False)
    report.add(Row("correct.b", "of row", [0.0], limit="<= 0.1"))
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith("WRONG")
    assert not second.endswith("WRONG")
    assert report.wrong == ["correct.a"]


def test_quick_does_less_of_everything() -> None:
    assert set(QUICK.models) < set(FULL.models)
    for part in ("repeats", "matrix_size", "prompt_rows", "prompt_tokens", "steps", "sanitizer_s", "total_s"):
        assert getattr(QUICK, part) < getattr(FULL, part)
    assert FULL.total_s < 8 * 60
    assert FULL.batch_sizes == QUICK.batch_sizes == (1, 8, 64)


# ---- compute-sanitizer ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "count", "text"),
    [
        (
            "echo '========= Invalid read of size 4'; echo '========= ERROR SUMMARY: 3 errors'",
            3,
            "Invalid read of size 4",
        ),
        ("echo '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)'", 0, "0 hazards"),
        ("echo '========= ERROR SUMMARY: 1 error'", 1, ""),
        ("echo no permission; exit 7", None, "ended without a summary: no permission"),
        ("sleep 600", None, "stopped after 1 s"),
    ],
)
def test_the_sanitizer_s_summary_is_read(
    script: str, count: int | None, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = sanitize("memcheck", limit_s=1.0 if "sleep" in script else 60.0)
    assert found.count == count
    assert text in found.text


def test_findings_of_the_sanitizer_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text('#!/bin/sh\necho "========= ERROR SUMMARY: $([ $2 = memcheck ] && echo 2 || echo 0) errors"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    report = Report()
    make_check(silent_gpu(), report, replace(TINY_PLAN, sanitizer_s=60.0))._sanitize()
    assert [(row.name, row.value) for row in report.rows] == [("sanitizer.memcheck", 2), ("sanitizer.racecheck", 0)]
    assert report.wrong == ["sanitizer.memcheck"]


# ---- what stands for CuPy ---------------------------------------------------------------------------------------


def fake_cupy(log: list[str], *, queries: Iterator[bool] | None = None, **parts: Any) -> Any:
    """The parts of CuPy that gpu.py and environment.py call. Events have completed as `queries` says."""

    class Event:
        @property
        def done(self) -> bool:
            return next(queries) if queries else False

        def record(self) -> None:
            log.append("event")

        def synchronize(self) -> None:
            log.append("synchronize")

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...]) -> None:
            assert "globaltimer" in code

        def get_function(self, name: str) -> Any:
            return Function()

    class Function:
        shared_size_bytes = 0

        def __call__(self, grid: Any, block: Any, args: Any, *, shared_mem: int = 0) -> None:
            log.append(f"wait {int(args[0]) / 1e6:.0f} ms")

    properties = {"name": b"Fake GPU", "multiProcessorCount": 132, "l2CacheSize": 50 * 2**20}
    device = SimpleNamespace(
        id=0,
        compute_capability="90",
        attributes={"MaxSharedMemoryPerBlockOptin": 232448},
        mem_info=(60 * 2**30, 80 * 2**30),
    )
    cuda = SimpleNamespace(
        is_available=lambda: parts.get("available", True),
        Device=lambda: device,
        Event=Event,
        get_elapsed_time=lambda start, end: 12.0,
        compiler=SimpleNamespace(CompileException=RuntimeError),
        nvrtc=SimpleNamespace(getVersion=parts.get("nvrtc", lambda: (12, 9))),
        runtime=SimpleNamespace(
            getDeviceProperties=lambda _: properties,
            runtimeGetVersion=lambda: parts.get("cuda", 12090),
            driverGetVersion=lambda: 13000,
        ),
    )
    return SimpleNamespace(
        __version__="14.2.0",
        cuda=cuda,
        RawModule=RawModule,
        matmul=parts.get("matmul", np.matmul),
        asarray=np.asarray,
        asnumpy=np.asarray,
    )


@pytest.mark.parametrize(
    ("queries", "host_bound", "waits"),
    [
        ([False], False, ["2"]),
        ([True, False], False, ["2", "4"]),
        ([True] * 9, True, ["2", "4", "8", "16", "32", "64", "128", "256", "500"]),
    ],
)
def test_the_stopwatch_holds_launches_back_until_all_are_queued(
    queries: list[bool], host_bound: bool, waits: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(log, queries=iter(queries)))
    monkeypatch.setattr(gpu_module.time, "perf_counter", lambda: 0.0)
    elapsed = CupyGpu().time([lambda: log.append("launch")] * 2)
    assert elapsed == Elapsed(0.012, host_bound)
    tries = [[f"wait {wait} ms", "event", "launch", "launch", "event", "synchronize"] for wait in waits]
    assert log == list(itertools.chain(*tries))


def refuses(reason: str) -> Callable[..., Any]:
    def action(*_: Any) -> Any:
        raise ImportError(f"{reason}\nand more lines")

    return action


def test_the_environment_says_what_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = look_around(fake_cupy([]), lambda: "compiled")
    assert found.has_cublas
    assert found.facts["gpu"] == "Fake GPU"
    assert found.facts["compute capability"] == "9.0"
    assert found.facts["memory"] == "80.0 GiB, 60.0 free"
    assert (found.facts["CUDA runtime"], found.facts["CuPy"], found.facts["NVRTC"]) == ("12.9", "14.2.0", "12.9")
    assert found.facts["driver"].endswith("for CUDA up to 13.0")
    (line,) = found.missing
    assert line.startswith("compute-sanitizer is not on PATH")


def test_what_is_missing_is_said_in_a_line_with_what_to_install() -> None:
    found = look_around(fake_cupy([], matmul=refuses("no libcublas.so"), cuda=13000), lambda: "compiled")
    assert not found.has_cublas
    assert found.missing[0].startswith("cuBLAS cannot be used (no libcublas.so)")
    assert "pip install 'cupy-cuda13x[ctk]'" in found.missing[0]
    with pytest.raises(DeviceError, match=r"NVRTC cannot be loaded \(no libnvrtc\); pip install 'cupy-cuda12x\[ctk\]'"):
        look_around(fake_cupy([], nvrtc=refuses("no libnvrtc")), lambda: "compiled")
    with pytest.raises(DeviceError, match=r"no kernel can be compiled \(no cuda_fp16.h\)"):
        look_around(fake_cupy([]), refuses("no cuda_fp16.h"))


@pytest.mark.parametrize(
    ("cupy", "arguments", "message"),
    [
        (None, [], "CuPy cannot be imported"),
        (fake_cupy([], available=False), ["--quick"], "CuPy finds no usable GPU"),
        (None, ["--json", "nowhere/at/all.json"], "the folder nowhere/at does not exist"),
    ],
)
def test_without_a_gpu_one_line_and_exit_code_2(
    cupy: Any, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    assert main(["gpu-check", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert message in captured.err


# ---- probes -----------------------------------------------------------------------------------------------------


@needs_gxx
@pytest.mark.parametrize("chunks", [1, 300_000, 1_900_001])
def test_read_all_reads_every_byte_once(chunks: int) -> None:
    reports: list[LaunchReport] = []
    loader = emulated_loader("check", on_launch=reports.append, source=probe_source)
    data = np.random.default_rng(0).integers(0, 2**32, 4 * chunks, np.uint32)
    found = read_all(loader, data)
    assert np.bitwise_xor.reduce(found) == np.bitwise_xor.reduce(data)
    assert reports[0].argument("data").read.bytes == data.nbytes
    assert reports[0].argument("data").read.sectors == -(-data.nbytes // 32)
    with pytest.raises(DeviceError, match="12 bytes; supported are multiples of 16"):
        read_all(loader, data[:3])


@pytest.mark.parametrize("arch", [70, 90, 120])
@pytest.mark.parametrize("name", ["wait_nanoseconds", "read_all"])
def test_the_probes_compile_with_nvidia_s_compiler(name: str, arch: int) -> None:
    try:
        kernel = Nvrtc().compile(name, {}, arch, source=probe_source(name))
    except DeviceError as error:
        if "no wheel" not in str(error):
            raise
        pytest.skip("needs NVIDIA's compiler: pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12")
    assert kernel.spill_bytes == 0
