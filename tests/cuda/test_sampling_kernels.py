"""The sampling kernels against the reference op: the same tokens, the same filters, the same log-probabilities.

Small vocabularies run in the emulator's check mode, a Qwen-sized one in both modes. Random logits are built so that no
token lies at the very edge of top-p or min-p, where the last bits of an exponential would decide.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_case import EPSILON, CheckedLaunches, total_bytes

from cupyllm.cuda import adjust_logits, argmax, draw, group_maxima, top_logprobs
from cupyllm.cuda.emulator import guarded_copy
from cupyllm.cuda.loader import KernelLoader, emulated_loader
from cupyllm.cuda.sample import choose_of_rows, sample, upload_sampling
from cupyllm.errors import DeviceError
from cupyllm.ops.reference import ReferenceOps
from cupyllm.ops.sample_reference import adjusted, candidates
from cupyllm.philox import token_uniforms
from cupyllm.row_sampling import RowSampling
from cupyllm.sampling_batch import SampleResult, SamplingBatch, build_sampling_batch
from cupyllm.sequence import Sequence
from cupyllm.token_guide import AllowedIds
from tests.sampling_case import on_the_device, penalised_rows, row

V = 50
QWEN_V = 151_936
NEUTRAL = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
CHECK, FAST = emulated_loader("check"), emulated_loader("fast")


def run(logits: np.ndarray, sampling: SamplingBatch, loader: KernelLoader = CHECK) -> SampleResult:
    logits = guarded_copy(logits.astype(np.float32))
    return sample(loader, logits, upload_sampling(sampling, guarded_copy))


def choose(
    logits: np.ndarray, *rows: Sequence, loader: KernelLoader = CHECK, vocab_limit: int | None = None
) -> SampleResult:
    limit = logits.shape[1] if vocab_limit is None else vocab_limit
    return run(logits, build_sampling_batch(rows, vocab_limit=limit), loader)


def tokens(logits: np.ndarray, *rows: Sequence, **options: Any) -> list[int]:
    return choose(logits, *rows, **options).token_ids.tolist()


def lively(num_rows: int, num_ids: int = V, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, num_ids)).astype(np.float32) * 3


def like_a_model(num_rows: int, seed: int = 0) -> np.ndarray:
    """Logits of a whole vocabulary as a language model has them: a broad bulk, and some tokens well above it."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_rows, QWEN_V)).astype(np.float32) * 2.2
    for one in logits:
        one[rng.choice(QWEN_V, 40, replace=False)] += np.linspace(4, 14, 40, dtype=np.float32)
    return logits


def assert_same(actual: SampleResult, expected: SampleResult) -> None:
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    np.testing.assert_array_equal(actual.top_ids, expected.top_ids)
    for name in ("logprobs", "top_logprobs"):
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), rtol=1e-5, atol=16 * EPSILON["fp32"])


def kept(
    scaled: np.ndarray, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0
) -> list[int]:
    """The ids of one row among which the kernel `draw` draws."""
    logits, N = guarded_copy(scaled.astype(np.float32)[None]), len(scaled)
    divisor = guarded_copy(np.array([temperature], np.float32))
    index = group_maxima.launch(CHECK, logits, N, divisor)
    filters = {"top_p": np.array([top_p], np.float32), "min_p": np.array([min_p], np.float32)}
    filters |= {"top_k": np.array([top_k], np.int32)}
    noise = {"seeds": np.zeros(1, np.uint64), "positions": np.zeros(1, np.int32)}
    _, cutoffs = draw.launch(CHECK, logits, N, index, temperature=divisor, **filters, **noise)
    distances = ((logits[0].max() - logits[0]) / divisor).view(np.uint32).astype(np.uint64)
    ranks = distances << np.uint64(19) | np.arange(N, dtype=np.uint64)
    return np.flatnonzero(ranks <= cutoffs[0]).tolist()


# ---- The cases of tests/ops/test_sampling_op.py on the kernels ------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-5])
def test_a_temperature_near_zero_is_greedy_also_beside_a_hot_neighbour(temperature: float) -> None:
    logits = lively(2)
    cold = row(temperature=temperature)
    assert tokens(logits[:1], cold)[0] == tokens(logits, cold, row())[0] == logits[0].argmax()


def test_the_smallest_temperature_that_is_not_greedy_overflows_nothing() -> None:
    logits = lively(1) * np.float32(1e30)
    assert tokens(logits, row(temperature=1e-4)) == [logits[0].argmax()]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 6}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.399}, [1]),  # the first holds 0.4
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 1e-30}, [1]),
        ({"min_p": 0.5}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.57}, [1]),  # of the two kept the first holds 4/7
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.6}, [1, 3]),
    ],
)
def test_what_each_filter_keeps(params: dict[str, Any], expected: list[int]) -> None:
    assert kept(np.log([0.1, 0.4, 0.15, 0.3, 0.05]), **params) == expected


def test_ties_go_to_the_smaller_id() -> None:
    assert kept(np.zeros(6), top_k=3) == [0, 1, 2]
    assert kept(np.zeros(6), top_p=0.5) == [0, 1, 2]
    assert kept(np.zeros(700), top_k=513) == list(range(513))
    assert tokens(np.zeros((2, 700)), row(temperature=0.0), row(top_k=1)) == [0, 0]
    assert tokens(np.zeros((1, 5000)), row(temperature=0.0)) == [0]


def test_zero_and_minus_zero_are_a_tie() -> None:
    logits = np.full((1, 5000), -1.0)
    logits[0, [7, 4999]] = [-0.0, 0.0]
    assert tokens(logits, row(temperature=0.0)) == tokens(logits, row(top_k=1)) == [7]
    assert choose(logits, row(logprobs=2)).top_ids.tolist() == [[7, 4999]]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_equals_a_full_sort(top_p: float) -> None:
    scaled = np.sort(np.random.default_rng(3).standard_normal(5000).astype(np.float32) * 4)[::-1]
    assert kept(scaled, top_p=top_p) == candidates(scaled - scaled[0], 0, float(np.float32(top_p)), 0.0).tolist()


def test_draws_follow_the_distribution() -> None:
    probabilities, count = np.array([0.5, 0.3, 0.15, 0.05]), 2000
    logits = np.full((count, V), -np.inf)
    logits[:, :4] = np.log(probabilities) * 0.5
    drawn = tokens(logits, *(row(seed=seed, temperature=0.5) for seed in range(count)), loader=FAST)
    np.testing.assert_allclose(np.bincount(drawn, minlength=4) / count, probabilities, atol=0.03)


def test_a_seeded_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = lively(9)
    rows = [row(seed=k, temperature=0.1 + 0.2 * k) for k in range(9)]
    rows[4] = row(seed=7)
    assert tokens(logits, *rows)[4] == tokens(logits[4:5], row(seed=7))[0]


def test_rows_with_different_seeds_or_positions_differ() -> None:
    flat = np.zeros((32, V))
    assert len(set(tokens(flat, *(row(seed=k) for k in range(32))))) > 10
    assert len(set(tokens(flat, *(row(seed=k << 32) for k in range(32))))) > 10
    assert len(set(tokens(flat, *(row(token_ids=[1] * (k + 1)) for k in range(32))))) > 10


@pytest.mark.parametrize(
    ("logits_4_5", "token_ids", "penalty", "expected"),
    [
        ([3.0, 2.0], [4, 4], 1.4, 4),
        ([3.0, 2.0], [4, 4], 1.6, 5),
        ([-2.0, -3.0], [4], 1.6, 5),
        ([2.0, 3.0], [4], 0.5, 4),
    ],
)
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_k": 1}])
def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once_for_each_id(
    logits_4_5: list[float], token_ids: list[int], penalty: float, expected: int, params: dict[str, Any]
) -> None:
    logits = np.full((1, V), -9.0)
    logits[0, [4, 5]] = logits_4_5
    assert tokens(logits, row(token_ids=token_ids, repetition_penalty=penalty, **params)) == [expected]


def test_a_penalised_row_does_not_touch_its_neighbour_nor_the_logits() -> None:
    logits = guarded_copy(lively(2))
    before, best = logits.copy(), int(logits[1].argmax())
    rows = [row(token_ids=[best], repetition_penalty=9.0, temperature=0.0), row(temperature=0.0)]
    arrays = upload_sampling(build_sampling_batch(rows, vocab_limit=V), guarded_copy)
    assert sample(CHECK, logits, arrays).token_ids[1] == best
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
@pytest.mark.parametrize("vocab_limit", [1, 38, 40])
def test_ids_without_a_token_are_never_chosen_nor_counted(temperature: float, vocab_limit: int) -> None:
    logits = np.zeros((20, V))
    logits[:, vocab_limit:] = 50.0
    logits[3, vocab_limit] = np.nan
    # A penalised id may lie beyond the limit: a prompt can hold any id that has an embedding.
    rows = [row(seed, [0, V - 1], temperature=temperature, logprobs=1, repetition_penalty=1.5) for seed in range(20)]
    result = choose(logits, *rows, vocab_limit=vocab_limit)
    assert set(result.token_ids.tolist()) <= set(range(vocab_limit))
    np.testing.assert_allclose(result.logprobs, -np.log(vocab_limit), atol=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf, "all -inf"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_row_that_is_not_finite_fails_alone(poison: Any, temperature: float) -> None:
    logits = lively(3, 300)
    if poison == "all -inf":
        logits[1] = -np.inf
    else:
        logits[1, 217] = poison
    rows = [row(seed, temperature=temperature, logprobs=2, top_p=0.9) for seed in range(3)]
    result = choose(logits, *rows)
    expected = [tokens(logits[r : r + 1], rows[r])[0] for r in (0, 2)]
    assert result.token_ids.tolist() == [expected[0], -1, expected[1]]
    assert (result.logprobs[1], *result.top_ids[1], *result.top_logprobs[1]) == (0, 0, 0, 0, 0)
    assert np.all(np.isfinite(result.logprobs))


def test_minus_infinity_in_some_places_is_an_impossible_token() -> None:
    logits = np.full((12, V), -np.inf)
    logits[:, [8, 9]] = 0.0
    assert set(tokens(logits, *(row(seed) for seed in range(12)))) == {8, 9}
    assert set(tokens(logits, *(row(seed, top_k=5, top_p=0.99) for seed in range(12)))) == {8, 9}


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = lively(2)
    rows = [row(temperature=0.3, top_k=1, repetition_penalty=1.5, logprobs=3), row(temperature=0.0)]
    result = choose(logits, *rows)
    exact = logits[0].astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum())
    order = np.argsort(-exact)[:3]
    assert result.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(result.top_logprobs[0], exact[order], rtol=1e-5)
    np.testing.assert_allclose(result.logprobs[0], exact[result.token_ids[0]], rtol=1e-5)


def test_no_logprobs_are_computed_when_nobody_asks() -> None:
    result = choose(lively(2), row(), row())
    assert (result.logprobs.size, result.top_ids.shape, result.top_logprobs.shape) == (0, (2, 0), (2, 0))


# ---- Masks and offsets ----------------------------------------------------------------------------------------------


def adjust(logits: np.ndarray, sampling: SamplingBatch, loader: KernelLoader = CHECK) -> np.ndarray:
    """What the kernel `adjust_logits` makes of the ids below vocab_limit."""
    N = min(logits.shape[1], sampling.vocab_limit)
    changes = {name: guarded_copy(getattr(sampling, name)) for name in adjust_logits.CHANGES}
    copy = adjust_logits.launch(loader, guarded_copy(logits), N, **changes)
    assert copy.shape == (len(logits), adjust_logits.padded(N))
    assert np.all(copy[:, N:] == -np.inf)
    return copy[:, :N]


def changing_rows(num_ids: int) -> list[Sequence]:
    """A row with nothing, one with each way of changing logits, and one with all of them."""
    some = [0, *range(0, num_ids, 3), num_ids - 1]
    penalty = {"repetition_penalty": 1.3}
    offsets = {"frequency_penalty": 0.7, "logit_bias": {0: -1.5, num_ids - 1: 2.25, num_ids: 99.0}, "min_tokens": 9}
    mask = {"guide": AllowedIds([0, 31, 32, *range(1, num_ids, 2), num_ids - 1])}
    ways: list[dict[str, Any]] = [{}, penalty, offsets, mask, penalty | mask, offsets | mask, penalty | offsets | mask]
    return [row(k, some, **way) for k, way in enumerate(ways)]


@pytest.mark.parametrize("num_ids", [1, 3, 31, 33, 130, 4097, 8192])
def test_logits_are_changed_exactly_as_in_the_reference_in_vocabularies_of_any_size(num_ids: int) -> None:
    rows, logits = changing_rows(num_ids), lively(7, num_ids + 5, seed=num_ids)
    sampling = build_sampling_batch(rows, vocab_limit=num_ids)
    expected = [adjusted(logits[r, :num_ids], sampling, r) for r in range(len(rows))]
    np.testing.assert_array_equal(adjust(logits, sampling), expected)


def test_masks_may_have_more_words_than_the_logits_need_and_not_fewer() -> None:
    logits, rows = lively(2), [row(guide=AllowedIds([3, 45])), row(guide=AllowedIds([44]))]
    sampling = build_sampling_batch(rows, vocab_limit=1000)
    np.testing.assert_array_equal(np.isfinite(adjust(logits, sampling)).nonzero()[1], [3, 45, 44])
    with pytest.raises(DeviceError, match="masks have 1 words a row; supported are 2 or more, for 50 token ids"):
        adjust(logits, replace(sampling, masks=sampling.masks[:, :1].copy()))


@pytest.mark.parametrize(
    "filters",
    [
        {"temperature": 0.0},
        {},
        {"top_k": 40},  # more than are allowed
        {"top_k": 2, "top_p": 0.99},
        {"top_p": 0.8},
        {"min_p": 1e-9},
        {"top_k": 40, "top_p": 0.999, "min_p": 0.01, "temperature": 0.3},
    ],
)
@pytest.mark.parametrize("num_ids", [50, 1283])
def test_only_allowed_tokens_are_chosen_and_a_free_neighbour_is_left_alone(
    filters: dict[str, Any], num_ids: int
) -> None:
    logits = np.repeat(lively(1, num_ids), 13, axis=0)
    allowed = [2, 31, 32, num_ids - 1]  # of the large vocabulary most groups are all forbidden
    rows = [row(seed, guide=AllowedIds(allowed), logprobs=2, **filters) for seed in range(12)]
    sampling = build_sampling_batch([*rows, row(temperature=0.0)], vocab_limit=num_ids)
    result = run(logits, sampling)
    assert_same(result, ReferenceOps().sample(logits, sampling))
    assert set(result.token_ids[:12].tolist()) <= set(allowed)
    assert result.token_ids[12] == logits[0].argmax()


def test_the_one_bit_of_a_mask_is_the_one_token_allowed() -> None:
    rows = [row(guide=AllowedIds([token_id])) for token_id in range(70)]
    assert tokens(np.zeros((70, 70)), *rows) == list(range(70))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "nothing", [{"guide": AllowedIds([77])}, {"bad_word_ids": tuple((token_id,) for token_id in range(V))}]
)
def test_a_row_that_may_choose_nothing_fails_alone(nothing: dict[str, Any], temperature: float) -> None:
    logits = lively(3)
    one = row(temperature=temperature, top_p=0.9, logprobs=1, **nothing)
    sampling = build_sampling_batch([row(temperature=0.0), one, row(temperature=0.0)], vocab_limit=V)
    result = run(logits, sampling)
    assert result.token_ids.tolist() == [logits[0].argmax(), -1, logits[2].argmax()]
    assert_same(result, ReferenceOps().sample(logits, sampling))


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("params", [{"guide": AllowedIds([3])}, {"bad_word_ids": ((30,),)}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_not_finite_fails_its_row_also_where_it_is_forbidden(
    poison: float, params: dict[str, Any], temperature: float
) -> None:
    logits = lively(2)
    logits[0, 30] = poison
    rows = [row(temperature=temperature, **params), row(temperature=0.0, guide=AllowedIds([8]))]
    assert tokens(logits, *rows) == [-1, 8]


def test_a_group_in_which_all_is_impossible_weighs_nothing() -> None:
    logits = np.full((1, 400), -np.inf, np.float32)
    logits[0, [200, 201]] = [2.0, 1.0]
    for temperature in (None, np.array([0.5], np.float32)):
        maxima, sums = group_maxima.launch(CHECK, guarded_copy(logits), 400, temperature)
        assert maxima.tolist() == [[-np.inf, 2.0, -np.inf, -np.inf]]
        weight = np.exp(-1.0 if temperature is None else -2.0)
        np.testing.assert_allclose(sums, [[0.0, 1.0 + weight, 0.0, 0.0]], rtol=1e-6)
    sampling = build_sampling_batch([row(logprobs=4, top_k=300, top_p=0.99)], vocab_limit=400)
    assert_same(run(logits, sampling), ReferenceOps().sample(logits, sampling))


def test_offsets_come_after_the_repetition_penalty_and_leave_the_logprobs_alone() -> None:
    logits = np.full((2, V), -9.0, np.float32)
    logits[:, [3, 7]] = 4.0, 1.5
    # 4 / 2 - 1 = 1 loses against 1.5; (4 - 1) / 2 = 1.5 would tie, and win as the smaller id
    penalised = row(token_ids=[3], repetition_penalty=2.0, presence_penalty=1.0, temperature=0.0, logprobs=1)
    biased = row(temperature=0.0, logit_bias={11: 100.0}, logprobs=1)
    result = choose(logits, penalised, biased)
    assert result.token_ids.tolist() == [7, 11]
    assert result.top_ids.tolist() == [[3], [3]]
    assert_same(result, ReferenceOps().sample(logits, build_sampling_batch([penalised, biased], vocab_limit=V)))


# ---- Against the reference ------------------------------------------------------------------------------------------


def mixed_rows(num_ids: int) -> list[Sequence]:
    """One row for each way of sampling, and all of them together."""
    some = list(range(0, num_ids, 3))
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1},
        {"top_k": num_ids + 7, "repetition_penalty": 0.7},
        {"top_p": 0.95, "temperature": 1.3},
        {"min_p": 0.03, "logprobs": min(20, num_ids)},
        {"top_k": 1},
    ]
    rows = [row(2**64 - 1 - k, some[: k * k] or [0], **way) for k, way in enumerate(ways)]
    return [*rows, *changing_rows(num_ids)]


@pytest.mark.parametrize("num_ids", [1, 2, 3, 127, 128, 129, 1000, 4096, 4099])
def test_every_way_of_sampling_picks_the_references_tokens_in_vocabularies_of_any_size(num_ids: int) -> None:
    rows, logits = mixed_rows(num_ids), lively(14, num_ids, seed=num_ids)
    for greedy in (False, True):
        sampling = build_sampling_batch(rows, vocab_limit=num_ids)
        if greedy:
            sampling = replace(sampling, temperature=np.zeros(14, np.float32))
        assert_same(run(logits, sampling), ReferenceOps().sample(logits, sampling))


def test_every_way_of_sampling_a_whole_vocabulary_picks_the_references_tokens() -> None:
    rows, logits = mixed_rows(QWEN_V), like_a_model(14)
    sampling = build_sampling_batch(rows, vocab_limit=QWEN_V - 271)
    assert_same(run(logits, sampling, FAST), ReferenceOps().sample(logits, sampling))


def test_a_flat_whole_vocabulary_is_drawn_and_filtered_as_in_the_reference() -> None:
    logits = lively(4, QWEN_V) * np.float32(0.2)
    rows = [row(1), row(2, top_p=0.6), row(3, top_k=50_000), row(4, min_p=0.3, temperature=2.0)]
    sampling = build_sampling_batch(rows, vocab_limit=QWEN_V)
    assert_same(run(logits, sampling, FAST), ReferenceOps().sample(logits, sampling))


@pytest.mark.parametrize(("distance", "expected"), [(17.2, 91_205), (17.3, 0)])
def test_the_largest_noise_there_is_can_still_win(distance: float, expected: int) -> None:
    """With this seed, at position 3, id 91,205 has the largest possible noise, 16.636, and id 0 has -0.637."""
    assert token_uniforms(289, 3, np.array([91_205]))[0] == 1 - np.float32(2.0**-24)
    logits = np.full((1, 100_000), -np.inf)
    logits[0, [0, 91_205]] = [0.0, -distance]
    assert tokens(logits, row(289)) == [expected]


def middle_of_a_gap(values: np.ndarray, share: float) -> float:
    """A number well between two neighbours of rising values: near `share` of the way, or in the widest gap."""
    gaps = np.diff(values)
    place = int(share * len(gaps))
    place = place if gaps[place] > 1e-4 else int(gaps.argmax())
    return float(values[place] + gaps[place] / 2)


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, list[Sequence]]:
    """Up to four rows with many ties, impossible and forbidden tokens, penalties, offsets, and filters that no token
    lies at the edge of.
    """
    num_ids = draw(st.integers(2, 400))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits, rows = [], []
    for _ in range(draw(st.integers(1, 4))):
        one = (rng.integers(-40, 40, num_ids) / draw(st.sampled_from([2, 4, 8]))).astype(np.float32)
        one[rng.random(num_ids) < draw(st.sampled_from([0.0, 0.3]))] = -np.inf
        likely = int(rng.integers(num_ids))
        one[likely] = draw(st.sampled_from([5.0, 20.0]))
        params: dict[str, Any] = {"temperature": draw(st.sampled_from([0.25, 0.7, 1.0, 2.0]))}
        params["repetition_penalty"] = draw(st.sampled_from([1.0, 1.1, 0.7]))
        params["top_k"] = draw(st.sampled_from([0, 1, 2, 20, num_ids - 1, num_ids, num_ids + 1]))
        token_ids = rng.choice(num_ids, draw(st.integers(1, num_ids))).tolist()
        if draw(st.booleans()):
            params["guide"] = AllowedIds([likely, *rng.choice(num_ids, draw(st.integers(1, num_ids))).tolist()])
        if draw(st.booleans()):
            ids = rng.choice(num_ids, draw(st.integers(1, 5))).tolist()
            params["logit_bias"] = {token_id: draw(st.sampled_from([-2.5, 0.5, 4.0])) for token_id in ids}
            params["frequency_penalty"] = draw(st.sampled_from([0.0, 0.25]))
        likely_first = np.sort(np.exp(scaled_row(one, row(token_ids=token_ids, **params)), dtype=np.float64))[::-1]
        before = np.cumsum(likely_first[: params["top_k"] or num_ids])
        if draw(st.booleans()):
            params["top_p"] = middle_of_a_gap(np.concatenate([[0.0], before]) / before[-1], draw(st.floats(0, 0.99)))
        if draw(st.booleans()):
            params["min_p"] = middle_of_a_gap(np.unique([0.0, *likely_first]), draw(st.floats(0, 0.99)))
        logits.append(one)
        rows.append(row(draw(st.integers(0, 2**64 - 1)), token_ids, **params))
    return np.stack(logits), rows


def scaled_row(logits: np.ndarray, one: Sequence) -> np.ndarray:
    """Changed logits over the temperature, the largest 0: what the reference filters."""
    changed = adjusted(logits, build_sampling_batch([one], vocab_limit=len(logits)), 0)
    return (changed - changed.max()) / np.float32(one.params.temperature)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches(), st.integers(-1, 2))
def test_any_mix_of_parameters_keeps_and_draws_what_the_reference_does(
    batch: tuple[np.ndarray, list[Sequence]], num_logprobs: int
) -> None:
    logits, rows = batch
    for one, its_row in zip(logits, rows, strict=True):
        scaled, params = scaled_row(one, its_row), its_row.params
        filters = params.top_k, float(np.float32(params.top_p)), float(np.float32(params.min_p))
        assert kept(scaled, *filters) == candidates(scaled, *filters).tolist()
    sampling = replace(build_sampling_batch(rows, vocab_limit=logits.shape[1]), num_logprobs=num_logprobs)
    result = run(logits, sampling)
    assert result.token_ids.tolist() == ReferenceOps().sample(logits, sampling).token_ids.tolist()
    in_order = np.argsort(-logits, axis=1, kind="stable")[:, : max(num_logprobs, 0)]
    assert result.top_ids.tolist() == in_order.tolist()


# ---- Launches, bytes and refusals -----------------------------------------------------------------------------------


# ---- Rows that stay on the device -----------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None, derandomize=True)
@given(penalised_rows(), st.integers(0, 99))
def test_rows_penalised_by_counts_get_the_bits_and_tokens_of_rows_penalised_by_lists(
    rows: list[Sequence], seed: int
) -> None:
    N = 18  # ids 18 and 19, which come in the rows, have no token
    logits, sampling = lively(len(rows), 21, seed), build_sampling_batch(rows, vocab_limit=N)
    expected = logits.copy()
    for r in range(len(rows)):
        expected[r, :N] = adjusted(logits[r, :N], sampling, r)
    there, out = guarded_copy(logits), guarded_copy(np.full(len(rows), -9, np.int32))
    arrays = {
        name: guarded_copy(array)
        for name, array in vars(on_the_device(rows, vocab_limit=N)).items()
        if name != "vocab_limit"
    }
    choose_of_rows(CHECK, there, RowSampling(**arrays, vocab_limit=N), all_plain=False, out=out)
    np.testing.assert_array_equal(there.view(np.int32), expected.view(np.int32))
    assert out.tolist() == ReferenceOps().sample(logits, sampling).token_ids.tolist()


@pytest.mark.parametrize("num_penalised", [0, 2])
def test_counts_are_read_once_for_rows_with_a_penalty_and_not_for_others(num_penalised: int) -> None:
    launches, logits = CheckedLaunches(), np.repeat(like_a_model(1), 3, axis=0)
    rows = [row(k, [5, 7], repetition_penalty=1.2 if k < num_penalised else 1.0) for k in range(3)]
    there = on_the_device(rows, vocab_limit=QWEN_V)
    choose_of_rows(launches.loader, logits, there, all_plain=False, out=np.zeros(3, np.int32))
    index, _ = launches.reports
    least = group_maxima.least_bytes(3, QWEN_V, penalised=num_penalised)
    written = {"logits": 2 * 4 * num_penalised}  # two tokens of the prompt
    expected = {name: count + written.get(name, 0) for name, count in least.items()}
    assert {name: total_bytes(index).get(name, 0) for name in expected} == expected
    assert index.argument("logits").read.efficiency == 1.0


def launched(*rows: Sequence, logits: np.ndarray | None = None) -> CheckedLaunches:
    launches = CheckedLaunches(global_races=logits is None)
    choose(lively(len(rows), 1000) if logits is None else logits, *rows, loader=launches.loader)
    return launches


@pytest.mark.parametrize(
    ("rows", "kernels"),
    [
        ([row(temperature=0.0), row(temperature=0.0, top_k=3)], "argmax"),
        ([row(temperature=0.0, repetition_penalty=1.2)], "adjust_logits argmax"),
        ([row(temperature=0.0), row(temperature=0.0, logit_bias={3: 1.0})], "adjust_logits argmax"),
        ([row(guide=AllowedIds([5]), temperature=0.0), row(temperature=0.0)], "adjust_logits argmax"),
        ([row(temperature=0.0, min_tokens=2, num_prompt_tokens=1)], "argmax"),  # it has them
        ([row(temperature=0.0), row(top_k=3)], "group_maxima draw"),
        ([row(repetition_penalty=1.2)], "adjust_logits group_maxima draw"),
        ([row(temperature=0.0, logprobs=0)], "argmax group_maxima top_logprobs"),
    ],
)
def test_only_what_the_batch_asks_for_is_launched_and_blocks_never_race(rows: list[Sequence], kernels: str) -> None:
    assert " ".join(report.kernel for report in launched(*rows).reports) == kernels


def test_a_greedy_batch_uploads_nothing_and_any_other_one_array() -> None:
    uploaded: list[np.ndarray] = []

    def upload(array: np.ndarray) -> np.ndarray:
        uploaded.append(array)
        return array

    upload_sampling(build_sampling_batch([row(temperature=0.0)], vocab_limit=V), upload)
    assert uploaded == []
    batch = build_sampling_batch(changing_rows(V), vocab_limit=V)
    arrays = upload_sampling(batch, upload).rows
    assert len(uploaded) == 1
    for name, array in vars(arrays).items():
        np.testing.assert_array_equal(array, getattr(batch, name), strict=True)


def test_a_replay_with_new_positions_in_the_same_arrays_draws_anew() -> None:
    logits, sampling = np.zeros((1, V), np.float32), build_sampling_batch([row(seed=3)], vocab_limit=V)
    arrays = upload_sampling(sampling, guarded_copy)
    assert arrays.rows is not None
    for position in range(3, 9):
        arrays.rows.positions[:] = position
        expected = ReferenceOps().sample(logits, replace(sampling, positions=np.array([position], np.int32)))
        assert_same(sample(CHECK, logits, arrays), expected)


@pytest.mark.parametrize(
    ("params", "share"),
    [
        ({"top_k": 20, "top_p": 0.8, "temperature": 0.7}, 0.5),
        ({"top_p": 0.9}, 0.5),
        ({"temperature": 0.6}, 0.5),
        ({}, 1.1),
    ],
)
def test_all_logits_are_read_once_and_a_part_of_them_again(params: dict[str, Any], share: float) -> None:
    index, *others = launched(row(**params), logits=like_a_model(1)).reports
    least = group_maxima.least_bytes(1, QWEN_V)
    assert {name: total_bytes(index)[name] for name in least} == least
    assert index.argument("logits").read.efficiency == 1.0
    assert sum(total_bytes(report)["logits"] for report in others) <= share * 4 * QWEN_V


def test_greedy_reads_all_logits_once_and_changes_copy_them_once() -> None:
    changes = {"repetition_penalty": 1.2, "logit_bias": {5: 1.0, 7: 2.0}, "guide": AllowedIds(range(0, QWEN_V, 2))}
    copied, greedy = launched(row(temperature=0.0, **changes), logits=like_a_model(1)).reports
    assert total_bytes(greedy) == argmax.least_bytes(1, QWEN_V)
    least = adjust_logits.least_bytes(1, QWEN_V, 3, 2, masked=1)
    # The copy is read and written again for each penalty and offset. Eight lanes share a word of the mask, and a warp
    # uses half a sector of it.
    again = {"adjusted": (3 + 2) * 8, "masks": 7 * least["masks"]}
    counted = {name: least[name] + again.get(name, 0) for name in ("logits", "adjusted", "masks", "offsets")}
    assert {name: total_bytes(copied)[name] for name in counted} == counted
    assert copied.argument("masks").read.sectors == -(-QWEN_V // 128)
    assert greedy.argument("logits").read.efficiency == 1.0
    assert copied.argument("logits").read.efficiency == 1.0


def test_top_logprobs_reads_two_groups_of_logits_for_each_token() -> None:
    *_, report = launched(row(temperature=0.0, logprobs=20), logits=like_a_model(1)).reports
    least = top_logprobs.least_bytes(1, QWEN_V, 20)
    assert total_bytes(report)["logits"] <= 2 * least["logits"] + 21 * 4


@pytest.mark.parametrize(
    ("logits", "params", "message"),
    [
        (np.zeros((1, V), np.float16), {}, r"group_maxima: logits is float16 \(1, 50\); supported is float32"),
        (np.zeros((1, 2 * V), np.float32)[:, ::2], {"temperature": 0.0}, "argmax: logits is a view with strides"),
        (np.zeros((1, 5), np.float32), {"logprobs": 6}, "top_logprobs: n is 6; supported are up to the 5 token ids"),
        (np.zeros((1, 2**19 + 4), np.float32), {}, "draw: N is 524292; supported are up to 524288 token ids"),
    ],
)
def test_what_is_not_supported_is_refused_with_its_name(
    logits: np.ndarray, params: dict[str, Any], message: str
) -> None:
    sampling = build_sampling_batch([row(**params)], vocab_limit=logits.shape[1])
    with pytest.raises(DeviceError, match=message):
        sample(FAST, logits, upload_sampling(sampling, guarded_copy))
