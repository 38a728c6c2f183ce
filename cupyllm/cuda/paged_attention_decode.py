"""Launches paged_attention_decode.cu: attention of one query a sequence."""

from __future__ import annotations

import numpy as np

from cupyllm.cuda.arguments import check_array
from cupyllm.cuda.attention_arguments import HEAD_SIZES, AttentionCall
from cupyllm.cuda.loader import Geometry, KernelLoader
from cupyllm.device import Array
from cupyllm.errors import DeviceError

CONSTANT_SETS = tuple(
    {"ELEMENT_BF16": bf16, "HEAD_SIZE": head_size, "WIDE_GROUP": wide}
    for bf16 in (0, 1)
    for head_size in HEAD_SIZES
    for wide in (0, 1)
)
MAX_REGISTERS = 208
MARKERS = ("LDG.E.128", "HMMA")
RUN = 16  # keys that a warp takes at once
PART_EXTRA = 4  # floats of a split's part of a head beside its D columns
# Blocks for each multiprocessor that keep enough loads under way.
BLOCKS_WANTED = 2
# On a GPU that is full anyway, no split is longer than this: one long context must not outlast the whole batch.
LONGEST_SPLIT_RUNS = 128


def warps(D: int) -> int:
    """Warps of a block: as many for D = 128 as its registers allow, twice that for D = 64."""
    return 512 // D


def splits(S: int, KH: int, D: int, max_runs: int, num_multiprocessors: int) -> tuple[int, int]:
    """How many blocks share a context at most, and the fewest runs that are worth a block of their own.

    The kernel divides each context by these two, so that a captured launch serves contexts of any length.
    """
    wanted = -(-BLOCKS_WANTED * num_multiprocessors // (S * KH))
    least_runs = max(2 * warps(D), LONGEST_SPLIT_RUNS // wanted)
    most = min(-(-max_runs // least_runs), 4096 // D)
    return max(1, most), least_runs


def geometry(S: int, KH: int, constants: dict[str, int], num_splits: int) -> Geometry:
    """A block for every split of every sequence's KV heads."""
    return Geometry((num_splits, KH, S), (32 * warps(constants["HEAD_SIZE"]),), constants=constants)


def least_bytes(S: int, H: int, KH: int, D: int, context_len: int, page_size: int = 16) -> dict[str, int]:
    """The fewest bytes each array can cost when every context has this length."""
    return {
        "q": 4 * S * H * D,
        "keys": 2 * S * KH * D * context_len,
        "values": 2 * S * KH * D * context_len,
        "context_lens": 4 * S,
        "page_tables": 4 * S * -(-context_len // page_size),
        "out": 4 * S * H * D,
    }


def example(constants: dict[str, int]) -> Geometry:
    """The launch of a Qwen2.5-7B shape, for the table of occupancy."""
    return geometry(S=64, KH=4, constants=constants, num_splits=1)


def make_tickets(loader: KernelLoader, rows: int, KH: int) -> Array:
    """The counters that `launch` takes, for up to `rows` sequences: zero, as every launch leaves them."""
    return loader.tickets(rows * KH).reshape(rows, KH)


def launch(loader: KernelLoader, call: AttentionCall, tickets: Array, *, out: Array | None = None) -> Array:
    """Attention of one query for each sequence: (S, H, D) -> (S, H * D), into `out` if it is given.

    Raises DeviceError for what is not supported.
    """
    name = "paged_attention_decode"
    constants = call.check(name) | {"WIDE_GROUP": int(call.H > 8 * call.KH)}
    if call.T != call.S:
        raise DeviceError(f"{name}: q has {call.T} rows for {call.S} sequences; supported is one for each")
    check_array(name, "tickets", tickets, np.uint32, (None, call.KH))
    if len(tickets) < call.S:
        raise DeviceError(f"{name}: tickets has {len(tickets)} rows for {call.S} sequences")
    out = call.output(name, loader, out)
    if call.S == 0:
        return out
    longest = min(call.max_context_len, (call.window or call.max_context_len) + RUN - 1)
    num_splits, least_runs = splits(call.S, call.KH, call.D, -(-longest // RUN), loader.facts.num_multiprocessors)
    parts = loader.nothing
    if num_splits > 1:
        parts = loader.empty((call.S, call.H, num_splits, call.D + PART_EXTRA), np.float32)
    arrays = (call.q, call.keys, call.values, call.context_lens, call.page_tables, parts, tickets, out)
    args = (*arrays, *call.sizes(), np.int32(least_runs))
    loader.launch(name, geometry(call.S, call.KH, constants, num_splits), args)
    return out
