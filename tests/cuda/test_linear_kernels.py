"""Kernels that read weights, and the row-wise ones, against their reference ops in the emulator's check mode.

Check mode turns any read or write outside an array, race, missing barrier or uninitialised shared value into an error.
Outputs start as NaN, so that a value never written fails the comparison.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_case import DTYPES, EPSILON, CheckedLaunches, assert_close, elements, random_floats, total_bytes, widen

from cupyllm.cuda import embedding, gemv, rms_norm, round_rows, silu_mul, skinny_gemm, tile_gemm
from cupyllm.cuda.linear_arguments import LinearCall
from cupyllm.errors import DeviceError
from cupyllm.ops.reference import Norm, ReferenceOps

REFERENCE = ReferenceOps()
# What surrounds a linear layer of the model: see model.py.
SURROUNDINGS = ("plain", "norm bias", "norm", "residual", "norm gate_up", "norm bias residual")


def make_call(seed: int, T: int, N: int, K: int, dtype: str, surroundings: str, *, scale: float = 1.0) -> LinearCall:
    """A linear layer with random arrays; activations have the size `scale`."""
    rng = np.random.default_rng(seed)
    rows = 2 * N if "gate_up" in surroundings else N
    return LinearCall(
        x=random_floats(rng, T, K, scale=scale),
        weight=elements(rng.standard_normal((rows, K)) / np.sqrt(K), dtype),
        bias=elements(rng.standard_normal(N), dtype) if "bias" in surroundings else None,
        norm=Norm(random_floats(rng, K), 1e-6) if "norm" in surroundings else None,
        residual=random_floats(rng, T, N) if "residual" in surroundings else None,
        gate_up="gate_up" in surroundings,
    )


def expected(call: LinearCall) -> np.ndarray:
    """What the reference op makes of the same call, in float32 from the same rounded weights."""
    weight = widen(call.weight)
    if call.gate_up:
        return REFERENCE.gate_up_silu_mul(call.x, weight, norm=call.norm)
    bias = None if call.bias is None else widen(call.bias)
    return REFERENCE.linear(call.x, weight, bias, norm=call.norm, residual=call.residual)


def test_silu_mul_of_ordinary_and_extreme_gates() -> None:
    gate_up = random_floats(np.random.default_rng(0), 3, 2 * 301, scale=4.0)
    gate_up[1, :6] = [1e4, -1e4, 88.0, -88.0, 0.0, 3e30]
    actual = silu_mul.launch(CheckedLaunches().loader, gate_up)
    np.testing.assert_allclose(actual, REFERENCE.silu_mul(gate_up), rtol=8 * EPSILON["fp32"], atol=1e-30)


@pytest.mark.parametrize("shape", [(1, 4), (3, 1028), (2, 5, 64)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_rms_norm_over_the_last_axis_of_rows_of_any_size(shape: tuple[int, ...], scale: float) -> None:
    rng = np.random.default_rng(1)
    x, norm = random_floats(rng, *shape, scale=scale), Norm(random_floats(rng, shape[-1]), 1e-6)
    actual = rms_norm.launch(CheckedLaunches().loader, x, norm)
    np.testing.assert_allclose(actual, REFERENCE.rms_norm(x, norm), rtol=16 * EPSILON["fp32"])


def test_embedding_rows_are_exact_in_every_type_and_ids_outside_give_nan() -> None:
    rng = np.random.default_rng(2)
    values = random_floats(rng, 7, 1032)
    row_ids = np.array([6, 0, -1, 3, 7, 3], np.int32)
    for table in (values, elements(values, "fp16"), elements(values, "bf16")):
        actual = embedding.launch(CheckedLaunches().loader, row_ids, table)
        np.testing.assert_array_equal(actual[[0, 1, 3, 5]], widen(table)[[6, 0, 3, 3]])
        assert np.isnan(actual[[2, 4]]).all()


@DTYPES
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
# Multiprocessors: with none the layout with the fewest blocks is taken, with many the one with the most.
@pytest.mark.parametrize(("N", "K", "multiprocessors"), [(70, 264, 0), (45, 1032, 1), (1, 8, 108), (5, 2056, 108)])
def test_gemv_is_its_reference_op(dtype: str, surroundings: str, N: int, K: int, multiprocessors: int) -> None:
    launches = CheckedLaunches()
    launches.loader.facts = replace(launches.loader.facts, num_multiprocessors=multiprocessors)
    call = make_call(3, 1, N, K, dtype, surroundings)
    assert_close(gemv.launch(launches.loader, call), expected(call), epsilon=EPSILON["fp32"], factor=32)


def test_the_gemv_cases_use_every_layout() -> None:
    constants = {"GATE_UP": 0}
    shapes = [(70, 264, 0), (45, 1032, 1), (1, 8, 108), (5, 1032, 108), (5, 2056, 108)]
    used = {tuple(gemv.geometry(N, K, constants, mp).constants[c] for c in ("ROWS", "K_WARPS")) for N, K, mp in shapes}
    assert used == set(gemv.LAYOUTS)


@DTYPES
@pytest.mark.parametrize("scale", [1e-6, 1e4, 1e6])
def test_gemv_takes_activations_far_beyond_fp16(dtype: str, scale: float) -> None:
    for surroundings in ("plain", "norm gate_up"):
        call = make_call(4, 1, 33, 264, dtype, surroundings, scale=scale)
        actual = gemv.launch(CheckedLaunches().loader, call)
        assert_close(actual, expected(call), epsilon=EPSILON["fp32"], factor=32)


@pytest.mark.parametrize("surroundings", ["norm bias", "residual", "norm gate_up"])
def test_gemv_reads_every_weight_once_and_whole_sectors(surroundings: str) -> None:
    launches = CheckedLaunches(global_races=False)
    call = make_call(5, 1, 128, 896, "bf16", surroundings)
    gemv.launch(launches.loader, call)
    (report,) = launches.reports
    least = gemv.least_bytes(128, 896, **dict.fromkeys(surroundings.split(), 1))
    assert total_bytes(report)["weight"] == least["weight"]
    assert report.argument("weight").read.efficiency == 1.0
    assert {name for name, count in total_bytes(report).items() if count} == {
        name for name, count in least.items() if count
    }


def test_a_width_whose_rows_are_not_16_byte_aligned_is_refused() -> None:
    call = make_call(6, 1, 4, 20, "fp16", "plain")
    with pytest.raises(DeviceError, match="gemv: K is 20; supported are multiples of 8"):
        gemv.launch(CheckedLaunches().loader, call)


def test_more_rows_than_a_kernel_has_are_refused() -> None:
    call = make_call(6, 2, 4, 16, "fp16", "plain")
    with pytest.raises(DeviceError, match="gemv: x has 2 rows; supported are up to 1"):
        gemv.launch(CheckedLaunches().loader, call)


@DTYPES
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
# Multiprocessors decide into how many splits K goes: none, as many as there are K tiles, and between.
@pytest.mark.parametrize(
    ("T", "N", "K", "multiprocessors"),
    [
        (1, 3, 8, 0),
        (2, 70, 776, 0),
        (8, 33, 520, 108),
        (9, 66, 264, 108),
        (31, 45, 200, 3),
        (33, 257, 40, 0),
        (64, 21, 296, 2),
    ],
)
def test_skinny_gemm_is_its_reference_op(
    dtype: str, surroundings: str, T: int, N: int, K: int, multiprocessors: int
) -> None:
    launches = CheckedLaunches()
    launches.loader.facts = replace(launches.loader.facts, num_multiprocessors=multiprocessors)
    call = make_call(7, T, N, K, dtype, surroundings)
    assert_close(skinny_gemm.launch(launches.loader, call), expected(call), epsilon=EPSILON[dtype], factor=2)


@pytest.mark.parametrize(("arch", "dtype"), [(70, "fp16"), (75, "fp16"), (75, "bf16")])
def test_skinny_gemm_in_the_forms_of_older_gpus(arch: int, dtype: str) -> None:
    call = make_call(8, 5, 40, 264, dtype, "norm bias residual")
    actual = skinny_gemm.launch(CheckedLaunches(arch=arch).loader, call)
    assert_close(actual, expected(call), epsilon=EPSILON[dtype], factor=2)


@DTYPES
@pytest.mark.parametrize("surroundings", ["plain", "norm gate_up"])
def test_skinny_gemm_takes_rows_of_any_magnitude_side_by_side(dtype: str, surroundings: str) -> None:
    call = make_call(9, 6, 33, 776, dtype, surroundings)
    call.x[:] *= np.array([1e-6, 1e4, 1e6, 1.0, 0.0, 1.0], np.float32)[:, None]
    call.x[3, 700] = 3e5  # comes after smaller ones have been added up
    call.x[5, :512] = 0.0
    actual = skinny_gemm.launch(CheckedLaunches().loader, call)
    for row in (0, 1, 2, 3, 5):
        assert_close(actual[row], expected(call)[row], epsilon=EPSILON[dtype], factor=2)
    np.testing.assert_array_equal(actual[4], 0.0)


def test_nan_and_infinity_stay_in_their_row() -> None:
    call = make_call(10, 4, 17, 264, "fp16", "plain")
    call.x[1, 5], call.x[2, 200] = np.nan, np.inf
    actual = skinny_gemm.launch(CheckedLaunches().loader, call)
    assert not np.isfinite(actual[1:3]).any()
    assert_close(actual[::3], expected(call)[::3], epsilon=EPSILON["fp16"], factor=2)


@pytest.mark.parametrize("T", [2, 64])
def test_skinny_gemm_reads_every_weight_once_and_whole_sectors_and_repeats_itself(T: int) -> None:
    launches = CheckedLaunches(global_races=False)
    call = make_call(11, T, 256, 512, "bf16", "norm gate_up")
    first = skinny_gemm.launch(launches.loader, call)
    again = skinny_gemm.launch(launches.loader, call)
    np.testing.assert_array_equal(again, first)
    least = skinny_gemm.least_bytes(T, 256, 512, gate_up=1, norm=1)
    for report in launches.reports:
        assert total_bytes(report)["weight"] == least["weight"]
        assert report.argument("weight").read.efficiency == 1.0
        assert report.bank_conflicts == 0
    assert not launches.loader.tickets(1000).any()


@DTYPES
@pytest.mark.parametrize("with_norm", [False, True])
def test_rounded_rows_times_their_inverse_scales_are_the_rows_to_within_one_rounding(
    dtype: str, with_norm: bool
) -> None:
    call = make_call(12, 5, 1, 1032, dtype, "norm" if with_norm else "plain")
    call.x[:] *= np.array([1e-8, 1.0, 1e4, 1e9, 0.0], np.float32)[:, None]
    launches = CheckedLaunches()
    rounded, inverse_scales = round_rows.launch(launches.loader, call.x, call.norm, bf16=int(dtype == "bf16"))
    rows = REFERENCE.rms_norm(call.x, call.norm) if call.norm else call.x
    actual = widen(rounded) * inverse_scales[:, None]
    size = np.abs(rows).max(axis=1, keepdims=True)
    np.testing.assert_allclose(
        actual, rows, rtol=EPSILON[dtype], atol=float(size.max() * 2.0**-29) if size.max() else 0
    )
    assert np.isfinite(widen(rounded)).all()


@DTYPES
@pytest.mark.parametrize("surroundings", SURROUNDINGS)
# Multiprocessors: with none the tile is the larger one, with many the smaller.
@pytest.mark.parametrize(
    ("T", "N", "K", "multiprocessors"), [(1, 3, 8, 108), (65, 70, 104, 108), (130, 45, 40, 0), (67, 131, 72, 0)]
)
def test_tile_gemm_is_its_reference_op(
    dtype: str, surroundings: str, T: int, N: int, K: int, multiprocessors: int
) -> None:
    launches = CheckedLaunches()
    launches.loader.facts = replace(launches.loader.facts, num_multiprocessors=multiprocessors)
    call = make_call(13, T, N, K, dtype, surroundings)
    assert_close(tile_gemm.launch(launches.loader, call), expected(call), epsilon=EPSILON[dtype], factor=2)


@pytest.mark.parametrize(("arch", "dtype"), [(70, "fp16"), (75, "fp16"), (75, "bf16")])
def test_tile_gemm_in_the_forms_of_older_gpus(arch: int, dtype: str) -> None:
    call = make_call(14, 20, 40, 72, dtype, "norm bias residual")
    actual = tile_gemm.launch(CheckedLaunches(arch=arch).loader, call)
    assert_close(actual, expected(call), epsilon=EPSILON[dtype], factor=2)


@DTYPES
def test_tile_gemm_takes_rows_of_any_magnitude_and_has_no_bank_conflicts(dtype: str) -> None:
    launches = CheckedLaunches(global_races=False)
    call = make_call(15, 4, 64, 96, dtype, "plain")
    call.x[:] *= np.array([1e-8, 1e4, 1e9, 1.0], np.float32)[:, None]
    assert_close(tile_gemm.launch(launches.loader, call), expected(call), epsilon=EPSILON[dtype], factor=2)
    report = launches.reports[-1]
    assert report.bank_conflicts == 0
    assert report.argument("weight").read.efficiency == 1.0
