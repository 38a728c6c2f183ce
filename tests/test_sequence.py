"""One sequence: where it stands, when it ends, and who goes first."""

from __future__ import annotations

from typing import Any

import pytest

from cupyllm.sampling import SamplingParams
from cupyllm.sequence import PENDING, FinishReason, Sequence, by_rank


def make(prompt: list[int], max_tokens: int = 3, **more: Any) -> Sequence:
    given = {"id": 0, "end_token_ids": frozenset({9}), "seed": 0, "params": SamplingParams()} | more
    return Sequence(token_ids=prompt, num_prompt_tokens=len(prompt), max_tokens=max_tokens, **given)


@pytest.mark.parametrize(
    ("sampled", "reason"),
    [
        ([1, 2], None),
        ([1, 2, 3], FinishReason.LENGTH),
        ([1, 9], FinishReason.STOP),
        ([1, 2, 9], FinishReason.STOP),
    ],
    ids=["goes on", "reaches max_tokens", "an end token", "an end token at max_tokens"],
)
def test_when_a_sequence_ends(sampled: list[int], reason: FinishReason | None) -> None:
    sequence = make([5, 9])
    sequence.page_table = [0]
    for token_id in sampled:
        assert sequence.finish_reason is None
        told = sequence.append(token_id)
    assert (told, sequence.finish_reason, sequence.output_ids) == (reason, reason, sampled)
    assert (sequence.num_output_tokens, sequence.num_uncomputed) == (len(sampled), 1)


def test_a_sequence_without_pages_has_everything_to_compute() -> None:
    sequence = make([5, 6])
    assert not sequence.is_decoding
    sequence.append(7)
    assert (sequence.num_uncomputed, sequence.is_decoding) == (3, False)


def test_a_prompt_of_one_token_is_no_decode_row() -> None:
    sequence = make([5])
    assert (sequence.num_uncomputed, sequence.is_decoding) == (1, False)
    sequence.page_table = [0]
    sequence.append(7)
    assert (sequence.num_uncomputed, sequence.is_decoding) == (1, True)


def test_each_id_counts_once_for_the_repetition_penalty_as_tokens_come() -> None:
    sequence = make([5, 6, 5], max_tokens=9)
    assert sequence.distinct_ids == {5, 6}
    sequence.append(7)
    sequence.append(6)
    assert sequence.distinct_ids == {5, 6, 7}


def test_the_lower_priority_then_the_earlier_arrival_goes_first_and_forks_stand_beside_their_parent() -> None:
    first, second = make([1], id=1), make([1], id=2)
    fork, urgent, later = make([1], id=7, arrival=1), make([1], id=8, priority=-1), make([1], id=0, priority=1)
    assert sorted([later, second, fork, urgent, first], key=by_rank) == [urgent, first, fork, second, later]


def test_expected_tokens_stand_in_their_places_until_they_are_known() -> None:
    sequence = make([5, 6], max_tokens=9)
    sequence.page_table = [0]
    for _ in range(2):
        sequence.expect_token()
    assert (sequence.token_ids, sequence.num_computed, sequence.num_pending) == ([5, 6, PENDING, PENDING], 3, 2)
    assert sequence.append(7) is None
    assert (sequence.token_ids, sequence.num_pending) == ([5, 6, 7, PENDING], 1)
    assert sequence.append(8) is None
    assert (sequence.token_ids, sequence.num_pending) == ([5, 6, 7, 8], 0)


def test_what_is_expected_behind_the_last_token_is_dropped() -> None:
    sequence = make([5, 6], max_tokens=9)
    sequence.page_table = [0]
    for _ in range(2):
        sequence.expect_token()
    assert sequence.append(9) is FinishReason.STOP
    assert sequence.token_ids == [5, 6, 9]
