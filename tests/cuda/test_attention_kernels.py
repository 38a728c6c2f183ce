"""The attention kernels against their reference op in the emulator's check mode; see test_linear_kernels.py.

Unused slots and pages hold NaN and unused entries of page tables -1 (attention_case.py): whoever reads them is seen.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from attention_case import AttentionCase, make_case
from kernel_case import DTYPES, EPSILON, CheckedLaunches, assert_close, total_bytes

from cupyllm.cuda import paged_attention_decode, paged_attention_prefill
from cupyllm.cuda.emulator import guarded_empty
from cupyllm.cuda.loader import KernelLoader, emulated_loader
from cupyllm.errors import DeviceError

# High and low part of a query or weight together have about twice an element's digits.
EPSILON_OF_TWO = {"fp16": EPSILON["fp32"], "bf16": 2.0**-16}
HEADS = [(2, 2), (4, 1), (7, 1), (8, 1), (16, 1), (14, 2)]  # H, KH: GQA 1, 4, 7, 8, 16 and 7 with two KV heads


def decode(case: AttentionCase, loader: KernelLoader) -> np.ndarray:
    tickets = paged_attention_decode.make_tickets(loader, case.call.S, case.call.KH)
    out = paged_attention_decode.launch(loader, case.call, tickets)
    assert not tickets.any()
    return out


def assert_decode_close(case: AttentionCase, actual: np.ndarray, dtype: str) -> None:
    wide = case.call.H > 8 * case.call.KH
    epsilon = EPSILON[dtype] if wide else EPSILON_OF_TWO[dtype]
    assert_close(actual, case.expected(), epsilon=epsilon, factor=2 if wide else 16)


@DTYPES
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_of_contexts_around_page_borders_is_the_reference_op(dtype: str, D: int, heads: tuple[int, int]) -> None:
    case = make_case([1, 15, 16, 17, 48, 100], H=heads[0], KH=heads[1], D=D, dtype=dtype)
    assert_decode_close(case, decode(case, CheckedLaunches().loader), dtype)


@DTYPES
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("H", [7, 16])
def test_decode_split_over_blocks_is_the_reference_op(dtype: str, D: int, H: int) -> None:
    launches = CheckedLaunches()
    case = make_case([600, 3, 257], H=H, KH=1, D=D, page_size=32, dtype=dtype)
    assert_decode_close(case, decode(case, launches.loader), dtype)
    assert launches.reports[0].argument("parts").read.bytes > 0  # the longest context took several splits


@DTYPES
@pytest.mark.parametrize("window", [1, 16, 33, 500])
def test_decode_sees_only_the_window(dtype: str, window: int) -> None:
    case = make_case([1, 16, 17, 64, 300], dtype=dtype).with_window(window)
    launches = CheckedLaunches()
    assert_decode_close(case, decode(case, launches.loader), dtype)
    seen = sum(min(length, window) for length in (1, 16, 17, 64, 300))
    assert total_bytes(launches.reports[0])["keys"] == seen * 2 * 64 * 2


@DTYPES
@pytest.mark.parametrize("H", [2, 16])
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4, 1e9])
def test_decode_takes_queries_far_beyond_fp16(dtype: str, H: int, scale: float) -> None:
    case = make_case([40, 17], H=H, KH=1, dtype=dtype, scale=scale)
    actual = decode(case, CheckedLaunches().loader)
    # From 1e4 on, one key has all the weight; the others' weights vanish in the reference op too.
    assert_decode_close(case, actual, dtype)


def test_decode_of_a_long_context_over_many_splits() -> None:
    case = make_case([33000, 2999], H=7, KH=1, D=128, page_size=32, dtype="bf16")
    assert_decode_close(case, decode(case, emulated_loader("fast")), "bf16")


def test_decode_gives_the_same_bits_every_time() -> None:
    case = make_case([700, 30], H=14, KH=2, D=128)
    first, second = (decode(case, emulated_loader("fast")) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("lengths", [[0], [5, 0, 20], [300, 0]])
def test_a_row_without_context_reads_nothing_and_is_zero(lengths: list[int]) -> None:
    case = make_case([max(length, 1) for length in lengths])
    case.call.context_lens[:] = lengths
    case.call.page_tables[np.array(lengths) == 0] = -1
    actual = decode(case, CheckedLaunches().loader)
    for row, length in enumerate(lengths):
        assert np.isfinite(actual[row]).all()
        assert actual[row].any() == (length > 0)


@pytest.mark.parametrize(("H", "D"), [(7, 64), (7, 128), (16, 128)])
def test_decode_reads_every_key_and_value_once_in_whole_sectors(H: int, D: int) -> None:
    launches = CheckedLaunches(global_races=False)
    lengths = [600, 41]
    decode(make_case(lengths, H=H, KH=1, D=D), launches.loader)
    (report,) = launches.reports
    for name in ("keys", "values"):
        least = sum(paged_attention_decode.least_bytes(1, H, 1, D, length)[name] for length in lengths)
        assert total_bytes(report)[name] == least
        assert report.argument(name).read.efficiency >= 0.95
    assert report.argument("out").written.efficiency >= 0.95


def test_decode_writes_into_the_rows_of_a_larger_result() -> None:
    case = make_case([20, 33])
    whole = guarded_empty((5, 4 * 64), np.float32)
    whole[:] = 7.0
    loader = CheckedLaunches().loader
    tickets = paged_attention_decode.make_tickets(loader, 2, 2)
    paged_attention_decode.launch(loader, case.call, tickets, out=whole[1:3])
    assert_close(whole[1:3], case.expected(), epsilon=EPSILON["fp32"], factor=16)
    assert (whole[[0, 3, 4]] == 7.0).all()


def test_short_batches_are_split_more_than_full_ones() -> None:
    splits = paged_attention_decode.splits
    assert splits(S=1, KH=4, D=128, max_runs=2048, num_multiprocessors=132) == (32, 8)
    assert splits(S=64, KH=4, D=128, max_runs=64, num_multiprocessors=132) == (1, 64)
    assert splits(S=64, KH=8, D=128, max_runs=2048, num_multiprocessors=132) == (16, 128)
    assert splits(S=1, KH=2, D=64, max_runs=1, num_multiprocessors=132) == (1, 16)


ZEROS_96 = np.zeros((2, 16, 2, 96), np.float16)
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"keys": np.zeros((2, 16, 2, 64), np.float32)}, "keys is float32; supported are float16, and uint16"),
    ({"values": np.zeros((2, 16, 2, 64), np.uint16)}, "values is uint16 .* supported is float16"),
    ({"keys": ZEROS_96, "values": ZEROS_96}, "the head size is 96; supported are 64 and 128"),
    ({"keys": np.zeros((2, 8, 2, 64), np.float16), "values": np.zeros((2, 8, 2, 64), np.float16)}, "page_size is 8; "),
    ({"q": np.zeros((1, 34, 64), np.float32)}, "34 query heads share 2 KV heads; supported are up to 16"),
    ({"q": np.zeros((1, 3, 64), np.float32)}, "3 query heads share 2 KV heads"),
    ({"q": np.zeros((1, 4, 64), np.float16)}, "q is float16 .* supported is float32"),
    ({"context_lens": np.zeros(1, np.int64)}, "context_lens is int64"),
    ({"page_tables": np.zeros((2, 3), np.int32)}, r"page_tables is int32 \(2, 3\)"),
    ({"window": 0}, "window is 0; supported are 1 and more, and None"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_decode_refuses_what_it_does_not_support_by_name(changes: dict[str, Any], message: str) -> None:
    case = make_case([20])
    with pytest.raises(DeviceError, match=message):
        decode(replace(case, call=replace(case.call, **changes)), CheckedLaunches().loader)


def test_decode_refuses_several_queries_a_sequence_and_too_few_tickets() -> None:
    loader = CheckedLaunches().loader
    case = make_case([20], [3])
    with pytest.raises(DeviceError, match="q has 3 rows for 1 sequences; supported is one for each"):
        decode(case, loader)
    tickets = paged_attention_decode.make_tickets(loader, 1, 2)
    with pytest.raises(DeviceError, match="tickets has 1 rows for 2 sequences"):
        paged_attention_decode.launch(loader, make_case([20, 3]).call, tickets)


def prefill(case: AttentionCase, loader: KernelLoader) -> np.ndarray:
    starts, longest = case.batch.query_starts, case.batch.max_query_len
    return paged_attention_prefill.launch(loader, case.call, starts, max_query_len=longest)


def assert_prefill_close(case: AttentionCase, actual: np.ndarray, dtype: str) -> None:
    assert_close(actual, case.expected(), epsilon=EPSILON[dtype], factor=4)


@DTYPES
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize("heads", HEADS)
def test_prefill_of_ragged_chunks_after_cached_tokens_is_the_reference_op(
    dtype: str, D: int, heads: tuple[int, int]
) -> None:
    contexts, queries = [1, 15, 16, 33, 70, 64], [1, 15, 16, 20, 3, 1]
    case = make_case(contexts, queries, H=heads[0], KH=heads[1], D=D, dtype=dtype)
    assert_prefill_close(case, prefill(case, CheckedLaunches().loader), dtype)


@DTYPES
@pytest.mark.parametrize("D", [64, 128])
@pytest.mark.parametrize(("contexts", "queries"), [([150], [150]), ([200, 67], [65, 64])])
def test_prefill_over_several_tiles_of_rows_and_keys_is_the_reference_op(
    dtype: str, D: int, contexts: list[int], queries: list[int]
) -> None:
    case = make_case(contexts, queries, H=3, KH=1, D=D, page_size=32, dtype=dtype)
    assert_prefill_close(case, prefill(case, CheckedLaunches().loader), dtype)


@DTYPES
@pytest.mark.parametrize("window", [1, 16, 33, 500])
def test_prefill_sees_only_the_window(dtype: str, window: int) -> None:
    case = make_case([90, 17, 140], [90, 2, 20], dtype=dtype).with_window(window)
    assert_prefill_close(case, prefill(case, CheckedLaunches().loader), dtype)


@DTYPES
@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4, 1e9])
def test_prefill_takes_queries_far_beyond_fp16(dtype: str, scale: float) -> None:
    case = make_case([40, 17], [20, 17], dtype=dtype, scale=scale)
    case.call.q[::2] *= 1e-3  # rows of other sizes in the same tile
    assert_prefill_close(case, prefill(case, CheckedLaunches().loader), dtype)


def test_prefill_of_a_long_chunk_after_a_long_prefix() -> None:
    case = make_case([2500, 700], [130, 90], H=7, KH=1, D=128, page_size=32, dtype="bf16")
    assert_prefill_close(case, prefill(case, emulated_loader("fast")), "bf16")


def test_prefill_gives_the_same_bits_every_time() -> None:
    case = make_case([120, 30], [70, 30], H=7, KH=1)
    first, second = (prefill(case, emulated_loader("fast")) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_prefill_writes_only_the_rows_of_its_chunks() -> None:
    case = make_case([20, 33], [5, 7])
    loader = CheckedLaunches().loader
    whole = guarded_empty((12, 4 * 64), np.float32)
    whole[:] = 7.0
    second = replace(case.call, context_lens=case.call.context_lens[1:], page_tables=case.call.page_tables[1:])
    paged_attention_prefill.launch(loader, second, case.batch.query_starts[1:], max_query_len=7, out=whole)
    assert_close(whole[5:], case.expected()[5:], epsilon=EPSILON["fp16"], factor=4)
    assert (whole[:5] == 7.0).all()


@pytest.mark.parametrize("D", [64, 128])
def test_prefill_reads_what_a_tile_may_see_once_in_whole_sectors_and_without_bank_conflicts(D: int) -> None:
    launches = CheckedLaunches(global_races=False)
    contexts, queries = [100, 37], [9, 5]  # up to 9 * 7 rows: one tile
    prefill(make_case(contexts, queries, H=7, KH=1, D=D), launches.loader)
    (report,) = launches.reports
    assert total_bytes(report)["keys"] == total_bytes(report)["values"] == 2 * D * sum(contexts)
    assert total_bytes(report)["q"] == total_bytes(report)["out"] == 4 * 7 * D * sum(queries)
    for name in ("q", "keys", "values", "out"):
        argument = report.argument(name)
        assert (argument.read + argument.written).efficiency >= 0.95, name
    assert report.bank_conflicts == 0


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_prefill_refuses_what_it_does_not_support_by_name(changes: dict[str, Any], message: str) -> None:
    case = make_case([20])
    with pytest.raises(DeviceError, match=message):
        prefill(replace(case, call=replace(case.call, **changes)), CheckedLaunches().loader)


@pytest.mark.parametrize("arch", [70, 75])
@DTYPES
def test_older_generations_give_the_reference_op(arch: int, dtype: str) -> None:
    loader = CheckedLaunches(arch=arch).loader
    case = make_case([33], H=7, KH=1, dtype=dtype)
    assert_decode_close(case, decode(case, loader), dtype)
    case = make_case([33], [9], H=7, KH=1, dtype=dtype)
    assert_prefill_close(case, prefill(case, loader), dtype)
