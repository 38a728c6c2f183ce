"""The compiled CPU kernels against the reference, for every instruction set that this machine has and every type of
weights; and that no row's result depends, not in one bit, on the rows beside it."""

from __future__ import annotations

import gc
import inspect
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm import LLM, SamplingParams
from cupyllm.batch import Batch
from cupyllm.errors import ConfigError, DeviceError
from cupyllm.model_config import read_model_config
from cupyllm.number_formats import bfloat16_to_float32, float32_to_bfloat16
from cupyllm.ops.reference import Norm, ReferenceOps
from tests.engine_case import load_model, make_engine, run_to_end
from tests.ops.test_reference_ops import make_batch, random
from tests.tiny_checkpoint import write_tiny_checkpoint

pytest.importorskip("numba", reason="needs numba: pip install 'cupyllm[cpu]'")

from cupyllm.ops.cpu.backend import check_model, make_int8, make_ops
from cupyllm.ops.cpu.isa import available
from cupyllm.ops.cpu.ops import CpuOps

REFERENCE = ReferenceOps()
BEST = available()[0]
OPS = [name for name, value in vars(ReferenceOps).items() if callable(value) and not name.startswith("_")]
# Every instruction set with bf16 weights, and the best with the other types.
KINDS = [(isa, "bfloat16") for isa in available()] + [(BEST, "float16"), (BEST, "float32")]
EACH_KIND = pytest.mark.parametrize(("isa", "dtype"), KINDS, ids=[f"{isa.name}-{dtype}" for isa, dtype in KINDS])
EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


def stored(values: np.ndarray, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """The values in a type of weights, and what they are then as float32."""
    if dtype == "bfloat16":
        bits = float32_to_bfloat16(values)
        return bits, bfloat16_to_float32(bits)
    return values.astype(dtype), values.astype(dtype).astype(np.float32)


def widened(array: np.ndarray) -> np.ndarray:
    return bfloat16_to_float32(array) if array.dtype == np.uint16 else array.astype(np.float32)


def product_tolerance(ops: CpuOps, dtype: str, x: np.ndarray, weight: np.ndarray) -> float:
    """Products of bf16 in one instruction round activations to bf16; all else rounds sums of float32 only."""
    rounds = dtype == "bfloat16" and ops.isa.bf16_dot
    epsilon = EPSILON["bfloat16"] if rounds else 16 * EPSILON["float32"]
    return float(epsilon * (np.abs(x) @ np.abs(weight).T).max())


@pytest.mark.parametrize("name", OPS)
def test_every_op_has_the_signature_of_the_reference(name: str) -> None:
    assert inspect.signature(getattr(CpuOps, name)) == inspect.signature(getattr(ReferenceOps, name))


@EACH_KIND
@pytest.mark.parametrize("num_tokens", [1, 3, 16, 17, 70])
def test_linear(isa: Any, dtype: str, num_tokens: int) -> None:
    ops = CpuOps(isa, 2)
    weight, wide = stored(random(371, 64), dtype)  # not a multiple of 4 rows, and more than one block
    bias, wide_bias = stored(random(371, seed=1), dtype)
    x, residual, norm = random(num_tokens, 64, seed=2), random(num_tokens, 371, seed=3), Norm(random(64, seed=4), 1e-6)
    expected = REFERENCE.linear(x, wide, wide_bias, norm=norm, residual=residual)
    kept = residual.copy()
    y = ops.linear(x, weight, bias, norm=norm, residual=residual)
    tolerance = product_tolerance(ops, dtype, REFERENCE.rms_norm(x, norm), wide)
    np.testing.assert_allclose(y, expected, rtol=0, atol=tolerance)
    np.testing.assert_array_equal(residual, kept, err_msg="an op changes no argument")
    plain = ops.linear(x, weight)
    np.testing.assert_allclose(plain, REFERENCE.linear(x, wide), rtol=0, atol=product_tolerance(ops, dtype, x, wide))


@EACH_KIND
@pytest.mark.parametrize("num_tokens", [2, 41])
def test_gate_up_silu_mul(isa: Any, dtype: str, num_tokens: int) -> None:
    ops = CpuOps(isa, 2)
    weight, wide = stored(random(2 * 203, 64) / 8, dtype)
    x, norm = random(num_tokens, 64, seed=2), Norm(random(64, seed=4), 1e-6)
    tolerance = product_tolerance(ops, dtype, REFERENCE.rms_norm(x, norm), wide)
    largest = np.abs(REFERENCE.linear(x, wide, norm=norm)).max()
    np.testing.assert_allclose(
        ops.gate_up_silu_mul(x, weight, norm=norm),
        REFERENCE.gate_up_silu_mul(x, wide, norm=norm),
        rtol=0,
        atol=2 * tolerance * largest,  # both factors are off by the tolerance
    )


@EACH_KIND
def test_embedding_and_logits(isa: Any, dtype: str) -> None:
    ops = CpuOps(isa, 2)
    table, wide = stored(random(50, 64), dtype)
    x, norm = random(5, 64, seed=1), Norm(random(64, seed=2), 1e-6)
    np.testing.assert_array_equal(ops.embedding(np.array([49, 0, 7], np.int32), table), wide[[49, 0, 7]])
    rows = np.array([4, 1], np.int32)
    tolerance = product_tolerance(ops, dtype, REFERENCE.rms_norm(x, norm), wide)
    expected = REFERENCE.logits(x, wide, rows=rows, norm=norm)
    np.testing.assert_allclose(ops.logits(x, table, rows=rows, norm=norm), expected, rtol=0, atol=tolerance)


def test_rms_norm_and_silu_mul_alone_and_their_extremes() -> None:
    ops = CpuOps(BEST, 2)
    x, norm = random(2, 3, 48), Norm(random(48, seed=1), 1e-6)
    np.testing.assert_allclose(ops.rms_norm(x, norm), REFERENCE.rms_norm(x, norm), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(ops.rms_norm(np.zeros((1, 48), np.float32), norm), np.zeros((1, 48)))
    gate_up = np.concatenate([np.linspace(-120, 120, 4001), np.ones(4001)]).astype(np.float32)[None]
    np.testing.assert_allclose(ops.silu_mul(gate_up), REFERENCE.silu_mul(gate_up), rtol=1e-6, atol=1e-36)
    extreme = np.array([[-1e4, 1e4, -np.inf, np.nan, 2.0, 3.0, 1.0, 1.0]], np.float32)
    np.testing.assert_array_equal(ops.silu_mul(extreme)[0, [0, 1]], [0.0, 3e4])
    assert np.isnan(ops.silu_mul(extreme)[0, 3]), "a NaN goes on to where it is reported"


@EACH_KIND
@pytest.mark.parametrize("head_norms", [False, True], ids=["qwen2", "qwen3"])
def test_rope_and_kv_write(isa: Any, dtype: str, head_norms: bool) -> None:
    ops, batch = CpuOps(isa, 2), make_batch([(6, 1), (0, 25)], [[8, 1], [0, 2, 3, 4, 5, 6, 7]], 4)
    norms = {f"{one}_norm": Norm(random(64, seed=5), 1e-6) if head_norms else None for one in "qk"}
    table, qkv = random(32, 64, seed=9), random(26, (6 + 2 * 2) * 64)
    keys, _ = stored(np.full((9, 4, 2, 64), 7.0, np.float32), dtype)
    values, wide_keys = keys.copy(), np.full((9, 4, 2, 64), 7.0, np.float32)
    wide_values = wide_keys.copy()
    q = ops.rope_and_kv_write(qkv, table, batch, keys, values, **norms)
    expected = REFERENCE.rope_and_kv_write(qkv, table, batch, wide_keys, wide_values, **norms)
    np.testing.assert_allclose(q, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(widened(keys), wide_keys, rtol=EPSILON[dtype], atol=1e-5)
    np.testing.assert_array_equal(values, stored(wide_values, dtype)[0], err_msg="rounded to nearest even")


def attention_case(dtype: str, page_size: int, heads: int, kv_heads: int, head_size: int) -> tuple[Any, ...]:
    """q, the cache in its type and as float32, and a batch of decode rows and chunks whose pages are shuffled."""
    chunks = [(3, 1), (63, 1), (64, 1), (0, 1), (200, 1), (0, 6), (5, 70), (60, 20)]
    pages = np.random.default_rng(1).permutation(sum(-(-sum(chunk) // page_size) for chunk in chunks)).tolist()
    page_tables = [[pages.pop() for _ in range(-(-sum(chunk) // page_size))] for chunk in chunks]
    batch = make_batch(chunks, page_tables, page_size)
    shape = (sum(map(len, page_tables)), page_size, kv_heads, head_size)
    keys, values = (random(*shape, seed=seed) for seed in (1, 2))
    for (start, length), table in zip(chunks, page_tables, strict=True):  # what nobody has written yet is poison
        used = (start + length - 1) % page_size + 1
        keys[table[-1], used:] = values[table[-1], used:] = np.nan
    q = random(len(batch.positions), heads, head_size)
    return q, batch, stored(keys, dtype), stored(values, dtype)


@EACH_KIND
@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize("page_size", [3, 16])
def test_paged_attention(isa: Any, dtype: str, window: int | None, page_size: int) -> None:
    q, batch, (keys, wide_keys), (values, wide_values) = attention_case(dtype, page_size, 14, 2, 64)
    out = CpuOps(isa, 2).paged_attention(q, keys, values, batch, window=window)
    expected = REFERENCE.paged_attention(q, wide_keys, wide_values, batch, window=window)
    np.testing.assert_allclose(out, expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize(("heads", "kv_heads", "head_size"), [(4, 4, 128), (3, 1, 48), (8, 1, 16)])
def test_paged_attention_of_other_shapes(heads: int, kv_heads: int, head_size: int) -> None:
    q, batch, (keys, wide_keys), (values, wide_values) = attention_case("bfloat16", 16, heads, kv_heads, head_size)
    out = CpuOps(BEST, 2).paged_attention(q, keys, values, batch)
    np.testing.assert_allclose(out, REFERENCE.paged_attention(q, wide_keys, wide_values, batch), rtol=0, atol=5e-6)


@EACH_KIND
def test_a_rows_product_is_the_same_alone_and_in_any_batch(isa: Any, dtype: str) -> None:
    ops = CpuOps(isa, 2)
    weight, _ = stored(random(370, 64), dtype)
    x, norm = random(70, 64, seed=2), Norm(random(64, seed=4), 1e-6)
    for op in (
        lambda rows: ops.linear(rows, weight, norm=norm),
        lambda rows: ops.gate_up_silu_mul(rows, weight, norm=norm),
    ):
        alone = np.concatenate([op(x[t : t + 1]) for t in range(70)])
        for size in (2, 5, 16, 17, 70):
            np.testing.assert_array_equal(op(x[:size]), alone[:size])


@EACH_KIND
def test_a_product_of_long_rows_is_right_and_the_same_in_any_batch(isa: Any, dtype: str) -> None:
    ops, length = CpuOps(isa, 2), 4160  # longer than the pieces that a few and many tokens are taken in
    weight, wide = stored(random(39, length) / 8, dtype)
    x = random(70, length, seed=2)
    alone = np.concatenate([ops.linear(x[t : t + 1], weight) for t in range(70)])
    np.testing.assert_allclose(alone, REFERENCE.linear(x, wide), rtol=0, atol=product_tolerance(ops, dtype, x, wide))
    for size in (2, 4, 5, 8, 9, 16, 17, 70):
        np.testing.assert_array_equal(ops.linear(x[:size], weight), alone[:size])


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("page_size", [3, 16])
def test_a_querys_attention_is_the_same_in_a_prompt_and_as_a_decode_row(window: int | None, page_size: int) -> None:
    q, batch, (keys, _), (values, _) = attention_case("bfloat16", page_size, 14, 2, 64)
    ops = CpuOps(BEST, 2)
    together = ops.paged_attention(q, keys, values, batch, window=window)
    for s, context_len in enumerate(batch.context_lens.tolist()):
        first, last = batch.query_starts[s : s + 2].tolist()
        for row in range(first, last):
            alone = Batch(
                *(np.zeros(1, np.int32),) * 3,
                query_starts=np.array([0, 1], np.int32),
                context_lens=np.array([context_len - (last - 1 - row)], np.int32),
                page_tables=batch.page_tables[s : s + 1],
                logit_rows=np.zeros(1, np.int32),
                num_decodes=1,
                max_query_len=1,
                max_context_len=context_len,
            )
            np.testing.assert_array_equal(
                ops.paged_attention(q[row : row + 1], keys, values, alone, window=window)[0], together[row]
            )


@pytest.mark.parametrize("isa", available(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("num_tokens", [1, 3, 70])
def test_int8_products_are_those_of_the_quantised_numbers(isa: Any, num_tokens: int) -> None:
    ops, weight = CpuOps(isa, 2), random(374, 128) / 8
    matrix, bias = ops.quantise(weight), random(374, seed=1)
    rounded = matrix.dequantised()
    assert (matrix.shape, len(matrix), matrix.nbytes) == (weight.shape, 374, 374 * 132)
    steps = np.abs(weight.reshape(374, 2, 64)).max(axis=2, keepdims=True) / 127
    assert np.all(np.abs(rounded - weight).reshape(374, 2, 64) <= 0.51 * steps), "to the nearest, scales being bf16"
    x, norm = random(num_tokens, 128, seed=2), Norm(random(128, seed=3), 1e-6)
    x[0, 5] = 1e4  # a large activation takes precision from its own group only
    normed = REFERENCE.rms_norm(x, norm).reshape(num_tokens, 2, 64)
    scales = np.abs(normed).max(axis=2, keepdims=True) / 127
    quantised = (np.rint(normed / scales) * scales).reshape(num_tokens, 128)
    y = ops.linear(x, matrix, bias, norm=norm)
    np.testing.assert_allclose(y, quantised @ rounded.T + bias, rtol=1e-4, atol=1e-4)
    hidden = ops.gate_up_silu_mul(x, matrix, norm=norm)
    np.testing.assert_allclose(hidden, REFERENCE.silu_mul(quantised @ rounded.T), rtol=1e-3, atol=1e-3)
    for t in range(num_tokens):
        np.testing.assert_array_equal(ops.linear(x[t : t + 1], matrix, bias, norm=norm)[0], y[t])
        np.testing.assert_array_equal(ops.gate_up_silu_mul(x[t : t + 1], matrix, norm=norm)[0], hidden[t])
    np.testing.assert_array_equal(ops.embedding(np.array([373, 0], np.int32), matrix), rounded[[373, 0]])


@pytest.mark.parametrize("isa", available(), ids=lambda isa: isa.name)
@pytest.mark.parametrize("length", [1024, 1088, 2240, 4096])
def test_int8_rows_of_whole_bundles_and_of_some_groups_more(isa: Any, length: int) -> None:
    ops, weight = CpuOps(isa, 2), random(21, length) / 8
    weight[:, -64:] *= 50  # the last group counts, whatever it is put beside
    matrix, x = ops.quantise(weight), random(40, length, seed=2)
    rounded = matrix.dequantised()
    steps = np.abs(weight.reshape(21, -1, 64)).max(axis=2, keepdims=True) / 127
    assert np.all(np.abs(rounded - weight).reshape(21, -1, 64) <= 0.51 * steps)
    groups = x.reshape(40, -1, 64)
    scales = np.abs(groups).max(axis=2, keepdims=True) / 127
    expected = (np.rint(groups / scales) * scales).reshape(40, length).astype(np.float64) @ rounded.T
    alone = np.concatenate([ops.linear(x[t : t + 1], matrix) for t in range(40)])
    np.testing.assert_allclose(alone, expected, rtol=0, atol=1e-5 * float(np.abs(expected).max()))
    for size in (2, 5, 8, 9, 16, 17, 40):
        np.testing.assert_array_equal(ops.linear(x[:size], matrix), alone[:size])
    np.testing.assert_array_equal(ops.embedding(np.array([20, 0], np.int32), matrix), rounded[[20, 0]])


def test_int8_keeps_what_is_not_finite_and_zeros() -> None:
    ops = CpuOps(BEST, 1)
    matrix = ops.quantise(np.concatenate([np.zeros((1, 64), np.float32), random(7, 64)]))
    x = random(3, 64, seed=1)
    x[0], x[1, 3], x[2, 9] = 0.0, np.nan, np.inf
    y = ops.linear(x, matrix)
    np.testing.assert_array_equal(y[0], np.zeros(8))
    assert np.isnan(y[1:]).all()


def logprobs_of(engine: Any, prompts: list[list[int]]) -> list[Any]:
    """Tokens and log-probabilities of a few steps of every prompt, all added at once."""
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=5)
    found: dict[int, list[Any]] = {engine.add(prompt, params).id: [] for prompt in prompts}
    for event in run_to_end(engine):
        found[event.sequence.id].append((event.token_id, event.logprobs))
    return list(found.values())


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logprobs_are_the_same_to_the_last_bit_alone_together_and_in_chunks(
    model_type: str, dtype: str, tmp_path: Path
) -> None:
    folder = write_tiny_checkpoint(tmp_path / "model", model_type=model_type, dtype=dtype)
    model, ops = load_model(folder, dtype=dtype), make_ops("auto", 2)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 500, length).tolist() for length in (1, 5, 90, 16, 33)]
    alone = [logprobs_of(make_engine(model, ops=ops), [prompt])[0] for prompt in prompts]
    assert logprobs_of(make_engine(model, ops=ops), prompts) == alone
    assert logprobs_of(make_engine(model, ops=ops, max_step_tokens=33), prompts) == alone
    reference = make_engine(load_model(folder), max_step_tokens=33)
    tops = [[logprobs.top for _, logprobs in answer] for answer in logprobs_of(reference, prompts)]
    ours = [[logprobs.top for _, logprobs in answer] for answer in alone]
    np.testing.assert_allclose(  # log-probabilities of ten or so; bf16 products round activations to 8 bits
        [value for answer in ours for _, value in answer[0]],
        [value for answer in tops for _, value in answer[0]],
        rtol=0,
        atol=0.3 if dtype == "bfloat16" else 1e-3,
    )


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@EACH_KIND
def test_a_whole_layer_is_its_ops_one_after_another_to_the_last_bit(
    isa: Any, dtype: str, model_type: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 72, "intermediate_size": 96, "head_size": 16, "num_heads": 6}  # lanes differ by width
    window = {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}
    folder = write_tiny_checkpoint(tmp_path / "model", model_type=model_type, dtype=dtype, **sizes, **window)
    model, rng = load_model(folder, dtype=dtype), np.random.default_rng(0)
    prompts = [rng.integers(0, 500, length).tolist() for length in (1, 5, 90, 33)]
    whole, single = CpuOps(isa, 2), CpuOps(isa, 2)
    single.whole_layer = None
    answers = logprobs_of(make_engine(model, ops=whole, max_step_tokens=33), prompts)
    assert answers == logprobs_of(make_engine(model, ops=single, max_step_tokens=33), prompts)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same(threads: int) -> None:
    weight, x = random(1000, 64), random(40, 64, seed=1)
    np.testing.assert_array_equal(CpuOps(BEST, threads).linear(x, weight), CpuOps(BEST, 2).linear(x, weight))


def test_callers_from_several_threads_do_not_disturb_each_other() -> None:
    shared, own, x = CpuOps(BEST, 2), CpuOps(BEST, 2), random(3, 64)
    weights = [random(500, 64, seed=seed) for seed in range(4)]
    expected = [REFERENCE.linear(x, weight) for weight in weights]
    wrong: list[int] = []

    def call(ops: CpuOps, place: int) -> None:
        for _ in range(300):
            if not np.allclose(ops.linear(x, weights[place]), expected[place], rtol=0, atol=1e-4):
                wrong.append(place)

    threads = [threading.Thread(target=call, args=(ops, place)) for place, ops in enumerate([shared, shared, own, own])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_threads_end_with_the_ops_that_own_them() -> None:
    before = set(threading.enumerate())
    ops = CpuOps(BEST, 3)
    ops.linear(random(1, 64), random(8, 64))
    members = set(threading.enumerate()) - before
    assert len(members) == 2
    del ops
    gc.collect()
    for member in members:
        member.join(timeout=30)
        assert not member.is_alive()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to see whether a thread sleeps")
def test_idle_threads_sleep() -> None:
    before = set(threading.enumerate())
    ops = CpuOps(BEST, 2)
    ops.linear(random(1, 64), random(8, 64))
    (member,) = set(threading.enumerate()) - before
    stat = Path(f"/proc/self/task/{member.native_id}/stat")
    deadline, asleep = time.monotonic() + 60, 0
    while asleep < 20:  # looks in a row, 5 ms apart: a thread that looks for work runs or waits for a processor
        assert time.monotonic() < deadline, "the thread still runs"
        asleep = asleep + 1 if stat.read_text().rsplit(")", 1)[1].split()[0] == "S" else 0
        time.sleep(0.005)


def test_what_the_machine_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match=r"threads 100000: this process may use \d+ processors"):
        make_ops("auto", 100_000)
    with pytest.raises(ConfigError, match="cpu_isa"):
        LLM("demo", cpu_isa="mmx")
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        LLM("demo", kv_cache_dtype="int3")
    with pytest.raises(ConfigError, match='"bfloat16" is not supported on device "reference" with weights in float32'):
        LLM("demo", device="reference", kv_cache_dtype="bfloat16")
    with pytest.raises(ConfigError, match='weights "int8" is not supported on reference'):
        LLM("demo", device="reference", weights="int8")
    narrow = read_model_config(write_tiny_checkpoint(tmp_path / "narrow"))
    with pytest.raises(
        DeviceError, match='weights "int8" needs multiples of 64, and this model has intermediate_size 96'
    ):
        make_int8(make_ops("auto", 1), narrow)
    odd = read_model_config(write_tiny_checkpoint(tmp_path / "model", intermediate_size=100))
    with pytest.raises(DeviceError, match='intermediate_size 100; use device "reference"'):
        check_model(odd, 16)


def test_an_auto_cache_takes_what_int8_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cupyllm.device.HostDevice.free_bytes", lambda self: 16 * 2**20)
    llm = LLM("demo", device="cpu", weights="int8", kv_cache_gib="auto")
    weights, cache = llm.engine.runner.model.weights, llm.engine.runner.cache
    arrays = [weights.embedding, weights.final_norm, *(a for w in weights.layers for a in vars(w).values())]
    held = sum(array.nbytes for array in arrays if array is not None)
    page_bytes = 2 * len(cache.keys) * cache.keys[0][0].nbytes
    assert cache.num_pages == int(0.9 * 16 * 2**20 - held) // page_bytes


def test_int8_weights_of_the_demo_model_take_half_the_memory_and_answer_alike() -> None:
    question, greedy = [{"role": "user", "content": "What is a page table?"}], SamplingParams(temperature=0)
    int8, bf16 = (LLM("demo", device="cpu", weights=weights, kv_cache_gib=0.05) for weights in ("int8", "as stored"))
    sizes = [llm.engine.runner.model.weights.layers[0].gate_up.nbytes for llm in (int8, bf16)]
    assert sizes[0] < 0.52 * sizes[1]
    answers = [llm.chat(question, greedy)[0].outputs[0].text for llm in (int8, bf16)]
    assert answers[0].split()[:8] == answers[1].split()[:8]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "bfloat16"])
def test_the_demo_model_answers_as_with_the_reference(kv_cache_dtype: str) -> None:
    question, greedy = [{"role": "user", "content": "What is a page table?"}], SamplingParams(temperature=0)
    ours = LLM("demo", device="cpu", kv_cache_dtype=kv_cache_dtype, kv_cache_gib=0.05)
    theirs = LLM("demo", device="reference", kv_cache_gib=0.05)
    assert ours.engine.runner.cache.keys[0].dtype == (np.uint16 if kv_cache_dtype == "bfloat16" else np.float32)
    assert isinstance(ours.engine.runner.ops, CpuOps)
    assert ours.chat(question, greedy)[0].outputs[0].text == theirs.chat(question, greedy)[0].outputs[0].text
