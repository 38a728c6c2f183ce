"""What one HTTP request asks of the engine, and what it then has in there: sequences, or beam searches.

A search that has ended becomes the token events of its answers, so that all that follows is as for sampled ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.engine import Engine
from cupyllm.errors import RequestError
from cupyllm.prompt_readout import Pooling
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import FinishReason, Sequence
from cupyllm.step_result import TokenEvent

# More answers or beams than this in one request are refused; prompts that are given one by one are not limited by it.
MAX_SEQUENCES = 64


@dataclass(frozen=True)
class EngineRequest:
    """What one HTTP request asks of the engine: P prompts and, for each, how to sample its n answers, or how to
    search for the n best, or, with `pooling`, one vector.
    """

    prompts: list[list[int]]
    params: list[SamplingParams]  # one for each prompt, all with the same n
    priority: int = 0
    cache_salt: str = ""
    beams: list[BeamParams] = field(default_factory=list)  # one for each prompt where searches are asked for, else none
    pooling: Pooling | None = None

    @property
    def n(self) -> int:
        return self.params[0].n

    @property
    def num_waiting(self) -> int:
        """How many sequences it makes wait; a beam search begins with one."""
        return len(self.prompts) * (1 if self.beams else self.n)

    def check(self, engine: Engine) -> None:
        """Refuse what can never be served: raises RequestError naming the field. Any thread may call it."""
        self._check_size(engine.config.max_waiting)
        for prompt, params in zip(self.prompts, self.params, strict=True):
            engine.check(prompt, params)

    def _check_size(self, most: int) -> None:
        each, name = (self.beams[0].beam_width, "beam_width") if self.beams else (self.n, "n")
        if each > 1:
            most = min(most, MAX_SEQUENCES)
        if len(self.prompts) * each > most:
            raise RequestError(
                f"{len(self.prompts)} prompts with {each} {'beams' if self.beams else 'answers'} each are "
                f"{len(self.prompts) * each} sequences; one request may have {most} (max_waiting, and {MAX_SEQUENCES} "
                "where n, best_of or beam_width is above 1)",
                param=name if each > 1 else "prompt",
            )


@dataclass
class EngineWork:
    """What a request has inside the engine. Belongs to the engine thread.

    sequences         by choice; none where beams are searched
    searches          by prompt; none where answers are sampled
    prompt_sequences  by prompt: the sequence that runs it
    """

    asked: EngineRequest
    sequences: list[Sequence] = field(default_factory=list)
    searches: list[BeamSearch] = field(default_factory=list)
    prompt_sequences: list[Sequence] = field(default_factory=list)

    @property
    def num_cached_tokens(self) -> int:
        return sum(sequence.num_cached_tokens or 0 for sequence in self.prompt_sequences)

    @property
    def num_preemptions(self) -> int:
        """How often its sequences were preempted; those of beams are not counted."""
        return sum(sequence.num_preemptions for sequence in self.sequences)

    @property
    def started_at(self) -> float | None:
        """When the first of its prompts began to run, in seconds of time.monotonic; None before that."""
        starts = [sequence.started_at for sequence in self.prompt_sequences]
        return min((start for start in starts if start is not None), default=None)

    def add_to(self, engine: Engine) -> None:
        """Queue everything. Raises what Engine.add raises; what had been queued until then must be aborted."""
        asked = self.asked
        for number, prompt in enumerate(asked.prompts):
            if asked.beams:
                beams = asked.beams[number]
                search = engine.add_beams(prompt, beams, priority=asked.priority, cache_salt=asked.cache_salt)
                self.searches.append(search)
                self.prompt_sequences += [sequence for sequence, _ in search.live.values()]
            elif asked.pooling is not None:
                self.sequences.append(engine.add_embedding(prompt, asked.pooling, priority=asked.priority))
                self.prompt_sequences.append(self.sequences[-1])
            else:
                params = asked.params[number].split()
                added = engine.add_parallel(prompt, params, priority=asked.priority, cache_salt=asked.cache_salt)
                self.sequences += added
                self.prompt_sequences.append(added[0])

    def embeddings(self) -> list[np.ndarray]:
        """The pooled hidden state of each prompt, (C,) float32, once all have been read."""
        return [sequence.readout.embedding for sequence in self.sequences if sequence.readout is not None]

    def abort(self, engine: Engine, choice: int | None = None) -> list[int | BeamSearch]:
        """End one choice, or all; returns the ids of the sequences, and the searches, that this ended."""
        sequences = self.sequences if choice is None else [self.sequences[choice]]
        for sequence in sequences:
            engine.abort(sequence)
        for search in self.searches:
            engine.abort_search(search)
        return [*(sequence.id for sequence in sequences), *self.searches]

    def answers_of_search(self, number: int) -> Iterator[tuple[int, TokenEvent]]:
        """(choice, event) for every token of the n best beams for prompt `number`, whose search has ended."""
        search, sequence, n = self.searches[number], self.prompt_sequences[number], self.asked.n
        if search.failed:
            yield number * n, TokenEvent(sequence, None, None, FinishReason.ERROR)
            return
        for choice, beam in enumerate(search.finished[:n], start=number * n):
            *others, last = beam.token_ids
            for token_id in others:
                yield choice, TokenEvent(sequence, token_id, None, None)
            yield choice, TokenEvent(sequence, last, None, FinishReason.STOP if beam.ended else FinishReason.LENGTH)
