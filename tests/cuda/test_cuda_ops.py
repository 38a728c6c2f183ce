"""CudaOps: the same interface as the reference, and whole models through the kernels under the emulator."""

from __future__ import annotations

import inspect
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.batch import BatchBuilder
from cupyllm.checkpoint import Checkpoint
from cupyllm.config import EngineConfig
from cupyllm.cuda.emulator import LaunchReport
from cupyllm.cuda.loader import KernelLoader, emulated_loader
from cupyllm.device import HostDevice
from cupyllm.engine import Engine
from cupyllm.errors import DeviceError
from cupyllm.kv_cache import allocate_kv_cache
from cupyllm.model import Model, forward, logits, make_model
from cupyllm.model_config import GenerationDefaults, read_model_config
from cupyllm.ops.cuda import CudaOps, check_model
from cupyllm.ops.reference import ReferenceOps
from cupyllm.plan import Plan
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence
from cupyllm.simulator.known_models import find_model
from cupyllm.weights import load_weights, random_weights, weight_bytes
from tests.cuda.kernel_case import EPSILON
from tests.engine_case import make_engine, run_to_end
from tests.tiny_checkpoint import write_tiny_checkpoint

needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")
OPS = [name for name, value in vars(ReferenceOps).items() if callable(value) and not name.startswith("_")]
DEVICE = HostDevice()


@pytest.mark.parametrize("name", OPS)
def test_every_op_is_overridden_with_the_same_signature(name: str) -> None:
    assert name in vars(CudaOps), f"CudaOps would run {name} on NumPy"
    assert inspect.signature(getattr(CudaOps, name)) == inspect.signature(getattr(ReferenceOps, name))


def test_there_are_no_other_ops() -> None:
    assert {name for name in vars(CudaOps) if not name.startswith("_")} - set(OPS) == {"name"}


SHAPES: dict[str, dict[str, Any]] = {
    "qwen2": {"num_heads": 4, "num_kv_heads": 2, "hidden_size": 256, "intermediate_size": 200},
    "qwen2, 7 heads a group": {"num_heads": 7, "num_kv_heads": 1, "hidden_size": 448, "intermediate_size": 64},
    "qwen3": {"model_type": "qwen3", "num_heads": 4, "num_kv_heads": 2, "head_size": 64, "hidden_size": 64},
    "qwen3, head size 128": {"model_type": "qwen3", "num_heads": 2, "num_kv_heads": 1, "head_size": 128},
    "qwen2, window": {
        "num_heads": 2, "num_kv_heads": 1, "hidden_size": 128, "use_sliding_window": True, "sliding_window": 9,
        "max_window_layers": 1,
    },
}  # fmt: skip


def kernel_engine(folder: Path, dtype: str, loader: KernelLoader, **config: Any) -> Engine:
    """An engine over CudaOps whose cache is large enough for these tests."""
    model_config = read_model_config(folder)
    weights = load_weights(Checkpoint.open(folder), model_config, dtype=dtype, upload=DEVICE.upload)
    return Engine(
        EngineConfig(**config),
        make_model(model_config, weights, DEVICE, num_positions=512),
        allocate_kv_cache(DEVICE, model_config, num_pages=32, page_size=16, dtype=dtype),
        CudaOps(loader, DEVICE),
        DEVICE,
        max_model_len=512,
        vocab_limit=model_config.vocab_size,
        defaults=GenerationDefaults(temperature=0.0),
    )


def reference_model(folder: Path) -> Model:
    config = read_model_config(folder)
    weights = load_weights(Checkpoint.open(folder), config, dtype="float32", upload=DEVICE.upload)
    return make_model(config, weights, DEVICE, num_positions=512)


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", SHAPES)
def test_a_small_model_answers_as_with_the_reference(name: str, dtype: str, tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", dtype=dtype, seed=5, **SHAPES[name])
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 500, length).tolist() for length in (1, 5, 70, 16, 33)]
    greedy = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=5)
    seeded = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=6, ignore_eos=True, logprobs=5)
    engine = kernel_engine(folder, dtype, emulated_loader("fast"), max_step_tokens=80, max_decode_batch_size=8)
    reference = make_engine(reference_model(folder), page_size=16, max_step_tokens=80, max_decode_batch_size=8)
    runs = []
    for one in (engine, reference):
        for prompt in prompts:
            one.add(prompt, greedy)
        one.add(prompts[2], seeded)
        runs.append(collect(one))
    assert_alike(runs[0], runs[1], dtype)


class TakingTurns:
    """A guide that allows even ids, then odd ones, and so on."""

    def __init__(self) -> None:
        self._turn = 0

    def start(self) -> TakingTurns:
        return TakingTurns()

    def allow(self, words: np.ndarray) -> bool:
        words[:] = (0x55555555, 0xAAAAAAAA)[self._turn]
        return True

    def advance(self, token_id: int) -> None:
        assert token_id % 2 == self._turn
        self._turn = 1 - self._turn


@needs_gxx
def test_a_small_model_answers_what_requests_allow_and_reads_prompts_as_with_the_reference(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", dtype="float16", seed=5, **SHAPES["qwen2"])
    prompt = np.random.default_rng(0).integers(0, 500, 70).tolist()
    common: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    asked = [
        SamplingParams(**common),
        SamplingParams(**common, frequency_penalty=-2.0, presence_penalty=-2.0),  # what was said is said again
        SamplingParams(**common, allowed_token_ids=[7, 31, 32, 200, 498], frequency_penalty=2.0),
        SamplingParams(**common, guide=TakingTurns(), logit_bias={5: 100.0, 6: 100.0}, repetition_penalty=1.2),
        SamplingParams(**common, prompt_logprobs=3, bad_word_ids=((100, 88),), min_tokens=5, stop_token_ids=[97]),
    ]
    switches: dict[str, Any] = {"page_size": 16, "max_step_tokens": 80, "max_decode_batch_size": 8}
    found = []
    for engine in (
        kernel_engine(folder, "float16", emulated_loader("fast"), **switches),
        make_engine(reference_model(folder), **switches),
    ):
        sequences = [engine.add(prompt, one) for one in asked]
        pooled = [engine.add_embedding(prompt[:33], "last"), engine.add_embedding(prompt, "mean")]
        run_to_end(engine)
        found.append((sequences, pooled))
    (ours, our_pooled), (theirs, their_pooled) = found
    assert [sequence.output_ids for sequence in ours] == [sequence.output_ids for sequence in theirs]
    assert ours[0].output_ids[:3] == [100, 88, 97], "what the last request forbids"
    assert len({tuple(sequence.output_ids) for sequence in ours}) == len(asked), "each request has an effect"
    assert [token_id % 2 for token_id in ours[3].output_ids] == [0, 1] * 4
    for one, other in zip(ours[4].readout.logprobs[1:], theirs[4].readout.logprobs[1:], strict=True):
        np.testing.assert_allclose(one.logprob, other.logprob, atol=64 * EPSILON["fp16"])
        top = [[value for _, value in logprobs.top] for logprobs in (one, other)]
        np.testing.assert_allclose(*top, atol=64 * EPSILON["fp16"])
    for one, other in zip(our_pooled, their_pooled, strict=True):
        expected = other.readout.embedding
        size = np.abs(expected).max()
        np.testing.assert_allclose(one.readout.embedding / size, expected / size, atol=16 * EPSILON["fp16"])


@needs_gxx
@pytest.mark.parametrize("count", [-1, 0, 5])
def test_token_logprobs_are_those_of_the_reference(count: int) -> None:
    logits = np.random.default_rng(1).standard_normal((4, 307)).astype(np.float32) * 3
    token_ids = np.array([0, 299, -1, 150], np.int32)
    logits[0, 10:290] = -np.inf
    ours, theirs = (
        ops.token_logprobs(logits, token_ids, count, vocab_limit=300)
        for ops in (CudaOps(emulated_loader("check"), DEVICE), ReferenceOps())
    )
    np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    for name in ("logprobs", "top_logprobs"):
        actual, expected = getattr(ours, name), getattr(theirs, name)
        assert actual.shape == expected.shape
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def collect(engine: Engine) -> dict[int, list[Any]]:
    """Sequence id -> its events, in order."""
    found: dict[int, list[Any]] = {}
    for event in run_to_end(engine):
        found.setdefault(event.sequence.id, []).append(event)
    return found


def assert_alike(kernels: dict[int, list[Any]], reference: dict[int, list[Any]], dtype: str) -> None:
    """The same tokens, and log-probabilities within rounding of the cache, until two tokens are closer than that."""
    # 64 epsilons: logits reach 10, and every operand of two layers' products is rounded to the type.
    tolerance = 64 * EPSILON[{"float16": "fp16", "bfloat16": "bf16"}[dtype]]
    compared = 0
    for sequence_id, events in reference.items():
        for ours, theirs in zip(kernels[sequence_id], events, strict=True):
            values = [value for _, value in theirs.logprobs.top]
            np.testing.assert_allclose([v for _, v in ours.logprobs.top], values, rtol=0, atol=tolerance)
            tied = theirs.sequence.params.temperature > 0 or values[0] - values[1] < 2 * tolerance
            if tied and ours.token_id != theirs.token_id:
                break  # closer than rounding: from here on the texts differ
            assert ours.token_id == theirs.token_id
            compared += 1
    assert compared > 20, "hardly anything was compared"


@needs_gxx
def test_every_kernel_of_a_run_is_clean_in_check_mode(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", dtype="bfloat16", num_layers=1, **SHAPES["qwen2"])
    engine = kernel_engine(folder, "bfloat16", emulated_loader("check"), max_step_tokens=80)
    params = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.1, seed=1, max_tokens=3, ignore_eos=True)
    for length in (3, 66):
        engine.add(list(range(length)), params)
    engine.add_parallel(list(range(20)), [params, params])
    assert len(run_to_end(engine)) == 12


@needs_gxx
def test_a_decode_step_of_the_half_billion_shapes_reads_each_byte_once_in_six_launches_a_layer() -> None:
    config = find_model("qwen2.5-0.5b")
    reports: list[LaunchReport] = []
    loader = emulated_loader("check", on_launch=reports.append)
    weights = random_weights(config, dtype="bfloat16", seed=0, upload=DEVICE.upload)
    model = make_model(config, weights, DEVICE, num_positions=512)
    context = 128
    cache = allocate_kv_cache(DEVICE, config, num_pages=9, page_size=16, dtype="bfloat16")
    sequence = Sequence(0, [1] * context, 1, SamplingParams(), 0, 1000, frozenset(), page_table=list(range(9)))
    sequence.num_computed = context - 1
    batch = BatchBuilder(16).build(Plan([sequence], [], []))
    ops = CudaOps(loader, DEVICE)
    scores = logits(ops, model, forward(ops, model, cache, batch), batch.logit_rows)
    assert scores.shape == (1, config.vocab_size)
    names = [report.kernel for report in reports]
    assert len(names) - 3 <= 6 * config.num_layers, "beside embedding, row choice and head"
    # Every block reads the activations, at most 100 KB: after the first time they come from the L2 cache, of which the
    # smallest GPU meant here has megabytes. Weights and cache pages count as often as they are read.
    moved = sum(a.bytes_from_memory(cache_bytes=100_000) for report in reports for a in report.arguments)
    kv = 2 * config.num_layers * context * config.num_kv_heads * config.head_size * 2
    assert moved <= 1.05 * (weight_bytes(config, "bfloat16") + kv)
    assert moved >= weight_bytes(config, "bfloat16"), "every weight is read"


@pytest.mark.parametrize(
    ("changes", "page_size", "named"),
    [
        ({}, 16, "head size 16 (64 and 128)"),
        ({"hidden_size": 60, "num_heads": 3, "num_kv_heads": 1}, 16, "hidden_size 60 (multiples of 8)"),
        ({"num_heads": 34, "num_kv_heads": 2, "hidden_size": 2176}, 16, "17 query heads for each KV head (up to 16)"),
        ({"num_heads": 1, "num_kv_heads": 1}, 4, "page_size 4 (16 and 32)"),
        ({"num_heads": 1, "num_kv_heads": 1, "intermediate_size": 100}, 16, "intermediate_size 100 (multiples of 8)"),
    ],
)
def test_a_model_without_kernels_is_refused_before_it_loads(
    changes: dict[str, Any], page_size: int, named: str, tmp_path: Path
) -> None:
    config = read_model_config(write_tiny_checkpoint(tmp_path / "model", **changes))
    with pytest.raises(DeviceError, match=re.escape(named)):
        check_model(config, page_size)
