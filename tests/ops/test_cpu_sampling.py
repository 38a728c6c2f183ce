"""The CPU engine's sampling kernels choose the reference's token, always: over likely logits and nasty ones."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cupyllm.ops.reference import ReferenceOps
from cupyllm.philox import token_uniforms
from cupyllm.sampling_batch import SampleResult, SamplingBatch, build_sampling_batch
from cupyllm.sequence import Sequence
from cupyllm.token_guide import AllowedIds
from tests.sampling_case import row

pytest.importorskip("numba", reason="needs numba: pip install 'cupyllm[cpu]'")

from cupyllm.ops.cpu import sampling as sampling_kernels
from cupyllm.ops.cpu.backend import make_ops

REFERENCE, OPS = ReferenceOps(), make_ops("auto", 2)
QWEN_V = 151_936
FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 1e-4},
    {"temperature": 0.05, "top_p": 0.9},
    {"temperature": 2.0, "top_p": 0.95},
    {"top_p": 1e-9},
    {"top_p": 1e-46},  # 0 in float32
    {"top_p": 0.9999999},
    {"top_k": 1},
    {"top_k": 20},
    {"top_k": 700},
    {"top_k": QWEN_V - 1},
    {"min_p": 0.02},
    {"min_p": 1.0},
    {"top_k": 50, "top_p": 0.8},
    {"top_k": 50, "min_p": 0.1, "temperature": 0.7},
    {"top_p": 0.9, "min_p": 0.01},
    {"temperature": 1.3, "top_k": 300, "top_p": 0.97, "min_p": 0.001},
]


def like_a_model(num_rows: int, num_ids: int, seed: int = 0) -> np.ndarray:
    """A broad bulk, and some tokens well above it."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_rows, num_ids)).astype(np.float32) * 2
    likely = min(40, num_ids)
    for one in logits:
        one[rng.choice(num_ids, likely, replace=False)] += np.linspace(2, 13, likely, dtype=np.float32)
    return logits


def with_ties(num_rows: int, num_ids: int, seed: int = 0) -> np.ndarray:
    """Few different values, zeros of both signs among them, and impossible tokens."""
    logits = np.round(like_a_model(num_rows, num_ids, seed) / 2)
    logits[:, ::3] *= -1.0
    logits[:, 1::7] = -np.inf
    return logits.astype(np.float32)


def flat(num_rows: int, num_ids: int, seed: int = 0) -> np.ndarray:
    return np.full((num_rows, num_ids), -1.5, np.float32)


def extreme(num_rows: int, num_ids: int, seed: int = 0) -> np.ndarray:
    """From the largest numbers there are to the smallest: distances overflow, and differences vanish."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((num_rows, num_ids)) * 10.0 ** rng.integers(-44, 38, (num_rows, num_ids))
    logits[::2] *= 1e-38
    return logits.astype(np.float32)


def assert_same(actual: SampleResult, expected: SampleResult) -> None:
    np.testing.assert_array_equal(actual.token_ids, expected.token_ids)
    np.testing.assert_array_equal(actual.top_ids, expected.top_ids)
    for name in ("logprobs", "top_logprobs"):
        assert getattr(actual, name).dtype == np.float32
        np.testing.assert_allclose(getattr(actual, name), getattr(expected, name), rtol=1e-6, atol=1e-6)


def compare(logits: np.ndarray, rows: list[Sequence], vocab_limit: int | None = None) -> SampleResult:
    """Sample with both ops; returns what both say."""
    sampling = build_sampling_batch(rows, vocab_limit=logits.shape[1] if vocab_limit is None else vocab_limit)
    before = logits.copy()
    result = OPS.sample(logits, sampling)
    np.testing.assert_array_equal(logits, before, err_msg="an op changes no argument")
    with np.errstate(over="ignore"):  # distances beyond the largest number
        expected = REFERENCE.sample(logits, sampling)
    assert_same(result, expected)
    return result


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("make", [like_a_model, with_ties, flat, extreme])
@pytest.mark.parametrize("num_ids", [1, 3, 127, 128, 129, 1283])
def test_the_token_is_the_references(make: Any, num_ids: int, filters: dict[str, Any]) -> None:
    logits = make(24, num_ids, seed=num_ids)
    compare(logits, [row(seed, **filters) for seed in range(len(logits))])


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("make", [like_a_model, with_ties])
def test_the_token_is_the_references_in_a_vocabulary_as_large_as_qwens(make: Any, filters: dict[str, Any]) -> None:
    logits = make(6, QWEN_V)
    compare(logits, [row(seed << 33, [1] * (seed + 1), **filters) for seed in range(len(logits))])


def test_rows_of_all_kinds_side_by_side() -> None:
    logits = like_a_model(len(FILTERS), 5000)
    together = compare(logits, [row(seed, **filters) for seed, filters in enumerate(FILTERS)])
    for seed, filters in enumerate(FILTERS):
        alone = compare(logits[seed : seed + 1], [row(seed, **filters)])
        assert alone.token_ids[0] == together.token_ids[seed]


@pytest.mark.parametrize("top_p", [0.125, 0.25, 0.5, 0.75])
def test_where_rounding_decides_what_top_p_keeps_the_reference_is_asked(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count_of_asked(monkeypatch)
    kept = set()
    for num_ids in range(4, 200, 4):  # num_ids * top_p is whole: the mass before one token is top_p but for rounding
        logits = flat(64, num_ids)
        token_ids = compare(logits, [row(seed, top_p=top_p) for seed in range(len(logits))]).token_ids
        kept.add(max(token_ids) < num_ids * top_p)
    assert asked == [sum(64 for num_ids in range(4, 200, 4) if num_ids * top_p % 1 == 0)]
    assert kept == {False, True}, "the reference rounds both ways, or the case is void"


def test_where_masses_are_not_exact_and_lie_at_the_edge_the_reference_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_of_asked(monkeypatch)
    # 500 tokens, and 1000 half as likely: two distances around log 2, mixed so that half of the mass is near exact.
    near, far = np.float32(0.6931471), np.float32(0.6931473)
    excess = [count * np.exp(-float(near)) + (1000 - count) * np.exp(-float(far)) - 500 for count in range(1001)]
    count = int(np.abs(excess).argmin())
    assert 0 < abs(excess[count]) < 0.5e-10 * 1000, "of the mass of all tokens, or the case is void"
    one = -np.concatenate([np.zeros(500, np.float32), np.repeat([near, far], [count, 1000 - count])])
    compare(np.repeat(one[None].astype(np.float32), 8, axis=0), [row(seed, top_p=0.5) for seed in range(8)])
    assert asked == [8]


def test_a_token_with_the_most_noise_there_is_wins_from_far_away() -> None:
    ids = np.arange(QWEN_V)
    seed = next(seed for seed in range(1000) if token_uniforms(seed, 3, ids).max() > 1 - 2.0**-22)
    noise = -np.log(-np.log(token_uniforms(seed, 3, ids)))
    lucky = int(noise.argmax())
    logits = np.full((2, QWEN_V), -np.inf, np.float32)
    likely = (lucky + 5000) % QWEN_V
    logits[:, likely] = 0.0
    logits[0, lucky], logits[1, lucky] = noise[likely] - noise[lucky] + np.array([0.01, -0.01])
    assert compare(logits, [row(seed), row(seed)]).token_ids.tolist() == [lucky, likely]


def test_the_edge_of_min_p_is_the_references_to_the_last_bit() -> None:
    min_ps = np.linspace(0.3, 0.999, 400, dtype=np.float32)
    edges = -np.log(min_ps.astype(np.float64)).astype(np.float32)
    beside = [np.nextafter(edges, np.float32(side)) for side in (0, 9)]
    logits = -np.stack([np.zeros_like(edges), edges, *beside], axis=1)
    assert len({bool(np.float64(edge) > -np.log(np.float64(p))) for edge, p in zip(edges, min_ps, strict=True)}) == 2
    for seed in range(20):
        compare(logits, [row(seed * 1000 + k, min_p=float(min_p)) for k, min_p in enumerate(min_ps)])


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_where_rounding_decides_a_draw_the_reference_is_asked(ulps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_of_asked(monkeypatch)
    logits = np.full((200, 300), -50.0, np.float32)
    for seed, one in enumerate(logits):
        uniforms = token_uniforms(seed, 3, np.array([7, 250]))
        noise = -np.log(-np.log(uniforms))
        order = np.argsort(noise)  # the one with less noise is the more likely one by just as much
        ids = np.array([7, 250])[order]
        one[ids[0]], one[ids[1]] = 0.0, noise[order[0]] - noise[order[1]]
        one[ids[1]] += ulps * np.spacing(one[ids[1]])
    drawn = compare(logits, [row(seed) for seed in range(len(logits))]).token_ids
    assert set(drawn.tolist()) == {7, 250}
    assert asked == [200]


def count_of_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often the kernels ask the reference from here on, in a list."""
    asked, original = [0], sampling_kernels.sample_row

    def count(logits: np.ndarray, sampling: SamplingBatch, r: int) -> int:
        asked[0] += 1
        return original(logits, sampling, r)

    monkeypatch.setattr(sampling_kernels, "sample_row", count)
    return asked


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.8, "top_p": 0.95}, {"top_k": 20, "top_p": 0.8}, {"top_p": 1e-12}], ids=str
)
def test_the_reference_is_hardly_ever_asked_about_common_logits(
    filters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = count_of_asked(monkeypatch)
    logits = like_a_model(500, 3000)
    compare(logits, [row(seed, **filters) for seed in range(len(logits))])
    assert asked[0] <= 2


@pytest.mark.parametrize("poison", [np.nan, -np.nan, np.inf, "all -inf"])
@pytest.mark.parametrize("forbidden", [False, True])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 5}, {"top_p": 0.9}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(poison: Any, forbidden: bool, filters: dict[str, Any]) -> None:
    logits = like_a_model(3, 400)
    if poison == "all -inf":
        logits[1] = -np.inf
    else:
        logits[1, 217] = poison
    guide = {"guide": AllowedIds([3, 4, 5])} if forbidden else {}
    result = compare(logits, [row(seed, logprobs=2, **filters, **guide) for seed in range(3)])
    assert (result.token_ids == -1).tolist() == [False, True, False]
    assert (result.logprobs[1], *result.top_ids[1], *result.top_logprobs[1]) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("vocab_limit", [1, 31, 129, 380])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {"temperature": 2.0}, {"top_k": 300, "top_p": 0.9}], ids=str)
def test_ids_without_a_token_are_never_chosen_nor_counted(vocab_limit: int, filters: dict[str, Any]) -> None:
    logits = like_a_model(20, 400)
    logits[:, vocab_limit:] = 50.0
    logits[3, vocab_limit] = np.nan
    rows = [row(seed, [0, 399], repetition_penalty=1.5, logprobs=1, **filters) for seed in range(20)]
    result = compare(logits, rows, vocab_limit)
    assert 0 <= result.token_ids.min() <= result.token_ids.max() < vocab_limit


def changes(num_ids: int) -> list[dict[str, Any]]:
    """A row with nothing, one with each way of changing logits, and ones with several."""
    penalty: dict[str, Any] = {"repetition_penalty": 1.3}
    offsets = {"frequency_penalty": 0.7, "logit_bias": {0: -1.5, num_ids - 1: 9.25, num_ids: 99.0}, "min_tokens": 9}
    mask = {"guide": AllowedIds([0, 31, 32, *range(1, num_ids, 2), num_ids - 1])}
    one_left = {"guide": AllowedIds([num_ids - 1])}
    return [{}, penalty, offsets, mask, penalty | mask, offsets | mask, penalty | offsets | mask, one_left]


@pytest.mark.parametrize("num_ids", [1, 3, 31, 33, 8191, 8193, 20_000])
@pytest.mark.parametrize("filters", [{"temperature": 0.0}, {}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.1}], ids=str)
def test_logits_are_changed_as_in_the_reference(num_ids: int, filters: dict[str, Any]) -> None:
    logits = np.repeat(like_a_model(5, num_ids + 5), 8, axis=0)
    some = [0, *range(0, num_ids, 3), num_ids - 1, num_ids]
    rows = [row(seed, some, logprobs=1, **filters, **way) for seed, way in enumerate(changes(num_ids) * 5)]
    compare(logits, rows, vocab_limit=num_ids)


def test_an_allowed_token_is_chosen_however_unlikely_and_none_where_nothing_is_allowed() -> None:
    logits = like_a_model(4, 9000)
    logits[:, 8500] = -900.0
    guides = [AllowedIds([8500]), AllowedIds([8500, 9000]), AllowedIds([9000]), AllowedIds([8500])]
    rows = [row(seed, guide=guide, top_k=20, top_p=0.8) for seed, guide in enumerate(guides)]
    assert compare(logits, rows).token_ids.tolist() == [8500, 8500, -1, 8500]


def test_offsets_and_penalties_that_overflow_fail_the_row() -> None:
    logits = like_a_model(3, 300) * np.float32(1e37)
    rows = [row(seed, [int(one.argmax())], repetition_penalty=1e-3) for seed, one in enumerate(logits)]
    rows[1] = row(1)
    assert (compare(logits, rows).token_ids == -1).tolist() == [True, False, True]


@pytest.mark.parametrize("make", [like_a_model, with_ties, flat, extreme])
@pytest.mark.parametrize("num_ids", [1, 7, 128, 1283])
@pytest.mark.parametrize("count", [0, 1, 20])
def test_logprobs_are_the_references(make: Any, num_ids: int, count: int) -> None:
    logits = make(9, num_ids)
    compare(logits, [row(seed, logprobs=count, temperature=0.5) for seed in range(9)])


def test_logprobs_of_given_tokens_of_a_large_vocabulary() -> None:
    logits = like_a_model(5, QWEN_V)
    token_ids = np.array([0, -1, QWEN_V - 937, 5, 6], np.int32)
    found, expected = (ops.token_logprobs(logits, token_ids, 20, vocab_limit=QWEN_V - 936) for ops in (OPS, REFERENCE))
    assert_same(SampleResult(token_ids=token_ids, **vars(found)), SampleResult(token_ids=token_ids, **vars(expected)))
    for r in range(5):
        (alone,) = OPS.token_logprobs(logits[r : r + 1], token_ids[r : r + 1], 20, vocab_limit=QWEN_V - 936).logprobs
        assert alone == found.logprobs[r]
    assert OPS.token_logprobs(logits, token_ids, -1, vocab_limit=QWEN_V).logprobs.shape == (0,)


@pytest.mark.parametrize("ops", [REFERENCE, OPS], ids=lambda ops: ops.name)
def test_a_given_token_of_a_row_with_nan_has_no_logprob(ops: ReferenceOps) -> None:
    logits = like_a_model(2, 300)
    logits[0, 7] = np.nan
    found = ops.token_logprobs(logits, np.array([3, 3], np.int32), 2, vocab_limit=300)
    assert np.isnan([found.logprobs[0], *found.top_logprobs[0]]).all()
    assert np.isfinite([found.logprobs[1], *found.top_logprobs[1]]).all()


def test_the_top_logprob_of_a_chosen_token_is_its_own() -> None:
    logits = like_a_model(20, 4000)
    result = OPS.sample(logits, build_sampling_batch([row(temperature=0.0, logprobs=1)] * 20, vocab_limit=4000))
    np.testing.assert_array_equal(result.logprobs, result.top_logprobs[:, 0])
