"""The decode rows of a batch as those see them who keep them on the device."""

from __future__ import annotations

from cupyllm.batch import BatchBuilder
from cupyllm.plan import Plan
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence


def decoding(number: int, length: int, page_table: list[int]) -> Sequence:
    """A sequence whose last token, the only one that it generated, is to run."""
    sequence = Sequence(number, [7] * length, length - 1, SamplingParams(), 0, 100, frozenset(), page_table=page_table)
    sequence.num_computed, sequence.row = length - 1, number
    return sequence


def test_the_rows_hold_each_sequences_place_and_pages_and_nothing_of_those_that_left() -> None:
    builder = BatchBuilder(page_size=4)
    rows = [decoding(0, 6, [3, 1]), decoding(1, 9, [0, 5, 2])]
    builder.build(Plan(rows, [], []))
    assert builder.positions.tolist() == [5, 8]
    assert [row[:3].tolist() for row in builder.page_tables] == [[3, 1, -1], [0, 5, 2]]
    assert builder.max_context_len == 9
    rows[0].append(8)
    builder.build(Plan(rows[:1], [], []))
    assert builder.positions.tolist() == [6]
    assert [row[:3].tolist() for row in builder.page_tables] == [[3, 1, -1]]
    assert builder.max_context_len == 7
