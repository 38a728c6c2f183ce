"""Beam search: the same answers as transformers, over shared pages, also when pages or rows run out."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.beam_search import BeamParams, BeamSearch
from cupyllm.engine import Engine
from cupyllm.errors import RequestError
from cupyllm.model import Model
from cupyllm.sampling import SamplingParams
from tests.engine_case import load_model, make_engine
from tests.tiny_checkpoint import write_tiny_checkpoint

END_IDS = (30, 31)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small vocabulary, so that end tokens are among the likely ones."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("beams") / "model", vocab_size=32, seed=3)


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    return load_model(folder)


def prompt(seed: int, length: int = 9) -> list[int]:
    return np.random.default_rng(seed).integers(0, 30, length).tolist()


def search_to_end(engine: Engine, search: BeamSearch) -> BeamSearch:
    for _ in range(1000):
        ended = engine.step().ended_searches
        engine.scheduler.check_integrity()
        if search in ended:
            return search
    raise AssertionError("the search does not end")


def beams(model: Model, ids: list[int], params: BeamParams, **config: Any) -> list[tuple[int, ...]]:
    engine = make_engine(model, **config)
    search = search_to_end(engine, engine.add_beams(ids, params))
    assert not engine.has_work
    assert engine.stats.num_live_pages == 0
    return [beam.token_ids for beam in search.finished]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_answers_equal_those_of_transformers(folder: Path, model: Model, width, early_stopping, length_penalty) -> None:
    torch = pytest.importorskip("torch", reason="install torch and transformers to compare with them")
    transformers = pytest.importorskip("transformers", reason="install torch and transformers to compare with them")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    params = BeamParams(width, length_penalty, early_stopping, max_tokens=12)
    for seed in range(6):
        ids = prompt(seed)
        answer = theirs.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids)),
            num_beams=width,
            num_return_sequences=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=31,
        )
        ours = beams(model, ids, params)
        expected = [cut(row) for row in answer[:, len(ids) :].tolist()]
        assert [cut(row) for row in ours][: len(expected)] == expected


def cut(ids: Any) -> list[int]:
    """Up to the first end token: transformers pads with it."""
    return [*itertools.takewhile(lambda token: token not in END_IDS, ids)]


@pytest.mark.parametrize("width", [2, 4, 6])
@pytest.mark.parametrize(
    "config",
    [
        {"num_pages": 14},
        {"num_pages": 8},
        {"max_decode_batch_size": 6, "page_size": 1},
        {"max_step_tokens": 6, "max_decode_batch_size": 6},
        {"prefix_cache": False, "num_pages": 10},
    ],
    ids=["few pages", "very few pages", "pages of 1", "chunks of 6", "nothing reused"],
)
def test_small_pools_and_chunks_do_not_change_the_beams(model: Model, width: int, config: dict[str, Any]) -> None:
    params = BeamParams(width, max_tokens=14, ignore_eos=True)
    assert beams(model, prompt(1), params, **config) == beams(model, prompt(1), params)


def test_beams_and_other_requests_run_side_by_side(model: Model) -> None:
    params = BeamParams(4, max_tokens=10)
    expected = [beams(model, prompt(seed), params) for seed in range(3)]
    engine = make_engine(model, num_pages=30, max_decode_batch_size=6)
    searches = [engine.add_beams(prompt(seed), params) for seed in range(3)]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    neighbours = [engine.add(prompt(seed), greedy) for seed in (7, 8)]
    events = []
    while engine.has_work:
        events += engine.step()
        engine.scheduler.check_integrity()
    assert [[beam.token_ids for beam in search.finished] for search in searches] == expected
    assert {event.sequence for event in events} == set(neighbours)
    for seed, sequence in zip((7, 8), neighbours, strict=True):
        alone = make_engine(model)
        alone_sequence = alone.add(prompt(seed), greedy)
        while alone.has_work:
            alone.step()
        assert sequence.output_ids == alone_sequence.output_ids


def test_beams_share_the_pages_of_what_they_have_in_common(model: Model) -> None:
    engine = make_engine(model)
    search = engine.add_beams(prompt(2, length=40), BeamParams(4, max_tokens=10, ignore_eos=True))
    engine.step()
    engine.step()
    assert len(search.live) == 4
    tables = [sequence.page_table for sequence, _ in search.live.values()]
    assert all(table[:10] == tables[0][:10] for table in tables)
    assert engine.stats.num_live_pages == len({page for table in tables for page in table}) <= 10 + 4
    engine.abort_search(search)
    assert search.done
    assert not engine.has_work
    engine.scheduler.check_integrity()


def test_a_failed_step_ends_the_search(model: Model) -> None:
    engine = make_engine(model)
    search = engine.add_beams(prompt(2), BeamParams(3))
    engine.step()
    engine.abort_all()
    assert (search.failed, search.done, engine.has_work) == (True, True, False)


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 7}, "beam_width"),
        ({"beam_width": True}, "beam_width"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"length_penalty": "1"}, "length_penalty"),
        ({"early_stopping": "maybe"}, "early_stopping"),
        ({"early_stopping": 1}, "early_stopping"),
    ],
)
def test_bad_parameters_are_named(values: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        BeamParams(**values)
    assert caught.value.param == param


def test_more_beams_than_rows_or_candidates_are_refused(model: Model) -> None:
    with pytest.raises(RequestError, match="needs as many rows"):
        make_engine(model, max_decode_batch_size=3).add_beams([1], BeamParams(4))
    with pytest.raises(RequestError, match="at most 20 are supported"):
        make_engine(model).add_beams([1], BeamParams(6, stop_token_ids=(1, 2)))


def test_forks_find_the_rows_that_dropped_beams_leave(model: Model) -> None:
    engine = make_engine(model, max_decode_batch_size=4)
    search = engine.add_beams(prompt(4), BeamParams(4, max_tokens=30, ignore_eos=True))
    engine.step()
    while not search.done:
        assert engine.stats.num_waiting == 0
        assert engine.stats.num_running == 4
        engine.step()
