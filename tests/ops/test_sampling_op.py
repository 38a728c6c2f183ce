"""The sampling op: what each parameter keeps, what is drawn, and that a row never depends on its neighbours."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

from cupyllm.errors import DeadEndError
from cupyllm.ops.reference import ReferenceOps
from cupyllm.ops.sample_reference import candidates, largest_ids
from cupyllm.sampling_batch import GREEDY_BELOW, SampleResult, build_sampling_batch, find_dead_end
from cupyllm.sequence import Sequence
from cupyllm.token_guide import AllowedIds
from tests.sampling_case import row

V = 50


def sample(logits: np.ndarray, rows: list[Sequence], vocab_limit: int = V) -> SampleResult:
    return ReferenceOps().sample(logits.astype(np.float32), build_sampling_batch(rows, vocab_limit=vocab_limit))


def lively(num_rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((num_rows, V)).astype(np.float32) * 3


@pytest.mark.parametrize("temperature", [0.0, 1e-12, 1e-5])
def test_a_temperature_near_zero_is_greedy_also_beside_a_hot_neighbour(temperature: float) -> None:
    logits = lively(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        alone = sample(logits[:1], [row(temperature=temperature)])
        beside = sample(logits, [row(temperature=temperature), row(temperature=1.0)])
    assert alone.token_ids[0] == beside.token_ids[0] == logits[0].argmax()


def test_the_smallest_temperature_that_is_not_greedy_overflows_nothing() -> None:
    logits = lively(1) * 1e30
    assert sample(logits, [row(temperature=1e-4)]).token_ids[0] == logits[0].argmax()


def test_at_that_temperature_equal_logits_are_still_drawn_from() -> None:
    logits = np.zeros((40, V))
    drawn = sample(logits, [row(seed=seed, temperature=GREEDY_BELOW) for seed in range(40)]).token_ids
    assert len(set(drawn.tolist())) > 10


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9}, {"min_p": 0.2}, {"top_k": 5}], ids=str)
def test_adding_the_same_to_all_logits_changes_no_draw(params: dict[str, Any]) -> None:
    logits = np.round(lively(1) * 64) / 64  # so that the sums below are exact
    rows = [row(seed=seed, **params) for seed in range(60)]
    drawn = sample(np.repeat(logits, 60, axis=0), rows).token_ids
    for shift in (-40, 25):
        np.testing.assert_array_equal(sample(np.repeat(logits + shift, 60, axis=0), rows).token_ids, drawn)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 6}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 1e-9}, [1]),
        ({"top_p": 0.0}, [1]),  # what 1e-46 is in float32
        ({"min_p": 0.5}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.57}, [1]),  # of the two kept the first holds 4/7
        ({"top_k": 3, "top_p": 0.8, "min_p": 0.6}, [1, 3]),
    ],
)
def test_what_each_filter_keeps(params: dict[str, Any], kept: list[int]) -> None:
    probabilities = np.array([0.1, 0.4, 0.15, 0.3, 0.05])
    scaled = (np.log(probabilities) - np.log(0.4)).astype(np.float32)
    arguments = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | params
    assert candidates(scaled, **arguments).tolist() == kept


def test_nothing_is_dropped_when_top_p_is_off_however_rare() -> None:
    assert candidates(np.float32([0, -60, -80]), 0, 1.0, 0.0).tolist() == [0, 1, 2]


def test_ties_go_to_the_smaller_id() -> None:
    assert candidates(np.zeros(6, np.float32), 3, 1.0, 0.0).tolist() == [0, 1, 2]
    assert candidates(np.zeros(6, np.float32), 0, 0.5, 0.0).tolist() == [0, 1, 2]


def test_a_larger_logit_comes_first_also_where_it_is_no_more_likely() -> None:
    assert candidates(np.float32([-1e-40, 0.0]), 0, 0.3, 0.0).tolist() == [1]


@pytest.mark.parametrize("top_p", [0.3, 0.9, 0.999])
def test_top_p_equals_a_full_sort(top_p: float) -> None:
    scaled = np.sort(np.random.default_rng(3).standard_normal(5000).astype(np.float32) * 4)[::-1]
    scaled = scaled - scaled[0]
    weights = np.exp(scaled.astype(np.float64)) / np.exp(scaled.astype(np.float64)).sum()
    expected = int(np.sum(np.cumsum(weights) - weights < top_p))
    assert candidates(scaled, 0, top_p, 0.0).tolist() == list(range(expected))


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    count = 4000
    logits = np.full((count, V), -np.inf, np.float32)
    logits[:, :4] = np.log(probabilities) * 0.5
    drawn = sample(logits, [row(seed=seed, temperature=0.5) for seed in range(count)]).token_ids
    shares = np.bincount(drawn, minlength=4) / count
    np.testing.assert_allclose(shares, probabilities, atol=0.03)


def test_a_seeded_row_draws_the_same_alone_and_in_any_batch() -> None:
    logits = lively(9)
    alone = sample(logits[4:5], [row(seed=7)]).token_ids[0]
    rows = [row(seed=k, temperature=0.1 + 0.2 * k) for k in range(9)]
    rows[4] = row(seed=7)
    assert sample(logits, rows).token_ids[4] == alone


def test_rows_with_different_seeds_or_positions_differ() -> None:
    flat = np.zeros((32, V))
    assert len(set(sample(flat, [row(seed=k) for k in range(32)]).token_ids.tolist())) > 10
    assert len(set(sample(flat, [row(token_ids=[1] * (k + 1)) for k in range(32)]).token_ids.tolist())) > 10


def test_repetition_penalty_divides_positive_and_multiplies_negative_logits_once_for_each_id() -> None:
    logits = np.full((1, V), -9.0)
    logits[0, [4, 5]] = [3.0, 2.0]
    greedy = {"temperature": 0.0}
    assert sample(logits, [row(token_ids=[4, 4], repetition_penalty=1.4, **greedy)]).token_ids[0] == 4
    assert sample(logits, [row(token_ids=[4, 4], repetition_penalty=1.6, **greedy)]).token_ids[0] == 5
    below = np.full((1, V), -9.0)
    below[0, [4, 5]] = [-2.0, -3.0]
    assert sample(below, [row(token_ids=[4], repetition_penalty=1.6, **greedy)]).token_ids[0] == 5


def test_a_penalised_row_does_not_touch_its_neighbour_nor_the_logits() -> None:
    logits = lively(2)
    kept = logits.copy()
    best = int(logits[1].argmax())
    rows = [row(token_ids=[best], repetition_penalty=9.0, temperature=0.0), row(temperature=0.0)]
    assert sample(logits, rows).token_ids[1] == best
    np.testing.assert_array_equal(logits, kept)


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_ids_without_a_token_are_never_chosen(temperature: float) -> None:
    logits = np.zeros((1, V))
    logits[0, 40:] = 50.0
    for seed in range(20):
        assert sample(logits, [row(seed=seed, temperature=temperature)], vocab_limit=40).token_ids[0] < 40


@pytest.mark.parametrize("poison", [np.nan, np.inf, "all -inf"])
def test_a_row_that_is_not_finite_fails_alone(poison: Any) -> None:
    logits = lively(3)
    if poison == "all -inf":
        logits[1] = -np.inf
    else:
        logits[1, 17] = poison
    result = sample(logits, [row(temperature=0.0, logprobs=2) for _ in range(3)])
    assert result.token_ids.tolist() == [logits[0].argmax(), -1, logits[2].argmax()]
    assert np.all(np.isfinite(result.logprobs))


def test_minus_infinity_in_some_places_is_an_impossible_token() -> None:
    logits = np.full((1, V), -np.inf)
    logits[0, [8, 9]] = 0.0
    drawn = {int(sample(logits, [row(seed=seed)]).token_ids[0]) for seed in range(30)}
    assert drawn == {8, 9}


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = lively(2)
    rows = [row(temperature=0.3, top_k=1, repetition_penalty=1.5, logprobs=3), row(temperature=0.0)]
    result = sample(logits, rows)
    expected = logits[0].astype(np.float64)
    expected = expected - np.log(np.exp(expected).sum())
    order = np.argsort(-expected)[:3]
    assert result.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(result.top_logprobs[0], expected[order], rtol=1e-5)
    np.testing.assert_allclose(result.logprobs[0], expected[result.token_ids[0]], rtol=1e-5)


def test_no_logprobs_are_computed_when_nobody_asks() -> None:
    result = sample(lively(2), [row(), row()])
    assert (result.logprobs.size, result.top_ids.shape) == (0, (2, 0))


def test_of_equally_likely_tokens_the_smaller_ids_are_reported() -> None:
    logits = np.zeros((1, V))
    logits[0, 30] = 1.0
    assert sample(logits, [row(logprobs=4)]).top_ids[0].tolist() == [30, 0, 1, 2]


def test_a_prompt_id_without_a_token_is_penalised_in_vain() -> None:
    logits = lively(1)
    rows = [row(token_ids=[40, 44, 49], repetition_penalty=2.0, temperature=0.0)]
    assert sample(logits, rows, vocab_limit=40).token_ids[0] == logits[0, :40].argmax()


def test_a_small_positive_logit_is_divided_by_the_penalty() -> None:
    logits = np.full((1, V), -5.0)
    logits[0, [3, 7]] = 0.5, 0.4
    assert sample(logits, [row(token_ids=[3], repetition_penalty=2.0, temperature=0.0)]).token_ids[0] == 7


def test_no_top_tokens_are_given_when_only_the_chosen_logprob_is_wanted() -> None:
    logits = lively(1)
    result = sample(logits, [row(logprobs=0, temperature=0.0)])
    assert result.top_ids.shape == result.top_logprobs.shape == (1, 0)
    np.testing.assert_allclose(result.logprobs[0], -np.log(np.exp(logits[0] - logits[0].max()).sum()), rtol=1e-5)
    assert largest_ids(logits[0], 0).shape == (0,)


def test_more_logprobs_than_tokens_are_all_there_are() -> None:
    result = sample(lively(1), [row(logprobs=20)], vocab_limit=7)
    assert sorted(result.top_ids[0].tolist()) == list(range(7))


# ---- What moves and forbids tokens ----------------------------------------------------------------------------------


def offsets(one: Sequence) -> dict[int, float]:
    batch = build_sampling_batch([one], vocab_limit=V)
    return dict(zip(batch.offset_ids.tolist(), batch.offsets.tolist(), strict=True))


def test_presence_counts_a_token_once_and_frequency_each_time_and_neither_looks_at_the_prompt() -> None:
    asked = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    assert offsets(row(token_ids=[9, 9, 4, 5, 5, 5], num_prompt_tokens=2, **asked)) == {4: -0.75, 5: -1.25}


def test_a_bias_and_a_penalty_add_up() -> None:
    assert offsets(row(token_ids=[4], logit_bias={4: 3.0, 6: -2.0}, presence_penalty=-1.0)) == {4: 4.0, 6: -2.0}


def test_offsets_are_added_after_the_repetition_penalty() -> None:
    logits = np.full((1, V), -9.0)
    logits[0, [3, 7]] = 4.0, 1.5
    # 4 / 2 - 1 = 1 loses against 1.5; (4 - 1) / 2 = 1.5 would tie, and win as the smaller id
    one = row(token_ids=[3], repetition_penalty=2.0, presence_penalty=1.0, temperature=0.0)
    assert sample(logits, [one]).token_ids[0] == 7


@pytest.mark.parametrize("token_id", [40, 45])
def test_a_bias_on_an_id_without_a_token_moves_nothing(token_id: int) -> None:
    logits = lively(1)
    one = row(logit_bias={token_id: 100.0}, temperature=0.0)
    assert sample(logits, [one], vocab_limit=40).token_ids[0] == logits[0, :40].argmax()


def test_a_strong_bias_forces_a_token_and_logprobs_stay_those_of_the_model() -> None:
    logits = lively(2)
    rows = [row(logit_bias={11: 100.0}, logprobs=1, temperature=0.0), row(logprobs=1, temperature=0.0)]
    result = sample(logits, rows)
    assert result.token_ids.tolist() == [11, logits[1].argmax()]
    log_sums = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(result.logprobs, [logits[0, 11] - log_sums[0], logits[1].max() - log_sums[1]], atol=1e-5)
    assert result.top_ids[0] == logits[0].argmax()


@pytest.mark.parametrize(("output", "banned"), [([], {5}), ([7], {5}), ([7, 8], {5, 9}), ([8, 7], {5}), ([8], {5})])
def test_the_last_token_of_a_bad_word_is_forbidden_once_the_others_stand_in_the_output(
    output: list[int], banned: set[int]
) -> None:
    one = row(token_ids=[7, 8, *output], num_prompt_tokens=2, bad_word_ids=((5,), (7, 8, 9)))
    assert {token_id for token_id, offset in offsets(one).items() if offset == -np.inf} == banned


@pytest.mark.parametrize(("num_output", "banned"), [(0, {0}), (1, {0}), (2, set())])
def test_no_end_token_before_min_tokens(num_output: int, banned: set[int]) -> None:
    one = row(token_ids=[3, *[4] * num_output], num_prompt_tokens=1, min_tokens=2)
    assert set(offsets(one)) == banned


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.99}, {"min_p": 1e-9}])
def test_only_allowed_tokens_are_chosen(temperature: float, filters: dict[str, Any]) -> None:
    logits = np.repeat(lively(1), 60, axis=0)
    guide = AllowedIds([2, 31, 32, 49, 77])
    rows = [row(seed, guide=guide, temperature=temperature, **filters) for seed in range(len(logits))]
    rows[-1] = row(temperature=0.0)
    *chosen, free = sample(logits, rows).token_ids.tolist()
    assert set(chosen) <= {2, 31, 32, 49}
    assert len(set(chosen)) > (1 if temperature else 0)
    assert free == logits[0].argmax()


def test_the_one_bit_of_a_mask_is_the_one_token_allowed() -> None:
    rows = [row(guide=AllowedIds([token_id])) for token_id in range(V)]
    assert sample(np.zeros((V, V)), rows).token_ids.tolist() == list(range(V))


class Broken:
    def start(self) -> Broken:
        return self

    def allow(self, words: np.ndarray) -> bool:
        words[:] = 2**32 - 1
        raise ValueError("broken")

    def advance(self, token_id: int) -> None:
        pass


def test_a_guide_that_fails_or_allows_nothing_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    logits = lively(3)
    rows = [row(guide=Broken(), temperature=0.0), row(guide=AllowedIds([77])), row(temperature=0.0)]
    assert sample(logits, rows).token_ids.tolist() == [-1, -1, logits[2].argmax()]
    assert [record.getMessage() for record in caplog.records] == ["a guide failed; its sequence ends with an error"]


class NoWayOn(Broken):
    def allow(self, words: np.ndarray) -> bool:
        raise DeadEndError("no way on")


def bad(*token_ids: int) -> tuple[tuple[int, ...], ...]:
    return tuple((token_id,) for token_id in token_ids)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, None),
        ({"guide": AllowedIds([3])}, None),
        ({"guide": AllowedIds([3, 4]), "bad_word_ids": bad(3)}, None),
        ({"guide": AllowedIds([3]), "logit_bias": {3: -100.0}}, None),
        ({"bad_word_ids": bad(*range(V - 1))}, None),
        ({"guide": Broken()}, None),
        ({"guide": AllowedIds([77])}, None),
        ({"guide": NoWayOn()}, "no way on"),
        ({"guide": AllowedIds([3, 4]), "bad_word_ids": bad(3, 4)}, "bad_words forbids every token"),
        ({"bad_word_ids": bad(*range(V))}, "bad_words forbids every token"),
    ],
    ids=str,
)
def test_a_row_without_a_token_is_at_a_dead_end_only_where_its_request_left_none(
    params: dict[str, Any], message: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Anything else, such as a guide that breaks or logits that are not finite, is our fault."""
    one = row(**params)
    dead_end = find_dead_end(one, V)
    assert (dead_end is None) == (message is None)
    assert message is None or message in str(dead_end)
    assert message is None or sample(lively(1), [one]).token_ids.tolist() == [-1]
    assert not caplog.records, "whoever asked is told; the log need not be"


def test_a_guide_that_leaves_only_the_end_may_end_before_min_tokens() -> None:
    one = row(token_ids=[3], num_prompt_tokens=1, min_tokens=5, guide=AllowedIds([0]), temperature=0.0)
    assert sample(lively(1), [one]).token_ids.tolist() == [0]


@pytest.mark.parametrize(("num_output", "chosen"), [(0, 7), (1, 7), (2, 0)])
def test_a_guide_that_leaves_more_than_the_end_goes_on_until_min_tokens(num_output: int, chosen: int) -> None:
    logits = np.full((1, V), -5.0)
    logits[0, 0] = 5.0
    guide = AllowedIds([0, 7, V])  # the last has no token, but a bit
    one = row(token_ids=[3, *[4] * num_output], num_prompt_tokens=1, min_tokens=2, guide=guide, temperature=0.0)
    assert sample(logits, [one]).token_ids.tolist() == [chosen]
    one = row(token_ids=[3], num_prompt_tokens=1, min_tokens=2, guide=AllowedIds([0, V]), temperature=0.0)
    assert sample(logits, [one]).token_ids.tolist() == [0]


def test_a_nan_that_is_forbidden_fails_all_the_same() -> None:
    logits = lively(1)
    logits[0, 30] = np.nan
    assert sample(logits, [row(guide=AllowedIds([3]))]).token_ids.tolist() == [-1]
