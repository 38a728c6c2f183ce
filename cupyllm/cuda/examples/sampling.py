"""Examples of the sampling kernels.

Each kernel is a part of one op. What it finds is compared with that part of the reference or, where the reference has
no such part, by the tokens that the whole op chooses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from cupyllm.cuda import adjust_logits, argmax, draw, group_maxima, top_logprobs
from cupyllm.cuda.examples.case import EPSILON, ExampleRun, Output, Place, random_floats
from cupyllm.cuda.loader import KernelLoader
from cupyllm.cuda.sample import DRAWN_BY, sample, upload_sampling
from cupyllm.ops.reference import ReferenceOps
from cupyllm.ops.sample_reference import adjusted, candidates
from cupyllm.row_sampling import RowSampling, count_width, sampling_batch
from cupyllm.sampling_batch import SamplingBatch


def argmax_example(loader: KernelLoader, place: Place, *, R: int = 4, N: int = 1501) -> ExampleRun:
    """Greedy rows; the first has three equal largest values, and the last holds a NaN."""
    logits = _logits(R, N)
    logits[0, [4, 5, N - 2]] = 9.0
    logits[-1, N // 2] = np.nan
    return _sample(loader, place, logits, _batch(R, N, temperature=0.0), argmax.least_bytes(R, N))


def adjust_logits_example(loader: KernelLoader, place: Place, *, R: int = 4, N: int = 1501) -> ExampleRun:
    """Rows with penalties and offsets for the same tokens, each row more than the one before; every second one has a
    mask, and the first of these NaN and infinity where nothing is allowed.
    """
    rng, logits = np.random.default_rng(1), _logits(R, N)
    ids = [np.arange(r, N, N // (5 * (r + 1))) for r in range(R)]
    masks = rng.integers(0, 2**32, (R // 2, adjust_logits.mask_words(N)), dtype=np.uint32)
    poisoned = np.array([N // 2, N // 3])
    logits[1, poisoned] = np.nan, np.inf
    masks[0, poisoned // 32] &= ~(np.uint32(1) << (poisoned % 32).astype(np.uint32))
    penalised = _batch(R, N, penalised=ids)
    offsets = random_floats(rng, len(penalised.penalty_ids))
    offsets[::4] = -np.inf
    batch = replace(
        penalised,
        offset_starts=penalised.penalty_starts,
        offset_ids=np.concatenate([one[::-1] for one in ids]).astype(np.int32),
        offsets=offsets,
        mask_rows=np.where(np.arange(R) % 2, np.arange(R) // 2, -1).astype(np.int32),
        masks=masks,
    )
    changes = {name: place.upload(getattr(batch, name)) for name in adjust_logits.CHANGES}
    actual = place.download(adjust_logits.launch(loader, place.upload(logits), N, **changes))[:, :N]
    expected = np.stack([adjusted(row[:N], batch, r) for r, row in enumerate(logits)])
    expected[1, poisoned] = np.nan, np.inf
    least = adjust_logits.least_bytes(R, N, len(batch.penalty_ids), len(offsets), len(masks))
    return ExampleRun("sample", {"R": R, "N": N}, least, (Output("adjusted", actual, expected, 0.0),))


def group_maxima_example(
    loader: KernelLoader, place: Place, *, R: int = 4, N: int = 1501, penalties: bool = False
) -> ExampleRun:
    """The largest logit of every 128 neighbours, and the sum of exp((logit - largest) / temperature).

    With penalties the first row has none, the second one for repetition, the third by count, and the others both.
    """
    logits, batch = _logits(R, N), _batch(R, N)
    there, penalised = place.upload(logits.copy()), None
    if penalties:
        rows = _rows_with_penalties(batch)
        penalised = {name: place.upload(getattr(rows, name)) for name in group_maxima.PENALTIES}
        for r, row in enumerate(logits):
            row[:N] = adjusted(row[:N], sampling_batch(rows), r)
    found = group_maxima.launch(loader, there, N, place.upload(batch.temperature), penalised)
    groups = [logits[:, first : min(first + 128, N)] for first in range(0, N, 128)]
    maxima = np.stack([group.max(axis=1) for group in groups], axis=1)  # (R, G)
    scaled = [(group - group.max(axis=1)[:, None]) / batch.temperature[:, None] for group in groups]
    sums = np.stack([np.exp(group).sum(axis=1) for group in scaled], axis=1)
    outputs = (
        Output("logits", place.download(there), logits, 0.0),
        Output("maxima", place.download(found[0]), maxima, 0.0),
        Output("sums", place.download(found[1]), sums, 16 * EPSILON["float32"]),
    )
    least = group_maxima.least_bytes(R, N, penalised=R - 1 if penalties else 0)
    return ExampleRun("sample_rows" if penalties else "sample", {"R": R, "N": N}, least, outputs)


def draw_example(loader: KernelLoader, place: Place, *, R: int = 24, N: int = 1501) -> ExampleRun:
    """Rows with top-k, top-p and min-p, alone and together: which tokens each keeps, and the one that it draws. Every
    fifth is greedy.
    """
    top_k, top_p, min_p = np.arange(R) % 4 * 3, 1.0 - np.arange(R) % 3 * 0.3, np.arange(R) % 2 * 0.2
    temperature = np.where(np.arange(R) % 5, 1.5, 0.0)
    logits, batch = _logits(R, N), _batch(R, N, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    there, arrays = place.upload(logits), {name: place.upload(getattr(batch, name)) for name in DRAWN_BY}
    index = group_maxima.launch(loader, there, N, arrays["temperature"])
    token_ids, cutoffs = (place.download(found) for found in draw.launch(loader, there, N, index, **arrays))
    drawn = np.flatnonzero(temperature)
    scaled = (logits[drawn, :N] - logits[drawn, :N].max(axis=1)[:, None]) / np.float32(1.5)
    ranks = (-scaled + np.float32(0)).view(np.uint32).astype(np.uint64) << np.uint64(19) | np.arange(N, dtype=np.uint64)
    wanted = np.zeros((len(drawn), N), np.int32)
    for r, row, keeps in zip(drawn, scaled, wanted, strict=True):
        keeps[candidates(row, int(top_k[r]), float(batch.top_p[r]), float(batch.min_p[r]))] = 1
    outputs = (
        Output("kept", (ranks <= cutoffs[drawn, None]).astype(np.int32), wanted, 0.0),
        Output("token_ids", token_ids, ReferenceOps().sample(logits, batch).token_ids, 0.0),
    )
    return ExampleRun("sample", {"R": R, "N": N}, draw.least_bytes(R, N), outputs)


def top_logprobs_example(loader: KernelLoader, place: Place, *, R: int = 4, N: int = 1501) -> ExampleRun:
    """Greedy rows that want their five most likely tokens, three of which are equally likely in the first."""
    logits = _logits(R, N)
    logits[0, [4, 5, N - 2]] = 9.0
    batch = _batch(R, N, temperature=0.0, num_logprobs=5)
    return _sample(loader, place, logits, batch, top_logprobs.least_bytes(R, N, 5))


def _logits(R: int, N: int) -> np.ndarray:
    """Logits with 7 columns more than there are tokens, which must never be chosen."""
    logits = random_floats(np.random.default_rng(0), R, N + 7, scale=2.0)
    logits[:, N:] = 50.0
    return logits


def _batch(
    R: int,
    N: int,
    *,
    temperature: float | np.ndarray = 0.8,
    top_k: int | np.ndarray = 0,
    top_p: float | np.ndarray = 1.0,
    min_p: float | np.ndarray = 0.0,
    penalised: list[np.ndarray] | None = None,
    num_logprobs: int = -1,
) -> SamplingBatch:
    """Sampling parameters of R rows; what is one number is the same for all."""
    ids = penalised or [np.zeros(0, np.int32)] * R
    return SamplingBatch(
        temperature=np.broadcast_to(np.float32(temperature), R).copy(),
        top_k=np.broadcast_to(np.int32(top_k), R).copy(),
        top_p=np.broadcast_to(np.float32(top_p), R).copy(),
        min_p=np.broadcast_to(np.float32(min_p), R).copy(),
        repetition_penalty=np.full(R, 3.0 if penalised else 1.0, np.float32),
        penalty_starts=np.cumsum([0, *map(len, ids)]).astype(np.int32),
        penalty_ids=np.concatenate(ids).astype(np.int32),
        offset_starts=np.zeros(R + 1, np.int32),
        offset_ids=np.zeros(0, np.int32),
        offsets=np.zeros(0, np.float32),
        mask_rows=np.full(R, -1, np.int32),
        masks=np.zeros((0, -(-N // 32)), np.uint32),
        seeds=np.arange(R, dtype=np.uint64) << np.uint64(33),
        positions=np.arange(R, dtype=np.int32) + 5,
        num_logprobs=num_logprobs,
        vocab_limit=N,
    )


def _rows_with_penalties(batch: SamplingBatch) -> RowSampling:
    """Parameters of rows that stay on the device: none in the first, then repetition, then by count, then both."""
    rng, R, N = np.random.default_rng(2), len(batch.temperature), batch.vocab_limit
    counts = np.where(rng.random((R, count_width(N))) < 0.3, rng.integers(0, 9, (R, count_width(N))), 0)
    counts[:, N:] = 0
    r = np.arange(R)
    return RowSampling(
        **{name: getattr(batch, name) for name in DRAWN_BY},
        repetition_penalty=np.where((r == 1) | (r > 2), 1.3, 1.0).astype(np.float32),
        presence_penalty=np.where(r > 1, -0.3, 0.0),
        frequency_penalty=np.where(r > 1, 0.7, 0.0),
        counts=counts.astype(np.uint32),
        vocab_limit=N,
    )


def _sample(
    loader: KernelLoader, place: Place, logits: np.ndarray, batch: SamplingBatch, least: Mapping[str, int]
) -> ExampleRun:
    """Sample by the kernels and by the reference op."""
    expected = ReferenceOps().sample(logits, batch)
    actual = sample(loader, place.upload(logits), upload_sampling(batch, place.upload))
    names = ["token_ids", "logprobs", "top_ids", "top_logprobs"] if batch.num_logprobs >= 0 else ["token_ids"]
    outputs = tuple(
        Output(
            name,
            place.download(getattr(actual, name)),
            getattr(expected, name),
            0.0 if name.endswith("ids") else 16 * EPSILON["float32"],
        )
        for name in names
    )
    return ExampleRun("sample", {"R": len(logits), "N": batch.vocab_limit}, least, outputs)
