"""The sampling op on a device: which kernels choose the next tokens of a batch.

    argmax                                    when every row is greedy: one launch
    group_maxima, draw                        when some row is not
    adjust_logits                             before these, when some row has a penalty, an offset or a mask
    group_maxima, top_logprobs                after these, when some row wants log-probabilities

In a captured step group_maxima does what adjust_logits does for penalties, by counts that stay on the device.

The launches depend only on what the host knows when it builds the batch, never on values on the device. A captured
graph of them replays with other parameters when the arrays of its SamplingArrays are overwritten in place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cupyllm.cuda import adjust_logits, argmax, draw, group_maxima, top_logprobs
from cupyllm.cuda.loader import KernelLoader
from cupyllm.device import Array
from cupyllm.row_sampling import RowSampling
from cupyllm.sampling_batch import GREEDY_BELOW, SampleResult, SamplingBatch, TopLogprobs


@dataclass(frozen=True)
class RowParameters:
    """The arrays of a SamplingBatch on the device, under the same names."""

    seeds: Array  # (R,) uint64
    temperature: Array  # (R,) float32
    top_k: Array  # (R,) int32
    top_p: Array  # (R,) float32
    min_p: Array  # (R,) float32
    repetition_penalty: Array  # (R,) float32
    positions: Array  # (R,) int32
    penalty_starts: Array  # (R + 1,) int32
    penalty_ids: Array  # (M,) int32
    offset_starts: Array  # (R + 1,) int32
    offset_ids: Array  # (O,) int32
    offsets: Array  # (O,) float32
    mask_rows: Array  # (R,) int32
    masks: Array  # (G, words) uint32


# The arrays of a SamplingBatch that draw.launch takes, under their names there.
DRAWN_BY = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
# In the order in which they lie in the one array that is uploaded: seeds first, because 8-byte numbers must be aligned.
_FIELDS = tuple(RowParameters.__dataclass_fields__)


@dataclass(frozen=True)
class SamplingArrays:
    """A SamplingBatch on the device, and what the host knows of it: that alone decides the launches."""

    rows: RowParameters | None  # None when nothing reads them: all rows greedy, and no logits changed
    all_greedy: bool
    changes_logits: bool
    num_logprobs: int  # -1 when none wants logprobs
    vocab_limit: int


def upload_sampling(sampling: SamplingBatch, upload: Callable[[np.ndarray], Array]) -> SamplingArrays:
    """Put the parameters of a batch on the device, with at most one upload."""
    all_greedy = bool((sampling.temperature < GREEDY_BELOW).all())
    changes_logits = sampling.changes_logits
    rows = None if all_greedy and not changes_logits else _upload_rows(sampling, upload)
    return SamplingArrays(rows, all_greedy, changes_logits, sampling.num_logprobs, sampling.vocab_limit)


def sample(loader: KernelLoader, logits: Array, sampling: SamplingArrays) -> SampleResult:
    """Choose the next token of every row: ReferenceOps.sample, with the result's arrays on the device.

    logits is (R, V) float32. Raises DeviceError for what the kernels do not support.
    """
    N = min(logits.shape[1], sampling.vocab_limit)
    token_ids = choose(loader, logits, N, sampling)
    tops = token_logprobs(loader, logits, token_ids, sampling.num_logprobs, vocab_limit=N)
    return SampleResult(token_ids=token_ids, **vars(tops))


def token_logprobs(
    loader: KernelLoader, logits: Array, token_ids: Array, count: int, *, vocab_limit: int
) -> TopLogprobs:
    """ReferenceOps.token_logprobs, with the result's arrays on the device."""
    if count < 0:
        R = len(token_ids)
        empty = loader.empty((0,), np.float32), loader.empty((R, 0), np.int32), loader.empty((R, 0), np.float32)
        return TopLogprobs(*empty)
    N = min(logits.shape[1], vocab_limit)
    index = group_maxima.launch(loader, logits, N)
    return TopLogprobs(*top_logprobs.launch(loader, logits, N, index, token_ids, count))


def choose(loader: KernelLoader, logits: Array, N: int, sampling: SamplingArrays) -> Array:
    """The chosen token ids: (R,) int32."""
    rows = sampling.rows
    if rows is None:
        return argmax.launch(loader, logits, N)
    if sampling.changes_logits:
        changes = {name: getattr(rows, name) for name in adjust_logits.CHANGES}
        logits = adjust_logits.launch(loader, logits, N, **changes)
    if sampling.all_greedy:
        return argmax.launch(loader, logits, N)
    index = group_maxima.launch(loader, logits, N, rows.temperature)
    token_ids, _ = draw.launch(loader, logits, N, index, **{name: getattr(rows, name) for name in DRAWN_BY})
    return token_ids


def choose_of_rows(loader: KernelLoader, logits: Array, rows: RowSampling, *, all_plain: bool, out: Array) -> None:
    """ReferenceOps.sample_rows, over arrays on the device."""
    N = min(logits.shape[1], rows.vocab_limit)
    if all_plain:
        argmax.launch(loader, logits, N, out=out)
        return
    penalties = {name: getattr(rows, name) for name in group_maxima.PENALTIES}
    index = group_maxima.launch(loader, logits, N, rows.temperature, penalties)
    draw.launch(loader, logits, N, index, **{name: getattr(rows, name) for name in DRAWN_BY}, out=out)


def _upload_rows(sampling: SamplingBatch, upload: Callable[[np.ndarray], Array]) -> RowParameters:
    """All arrays as parts of one, because an upload costs more than its bytes."""
    arrays = [getattr(sampling, name) for name in _FIELDS]
    words = upload(np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays]))
    ends = np.cumsum([array.nbytes // 4 for array in arrays]).tolist()
    parts = (words[end - array.nbytes // 4 : end] for array, end in zip(arrays, ends, strict=True))
    views = (part.view(array.dtype).reshape(array.shape) for part, array in zip(parts, arrays, strict=True))
    return RowParameters(*views)
