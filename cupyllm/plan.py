"""What the scheduler decides for a step, and how prompts share a step's tokens. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass, field

from cupyllm.sequence import Sequence


@dataclass(frozen=True)
class PlannedChunk:
    """Run tokens [start, start + length) of a sequence."""

    sequence: Sequence
    start: int
    length: int

    @property
    def reaches_end(self) -> bool:
        """Whether the chunk holds the last known token, so that the next token can be sampled."""
        return self.start + self.length == self.sequence.num_tokens


@dataclass(slots=True)
class Plan:
    """What one step runs: one token of each decode row, then chunks of prompts.

    `decodes` is in order of rows; `entering` are the sequences whose token was to be the first of a page, `growing`
    those that got a page, for this step or a later one. Pages are copied (from, to) before anything runs.
    """

    decodes: list[Sequence]
    prompts: list[PlannedChunk]
    page_copies: list[tuple[int, int]]
    entering: list[Sequence] = field(default_factory=list)
    growing: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.prompts)

    @property
    def chunks(self) -> list[PlannedChunk]:
        """Decode rows and prompts alike, in the order of the batch."""
        return [PlannedChunk(sequence, sequence.num_computed, 1) for sequence in self.decodes] + self.prompts

    @property
    def num_decodes(self) -> int:
        return len(self.decodes)

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(chunk.length for chunk in self.prompts)


def share_budget(wanted: list[int], budget: int) -> list[int]:
    """Split a token budget over prompts, first one first: half for it, then first come, first served, the rest back.

    >>> share_budget([1000, 20, 20], 512)
    [472, 20, 20]
    >>> share_budget([1000, 900, 20], 512)
    [256, 256, 0]
    """
    if not wanted:
        return []
    given = [min(wanted[0], -(-budget // 2))]
    left = budget - given[0]
    for want in wanted[1:]:
        given.append(min(want, left))
        left -= given[-1]
    given[0] += min(wanted[0] - given[0], left)
    return given
