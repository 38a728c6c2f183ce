"""Captured decode steps under the emulator: the same tokens as without, nothing sent in vain, and faults that show."""

from __future__ import annotations

import logging
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm import LLM
from cupyllm.batch import Batch
from cupyllm.beam_search import BeamParams
from cupyllm.checkpoint import Checkpoint
from cupyllm.config import EngineConfig
from cupyllm.cuda.loader import KernelLoader, emulated_loader
from cupyllm.decode_graphs import GraphKey, bucket_of, context_bucket
from cupyllm.device import Capture, Graph, HostDevice
from cupyllm.engine import Engine
from cupyllm.errors import ConfigError, DeviceError
from cupyllm.kv_cache import allocate_kv_cache
from cupyllm.model import make_model
from cupyllm.model_config import GenerationDefaults, read_model_config
from cupyllm.ops.cuda import CudaOps
from cupyllm.ops.reference import ReferenceOps
from cupyllm.ops.select import make_backend
from cupyllm.sampling import SamplingParams
from cupyllm.sampling_batch import SamplingBatch
from cupyllm.sequence import PENDING, FinishReason, Sequence
from cupyllm.startup import choose_capture, load_engine
from cupyllm.weights import load_weights
from tests.engine_case import run_to_end
from tests.tiny_checkpoint import write_tiny_checkpoint

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")
NUM_LAYERS = 2
TIE = 64 * 2.0**-10  # of log-probabilities: every operand of two layers' products is rounded to float16
GREEDY = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
PENALTIES: list[dict[str, Any]] = [
    {"frequency_penalty": 0.5},
    {"presence_penalty": -0.25},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.8, "presence_penalty": 0.7, "frequency_penalty": -0.125},
]
# With these the graph ends behind the last layer.
BY_THE_HOST: list[dict[str, Any]] = [
    {"logit_bias": {7: 2.0}},
    {"bad_word_ids": ((11,), (12, 13))},
    {"min_tokens": 12},
    {"allowed_token_ids": tuple(range(0, 500, 3))},
    {"logprobs": 2},
    {"logprobs": 0, "frequency_penalty": 0.5},
]
PENALISED = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.0, repetition_penalty=1.3)
DRAWN = SamplingParams(temperature=1.0, top_k=40, top_p=0.9, min_p=0.01, seed=1, max_tokens=60, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("graphs") / "model",
        dtype="float16",
        num_layers=NUM_LAYERS,
        hidden_size=128,
        intermediate_size=104,
        num_heads=2,
        num_kv_heads=1,
    )


@pytest.fixture(scope="module")
def loader() -> KernelLoader:
    """One for all engines, so that each kernel is compiled once."""
    return emulated_loader("fast")


class CountingDevice(HostDevice):
    """The host, which counts what is sent to it as to a device."""

    def __init__(self) -> None:
        super().__init__()
        object.__setattr__(self, "uploads", [])

    uploads: list[int]

    def upload(self, host: np.ndarray) -> np.ndarray:
        self.uploads.append(host.nbytes)
        return super().upload(host)


class WatchingOps(CudaOps):
    """Notices rows whose penalties are made of tokens that the host has not read, and keeps what was done."""

    def __init__(self, loader: KernelLoader, device: HostDevice) -> None:
        super().__init__(loader, device)
        self.counted: list[tuple[list[list[int]], list[int]]] = []
        self.sampled: list[int] = []  # rows of each step that was launched by its kernels

    def sample(self, logits: Any, sampling: SamplingBatch) -> Any:
        assert PENDING not in (*sampling.penalty_ids, *sampling.offset_ids)
        self.sampled.append(len(logits))
        return super().sample(logits, sampling)

    def count_tokens(self, counts: Any, jobs: Any, tokens: Any, **options: Any) -> None:
        assert PENDING not in tokens
        self.counted.append((jobs.tolist(), tokens.tolist()))
        super().count_tokens(counts, jobs, tokens, **options)


def make_engine(
    folder: Path,
    ops: ReferenceOps,
    *,
    capture: Capture | None = None,
    device: HostDevice | None = None,
    num_pages: int = 200,
    **config: Any,
) -> Engine:
    """Float16 weights for kernels, and float32 ones of the same values for the reference."""
    device = device or HostDevice()
    dtype = "float16" if isinstance(ops, CudaOps) else "float32"
    model_config = read_model_config(folder)
    weights = load_weights(Checkpoint.open(folder), model_config, dtype=dtype, upload=device.upload)
    return Engine(
        EngineConfig(page_size=16, **config),
        make_model(model_config, weights, device, num_positions=512),
        allocate_kv_cache(device, model_config, num_pages=num_pages, page_size=16, dtype=dtype),
        ops,
        device,
        max_model_len=min(512, num_pages * 16),
        vocab_limit=model_config.vocab_size,
        defaults=GenerationDefaults(temperature=0.0),
        capture=capture,
    )


def drive(engine: Engine, seed: int, steps: int, host_share: float = 0.1) -> list[Sequence]:
    """Joins, leaves, aborts and growing contexts, chosen by the seed alone; then the rest runs to its end.

    `host_share` of the sequences want of the host what no graph can do.
    """
    rng, asked = random.Random(seed), []
    for step in range(steps):
        if rng.random() < 0.2 and engine.num_waiting < 3:
            kind = rng.randrange(4)
            sampling: dict[str, Any] = {"temperature": 0.0} if kind < 2 else {"temperature": 0.9, "seed": step}
            sampling |= {"top_k": rng.choice([0, 20]), "top_p": rng.choice([1.0, 0.8])} if kind == 3 else {}
            sampling |= rng.choice(PENALTIES) if rng.random() < (0.15 if kind < 2 else 0.6) else {}
            sampling |= rng.choice(BY_THE_HOST) if rng.random() < host_share else {}
            most = max(rng.randint(1, 40), sampling.get("min_tokens", 0))
            params = SamplingParams(max_tokens=most, ignore_eos=rng.random() < 0.5, **sampling)
            prompt = [rng.randrange(500) for _ in range(rng.randint(1, 40))]
            asked.append(engine.add(prompt, params))
        if asked and rng.random() < 0.05:
            engine.abort(rng.choice(asked))
        if engine.has_work:
            engine.step()
            engine.scheduler.check_integrity()
    run_to_end(engine)
    return asked


def answers(sequences: list[Sequence]) -> list[Any]:
    return [(sequence.output_ids, sequence.finish_reason) for sequence in sequences]


def is_same(ours: Sequence, theirs: Sequence) -> bool:
    """Whether two answers are the same; those of one that was aborted as far as both had got.

    Of penalised rows the captured engine reads the tokens a step late, and so ends and starts sequences later, too.
    """
    tokens, others = ([token for token in one.output_ids if token != PENDING] for one in (ours, theirs))
    if FinishReason.ABORT in (ours.finish_reason, theirs.finish_reason):
        return all(token == other for token, other in zip(tokens, others, strict=False))
    return (tokens, ours.finish_reason) == (others, theirs.finish_reason)


def is_tie(reference: Engine, ours: Sequence, theirs: Sequence) -> bool:
    """Whether two answers part where the reference's choice is closer than the rounding of a float16 model."""
    pairs = zip(ours.token_ids, theirs.token_ids, strict=False)
    place = next((place for place, (own, other) in enumerate(pairs) if own != other), None)
    if place is None:  # one was aborted or ended before the other
        return False
    reference.add(theirs.token_ids[:place], replace(GREEDY, max_tokens=1, logprobs=2))
    (event,) = run_to_end(reference)
    assert event.logprobs is not None
    (first, value), (second, next_value) = event.logprobs.top
    return {ours.token_ids[place], theirs.token_ids[place]} == {first, second} and value - next_value < TIE


@pytest.mark.parametrize(
    ("overlap", "num_pages", "most_growing"), [(False, 200, 31), (True, 200, 31), (True, 8, 31), (True, 8, 1)]
)
def test_200_steps_of_every_change_give_the_tokens_of_the_uncaptured_engine(
    folder: Path,
    loader: KernelLoader,
    overlap: bool,
    num_pages: int,
    most_growing: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With one page that grows in a step the six rows get pages early, and must give them back."""
    monkeypatch.setattr("cupyllm.scheduler.MOST_GROWING", most_growing)
    switches: dict[str, Any] = {"num_pages": num_pages, "max_decode_batch_size": 6, "max_step_tokens": 32}
    captured, plain = (
        make_engine(folder, WatchingOps(loader, HostDevice()), capture=capture, overlap=overlap, **switches)
        for capture in (loader.capture, None)
    )
    reference = make_engine(folder, ReferenceOps(), overlap=overlap, **switches)
    asked = [drive(engine, seed=num_pages, steps=200) for engine in (captured, plain, reference)]
    assert all(map(is_same, asked[0], asked[1]))
    greedy = [
        (ours, theirs)
        for ours, theirs in zip(asked[0], asked[2], strict=True)
        if ours.params.temperature == 0 and not ours.params.changes_logits and not ours.params.penalises
    ]
    same = [is_same(ours, theirs) or is_tie(reference, ours, theirs) for ours, theirs in greedy]
    assert all(same), [ours.id for (ours, _), is_right in zip(greedy, same, strict=True) if not is_right]
    assert sum(is_same(ours, theirs) for ours, theirs in greedy) > 0.6 * len(greedy) > 5
    assert len(captured.runner.graphs.graphs) >= 4, "greedy and sampled, in several sizes"
    assert {key.kind for key in captured.runner.graphs.graphs} == {"greedy", "sampled", "unsampled"}
    assert captured.stats.num_graph_replays >= len(captured.runner.graphs.graphs)
    assert plain.stats.num_graph_replays == 0
    assert (captured.stats.num_preemptions > 0) == (num_pages == 8)


@pytest.mark.parametrize(("overlap", "num_pages"), [(False, 200), (True, 200), (True, 8)])
def test_200_steps_that_need_the_host_give_the_tokens_of_the_uncaptured_engine(
    folder: Path, loader: KernelLoader, overlap: bool, num_pages: int
) -> None:
    switches: dict[str, Any] = {"num_pages": num_pages, "max_decode_batch_size": 4, "max_step_tokens": 32}
    captured, plain = (
        make_engine(folder, WatchingOps(loader, HostDevice()), capture=capture, overlap=overlap, **switches)
        for capture in (loader.capture, None)
    )
    asked = [drive(engine, seed=num_pages + 1, steps=200, host_share=0.8) for engine in (captured, plain)]
    assert all(map(is_same, *asked))
    assert captured.stats.num_graph_replays > 50
    assert "unsampled" in {key.kind for key in captured.runner.graphs.graphs}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_has_the_logprobs_of_the_uncaptured_engine_beside_one_with_penalties(
    folder: Path, loader: KernelLoader, overlap: bool
) -> None:
    told = []
    for capture in (loader.capture, None):
        engine = make_engine(folder, WatchingOps(loader, HostDevice()), capture=capture, overlap=overlap)
        # The penalised one keeps its row, and its counts, when the other has left.
        sequences = [engine.add([4, 5], PENALISED), engine.add([1, 2, 3], replace(DRAWN, logprobs=3, max_tokens=20))]
        events = run_to_end(engine)
        told.append((answers(sequences), [event.logprobs for event in events if event.logprobs is not None]))
        assert engine.stats.num_graph_replays == (59 if capture else 0), "all but the prompts' step"
    assert told[0] == told[1]
    assert len(told[0][1]) == 20


@pytest.mark.parametrize("overlap", [False, True])
def test_beams_beside_a_captured_row_choose_their_own_tokens(folder: Path, loader: KernelLoader, overlap: bool) -> None:
    """A beam goes on with another token than the most likely one where that would end it."""
    greedy = make_engine(folder, CudaOps(loader, HostDevice()))
    likely = greedy.add([1, 2, 3], GREEDY)
    run_to_end(greedy)
    found = []
    for capture in (loader.capture, None):
        engine = make_engine(folder, CudaOps(loader, HostDevice()), capture=capture, overlap=overlap)
        stops = tuple(likely.output_ids[2:6])
        params = BeamParams(2, length_penalty=3.0, early_stopping="never", max_tokens=12, stop_token_ids=stops)
        search = engine.add_beams([1, 2, 3], params)
        other = engine.add([4, 5], GREEDY)
        run_to_end(engine)
        found.append(([(beam.token_ids, beam.score) for beam in search.finished], other.output_ids))
        assert (engine.stats.num_graph_replays > 0) == (capture is not None)
    assert found[0] == found[1]


def steady_engine(
    folder: Path,
    loader: KernelLoader,
    count: int,
    device: HostDevice,
    params: SamplingParams = GREEDY,
    num_pages: int = 200,
) -> Engine:
    """`count` sequences that decode, with a captured graph, all about to leave the first position of a page."""
    switches = {"overlap": True, "max_decode_batch_size": 64, "max_prefill_batch_size": 64, "num_pages": num_pages}
    engine = make_engine(folder, CudaOps(loader, device), capture=loader.capture, device=device, **switches)
    for number in range(count):
        engine.add([number] * 14, params)
    while min((sequence.num_tokens for sequence in engine.scheduler.decoding), default=0) < 18:
        engine.step()
    return engine


@pytest.mark.parametrize("params", [GREEDY, PENALISED, DRAWN])
@pytest.mark.parametrize("count", [1, 3, 21])
def test_a_steady_step_sends_nothing_and_a_page_that_is_entered_less_than_256_bytes(
    folder: Path, loader: KernelLoader, count: int, params: SamplingParams
) -> None:
    device = CountingDevice()
    engine = steady_engine(folder, loader, count, device, params)
    for _ in range(2):
        sent = []
        for _ in range(16):
            device.uploads.clear()
            assert len(list(engine.step())) == count
            sent.append(sum(device.uploads))
        assert sorted(sent)[:15] == [0] * 15
        assert 0 < max(sent) < 256


@pytest.mark.parametrize(
    ("params", "around"), [(GREEDY, 3), (DRAWN, 4), (PENALISED, 4), (replace(DRAWN, frequency_penalty=0.5), 4)]
)
@pytest.mark.parametrize("count", [1, 8])
def test_a_captured_step_has_six_launches_a_layer_and_four_around_them(
    folder: Path, loader: KernelLoader, count: int, params: SamplingParams, around: int
) -> None:
    engine = steady_engine(folder, loader, count, HostDevice(), params)
    (graph,) = [graph for key, graph in engine.runner.graphs.graphs.items() if key.rows == count]
    assert graph.num_launches == 6 * NUM_LAYERS + around


@pytest.mark.parametrize(
    ("changes", "by_themselves"),
    [
        ({"logit_bias": {7: 2.0}}, ["skinny_gemm", "adjust_logits", "argmax", "update_rows"]),
        ({"logprobs": 2}, ["skinny_gemm", "argmax", "group_maxima", "top_logprobs", "update_rows"]),
    ],
    ids=lambda value: next(iter(value)),
)
def test_where_the_host_is_needed_head_and_sampling_are_all_that_is_launched_by_itself(
    folder: Path,
    loader: KernelLoader,
    changes: dict[str, Any],
    by_themselves: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = steady_engine(folder, loader, 3, HostDevice(), replace(GREEDY, **changes))
    (graph,) = [graph for key, graph in engine.runner.graphs.graphs.items() if key.rows == 4]
    assert graph.num_launches == 6 * NUM_LAYERS + 1
    launched: list[str] = []
    launch = loader.launch
    monkeypatch.setattr(loader, "launch", lambda name, *rest: [launched.append(name), launch(name, *rest)])
    engine.step()
    assert launched == by_themselves


def sent_by_steps(engine: Engine, device: CountingDevice, steps: int) -> list[int]:
    """Bytes that each step sends."""
    sent = []
    for _ in range(steps):
        device.uploads.clear()
        engine.step()
        sent.append(sum(device.uploads))
    return sent


def test_64_rows_that_enter_a_page_in_the_same_step_send_less_than_256_bytes_in_any(
    folder: Path, loader: KernelLoader
) -> None:
    device = CountingDevice()
    engine = steady_engine(folder, loader, 64, device, num_pages=400)
    assert len({sequence.num_tokens for sequence in engine.scheduler.decoding}) == 2, "half or more are in step"
    sent = sent_by_steps(engine, device, 32)
    assert max(sent) < 256
    assert sum(sent) == 8 * 64 * 2, "place and page of each row's next page, twice"


@pytest.mark.parametrize("length", [13, 14, 15, 16, 17])
def test_256_rows_in_step_send_less_than_256_bytes_in_any_and_find_their_pages(folder: Path, length: int) -> None:
    """On the reference ops: what the device computes of the rows from its page tables decides what they answer."""
    params = replace(GREEDY, max_tokens=40)
    switches: dict[str, Any] = {"max_decode_batch_size": 256, "max_prefill_batch_size": 256, "max_step_tokens": 8192}
    answered = []
    for captures in (True, False):
        device = CountingDevice()
        capture: Capture | None = (lambda run, warm_up: Graph(run, 0, 0)) if captures else None
        engine = make_engine(
            folder,
            ReferenceOps(),
            capture=capture,
            device=device,
            num_pages=1200,
            overlap=True,
            max_waiting=256,
            **switches,
        )
        sequences = [engine.add([number, *[7] * (length - 1)], params) for number in range(256)]
        while len(engine.scheduler.decoding) < 256:
            engine.step()
        engine.step()
        if captures:
            sent = sent_by_steps(engine, device, 34)
            assert max(sent) < 256
            assert sum(sent) >= 8 * 256 * 2, "two pages for each row"
            assert len({sequence.num_tokens for sequence in sequences}) == 1, "all enter their pages in the same step"
        run_to_end(engine)
        answered.append(answers(sequences))
    assert answered[0] == answered[1]


def test_a_joining_row_sends_its_own_words_only(folder: Path, loader: KernelLoader) -> None:
    device = CountingDevice()
    engine = steady_engine(folder, loader, 8, device)
    sequences = list(engine.scheduler.decoding)
    engine.abort(sequences[3])
    device.uploads.clear()
    engine.step()
    # The last row moved: its context, page table of two pages, and token; the row that it left has four words.
    assert 0 < sum(device.uploads) < 8 * 20
    engine.step()
    assert [sequence.num_tokens for sequence in sequences].count(sequences[0].num_tokens) == 7


@pytest.mark.parametrize("overlap", [False, True])
def test_a_penalised_row_is_replayed_and_only_its_new_tokens_are_sent_after_steps_launched_one_by_one(
    folder: Path, loader: KernelLoader, overlap: bool
) -> None:
    ops, answered = WatchingOps(loader, HostDevice()), []
    for chosen, capture in ((ops, loader.capture), (CudaOps(loader, HostDevice()), None)):
        engine = make_engine(folder, chosen, capture=capture, overlap=overlap)
        sequences = [engine.add([1, 2, 3], PENALISED)]
        while sequences[0].num_tokens < 9:
            engine.step()
        if capture is not None:
            assert engine.stats.num_graph_replays >= 4
            assert (sequences[0].token_ids[-1] == PENDING) == overlap, "tokens of replayed steps are read late"
        by_count = replace(PENALISED, repetition_penalty=1.0, frequency_penalty=0.5, max_tokens=20)
        sequences.append(engine.add([4, 5], by_count))
        run_to_end(engine)
        answered.append(answers(sequences))
    assert answered[0] == answered[1]
    # Before the first replay the prompt. After the second prompt's step, which ran the last token that was replayed,
    # that token and the second prompt; what this step sampled is counted by the next.
    (jobs, tokens), (more_jobs, more_tokens) = ops.counted
    assert (jobs, tokens) == ([[0, 1, 0, 3, 3]], [1, 2, 3])
    assert more_jobs == [[0, 0, 0, 0, 1], [1, 1, 1, 3, 3]]
    assert more_tokens[1:] == [4, 5]


def test_tokens_are_read_first_where_a_step_penalises_launch_by_launch(folder: Path, loader: KernelLoader) -> None:
    ops = WatchingOps(loader, HostDevice())
    engine = make_engine(folder, ops, capture=loader.capture, overlap=True)
    ends = engine.add([1, 2, 3], replace(PENALISED, max_tokens=12))
    (stop,) = [run_to_end(engine)[-1].token_id]  # which ends another answer one token earlier than its length
    assert ends.num_output_tokens == 12
    again = engine.add([1, 2, 3], replace(PENALISED, stop_token_ids=(stop,), max_tokens=60))
    goes_on = engine.add([9, 8], PENALISED)
    while again.num_output_tokens < ends.output_ids.index(stop) + 1:
        engine.step()
    assert again.token_ids[-1] == PENDING, "its last token is on its way"
    joins = engine.add([7, 7, 7], PENALISED)
    engine.step()
    assert again.finish_reason is FinishReason.STOP
    assert ops.sampled[-1] == 2, "who has ended is not run again"
    assert [sequence.row for sequence in (goes_on, joins)] == [0, None]
    run_to_end(engine)
    alone = make_engine(folder, CudaOps(loader, HostDevice()))
    expected = [alone.add(prompt, PENALISED) for prompt in ([9, 8], [7, 7, 7])]
    run_to_end(alone)
    assert [goes_on.output_ids, joins.output_ids] == [sequence.output_ids for sequence in expected]


def run_with(folder: Path, loader: KernelLoader, ops: CudaOps, params: SamplingParams = GREEDY) -> list[list[int]]:
    """Answers of a captured engine, in which every row enters a page."""
    engine = make_engine(folder, ops, capture=loader.capture, overlap=True, max_decode_batch_size=4)
    sequences = [engine.add([number + 1] * (10 + number), params) for number in range(3)]
    run_to_end(engine)
    return [sequence.output_ids for sequence in sequences]


class FreedBuffer(CudaOps):
    """Takes memory from outside the arena during a capture, and lets it go."""

    def advance_rows(self, batch: Batch, sampled: Any, table: Any, **options: Any) -> Any:
        return super().advance_rows(batch, sampled.copy(), table, **options)


class BakedLength(CudaOps):
    """Tells the attention kernel the lengths that the rows have at the capture."""

    def __init__(self, loader: KernelLoader, device: HostDevice) -> None:
        super().__init__(loader, device)
        self.kept: list[np.ndarray] = []

    def paged_attention(self, q: Any, keys: Any, values: Any, batch: Batch, *, window: int | None = None) -> Any:
        self.kept.append(batch.context_lens.copy())
        return super().paged_attention(q, keys, values, batch._replace(context_lens=self.kept[-1]), window=window)


class BakedScalar(CudaOps):
    """Reads a value while it captures, and makes an argument of it."""

    def paged_attention(self, q: Any, keys: Any, values: Any, batch: Batch, *, window: int | None = None) -> Any:
        longest = int(batch.context_lens.max()) + 1
        return super().paged_attention(q, keys, values, batch, window=longest)


class ComputedAtTheCapture(CudaOps):
    """Computes something on the spot instead of by a launch, and expects it to last in the arena."""

    def advance_rows(self, batch: Batch, sampled: Any, table: Any, **options: Any) -> Any:
        x = super().advance_rows(batch, sampled, table, **options)
        x_again = self.loader.empty(x.shape, np.float32)
        x_again[:] = table[sampled]
        return x_again


def test_a_buffer_that_was_let_go_after_the_capture_is_named(folder: Path, loader: KernelLoader) -> None:
    with pytest.raises(DeviceError, match="graph: argument 0 of advance_rows was let go after the capture"):
        run_with(folder, loader, FreedBuffer(loader, HostDevice()))


@pytest.mark.parametrize("faulty", [BakedLength, BakedScalar, ComputedAtTheCapture])
def test_what_is_baked_into_a_capture_gives_other_answers(
    folder: Path, loader: KernelLoader, faulty: type[CudaOps]
) -> None:
    right = run_with(folder, loader, CudaOps(loader, HostDevice()))
    assert run_with(folder, loader, faulty(loader, HostDevice())) != right


def test_in_check_mode_a_captured_engine_reports_nothing(folder: Path) -> None:
    checked = emulated_loader("check")
    params = replace(GREEDY, max_tokens=9)
    answers = run_with(folder, checked, CudaOps(checked, HostDevice()), params)
    plain = make_engine(folder, CudaOps(emulated_loader("fast"), HostDevice()))
    sequences = [plain.add([number + 1] * (10 + number), params) for number in range(3)]
    run_to_end(plain)
    assert answers == [sequence.output_ids for sequence in sequences]


def test_a_failed_row_fails_alone(folder: Path, loader: KernelLoader) -> None:
    engine = steady_engine(folder, loader, 3, HostDevice())
    broken, *fine = engine.scheduler.decoding
    for values in engine.runner.cache.values:
        values[broken.page_table[0]] = np.nan
    run_to_end(engine)
    assert broken.finish_reason is FinishReason.ERROR
    assert [sequence.num_output_tokens for sequence in fine] == [60, 60]


@pytest.mark.parametrize("has_run", [False, True])
def test_a_step_that_raises_leaves_an_engine_that_goes_on(folder: Path, loader: KernelLoader, has_run: bool) -> None:
    engine = steady_engine(folder, loader, 3, HostDevice())
    graphs = engine.runner.graphs.graphs
    kept = dict(graphs)
    prompt = [0] * engine.scheduler.decoding[0].num_computed  # as long as what the host thinks to be in that row

    def fail() -> None:
        if has_run:
            for graph in kept.values():
                graph.replay()
        raise RuntimeError("planted")

    graphs.update({key: replace(graph, replay=fail) for key, graph in kept.items()})
    with pytest.raises(RuntimeError, match="planted"):
        engine.step()
    engine.abort_all()
    graphs.update(kept)
    again = engine.add(prompt, GREEDY)
    run_to_end(engine)
    alone = make_engine(folder, CudaOps(loader, HostDevice()))
    expected = alone.add(prompt, GREEDY)
    run_to_end(alone)
    assert again.output_ids == expected.output_ids


def test_an_llm_with_graphs_says_what_it_captures_and_answers_the_same(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cupyllm.decode_graphs")
    settings: dict[str, Any] = {"device": "emulated", "kv_cache_gib": 0.01, "max_model_len": 64}
    params, texts = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True), []
    for graphs in (False, True):
        llm = LLM("demo", graphs=graphs, **settings)
        (output,) = llm.generate(["A page table"], params, show_progress=False)
        texts.append(output.outputs[0].text)
    assert texts[0] == texts[1]
    (record,) = caplog.records
    assert re.fullmatch(
        r"captured a decode step \(1 greedy rows, contexts up to 1024\): \d+ launches, [\d.]+ MiB, \d+ ms",
        record.getMessage(),
    )


def test_graphs_captured_at_the_start_are_all_that_requests_need(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="cupyllm.decode_graphs")
    sizes: dict[str, Any] = {"kv_cache_gib": 0.05, "max_decode_batch_size": 3, "max_model_len": 1100}
    config = EngineConfig(device="emulated", graphs=True, graph_capture="start", **sizes)
    loaded = load_engine(config, show_progress=False)
    engine, graphs = loaded.engine, loaded.engine.runner.graphs
    assert graphs is not None
    assert len(graphs.graphs) == len(graphs.keys) == 3 * 2 * 3, (
        "rows 1, 2 and 3; contexts up to 1024 and 4096; three ways"
    )
    (fact,) = [text for name, text in loaded.facts if name == "graphs"]
    assert re.fullmatch(r"18 kinds of decode step captured in [\d.]+ s, [\d.]+ MiB", fact)
    for params in (GREEDY, DRAWN, replace(GREEDY, logprobs=1)):
        for number in range(3):
            engine.add([number + 1] * 5, replace(params, max_tokens=5 + number))
        run_to_end(engine)
    assert engine.stats.num_graph_replays > 0
    assert caplog.records == [], "nothing was captured late"
    assert len(graphs.graphs) == 18


def test_every_step_finds_its_graph_among_the_keys(folder: Path, loader: KernelLoader) -> None:
    ops = CudaOps(loader, HostDevice())
    graphs = make_engine(
        folder, ops, capture=loader.capture, max_decode_batch_size=48, max_step_tokens=48
    ).runner.graphs
    needed = {
        GraphKey(bucket_of(rows, 48), context_bucket(longest), kind)
        for rows in range(1, 49)
        for longest in range(1, 513)
        for kind in ("greedy", "sampled", "unsampled")
    }
    assert len(graphs.keys) == len(needed)
    assert set(graphs.keys) == needed


def test_capture_at_the_start_without_graphs_is_refused() -> None:
    config = EngineConfig(device="reference", graph_capture="start")
    with pytest.raises(ConfigError, match='graph_capture "start" needs graphs, which are off'):
        choose_capture(config, make_backend("reference"))


def test_buckets() -> None:
    assert [bucket_of(rows, 48) for rows in (1, 2, 3, 4, 5, 16, 17, 33, 48)] == [1, 2, 4, 4, 8, 16, 32, 48, 48]
    assert [context_bucket(longest) for longest in (1, 1024, 1025, 4096, 40_000)] == [1024, 1024, 4096, 4096, 65_536]


@pytest.mark.parametrize(
    ("device", "graphs", "captures"),
    [("emulated", "auto", False), ("emulated", True, True), ("reference", "auto", False), ("reference", False, False)],
)
def test_graphs_of_the_config(device: str, graphs: bool | str, captures: bool) -> None:
    config = EngineConfig(device=device, graphs=graphs)
    assert (choose_capture(config, make_backend(device)) is not None) == captures


def test_graphs_where_nothing_is_launched_are_refused() -> None:
    config = EngineConfig(device="reference", graphs=True)
    with pytest.raises(
        ConfigError, match='graphs true is not supported on device "reference"; it needs device cuda or emul'
    ):
        choose_capture(config, make_backend("reference"))
