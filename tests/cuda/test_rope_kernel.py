"""rope_and_kv_write against its reference op in the emulator's check mode; see test_linear_kernels.py."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from kernel_case import DTYPES, EPSILON, CheckedLaunches, elements, random_floats, total_bytes, widen

from cupyllm.batch import Batch
from cupyllm.cuda import rope_and_kv_write
from cupyllm.cuda.emulator import guarded_copy
from cupyllm.errors import DeviceError
from cupyllm.ops.reference import Norm, ReferenceOps
from cupyllm.rope import RopeConfig, cos_sin_table

PAGES, PAGE_SIZE = 6, 16
SHAPES = [(1, 14, 2, 64), (5, 7, 1, 128), (3, 4, 4, 64), (2, 16, 2, 128), (7, 1, 1, 64)]


@dataclass
class RopeCall:
    """The op's arguments: T tokens at random positions and slots, over a cache full of NaN."""

    qkv: np.ndarray
    table: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    norms: dict[str, Norm | None]

    def run(self, launches: CheckedLaunches) -> np.ndarray:
        arrays = (self.qkv, self.table, self.positions, self.slots, self.keys, self.values)
        return rope_and_kv_write.launch(launches.loader, *arrays, **self.norms)

    def expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Queries, keys and values of the reference op, with a float32 cache."""
        keys, values = widen(self.keys), widen(self.values)
        batch: Any = EMPTY_BATCH._replace(positions=self.positions, slots=self.slots)
        q = ReferenceOps().rope_and_kv_write(self.qkv, self.table, batch, keys, values, **self.norms)
        return q, keys, values


NOTHING = np.zeros(0, np.int32)
EMPTY_BATCH = Batch(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, 0, 0, 0)


def make_call(T: int, H: int, KH: int, D: int, dtype: str, *, norm: bool = False, scale: float = 1.0) -> RopeCall:
    rng = np.random.default_rng(T * H)
    poison = np.full((PAGES, PAGE_SIZE, KH, D), np.nan)
    return RopeCall(
        qkv=random_floats(rng, T, (H + 2 * KH) * D, scale=scale),
        table=guarded_copy(cos_sin_table(RopeConfig(theta=1e6), D, 100)),
        positions=guarded_copy(rng.integers(0, 100, T).astype(np.int32)),
        slots=guarded_copy(rng.permutation(PAGES * PAGE_SIZE)[:T].astype(np.int32)),
        keys=elements(poison, dtype),
        values=elements(poison, dtype),
        norms={name: Norm(random_floats(rng, D), 1e-6) if norm else None for name in ("q_norm", "k_norm")},
    )


@DTYPES
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [1.0, 3e-3])
def test_queries_and_written_slots_are_the_reference_ops(
    dtype: str, norm: bool, shape: tuple[int, int, int, int], scale: float
) -> None:
    call = make_call(*shape, dtype, norm=norm, scale=scale)
    q, keys, values = call.expected()
    size = np.abs(q).max()
    np.testing.assert_allclose(call.run(CheckedLaunches()), q, rtol=0, atol=16 * EPSILON["fp32"] * size)
    # Rounding to the cache's type comes last; where float32 differs in its last bits, the neighbour may be taken.
    limits = {"rtol": 0.51 * EPSILON[dtype], "atol": 1e-7 + 16 * EPSILON["fp32"] * size}
    np.testing.assert_allclose(widen(call.keys), keys, **limits)  # NaN only where no slot was written
    np.testing.assert_allclose(widen(call.values), values, **limits)


def test_fp16_saturates_what_is_finite_and_keeps_what_is_not() -> None:
    call = make_call(2, 1, 1, 64, "fp16", scale=1e4)
    value = call.qkv[0, 128:]
    value[:6] = [1e6, -1e6, 65504, 65519, np.inf, np.nan]
    call.qkv[1, 64:128] = 1e5
    call.run(CheckedLaunches())
    slots = call.slots
    written = widen(call.values).reshape(-1, 64)
    np.testing.assert_array_equal(written[slots[0], :6], [65504, -65504, 65504, 65504, np.inf, np.nan])
    assert np.abs(widen(call.keys).reshape(-1, 64)[slots[1]]).max() == 65504


def test_bf16_takes_what_fp16_cannot() -> None:
    call = make_call(1, 1, 1, 64, "bf16", scale=1e8)
    _, keys, _ = call.expected()
    call.run(CheckedLaunches())
    np.testing.assert_allclose(widen(call.keys), keys, rtol=EPSILON["bf16"], atol=1e2)


def test_a_slot_of_minus_one_writes_nothing_and_still_gives_queries() -> None:
    call = make_call(2, 2, 1, 64, "fp16")
    slot = int(call.slots[1])
    call.slots[0] = -1
    assert np.isfinite(call.run(CheckedLaunches())).all()
    written = np.flatnonzero(np.isfinite(widen(call.keys).reshape(-1, 64)).all(axis=1))
    np.testing.assert_array_equal(written, [slot])


def test_every_byte_is_moved_once_in_whole_sectors() -> None:
    launches = CheckedLaunches(global_races=False)
    make_call(4, 14, 2, 64, "bf16", norm=True).run(launches)
    (report,) = launches.reports
    counted, least = total_bytes(report), rope_and_kv_write.least_bytes(4, 14, 2, 64, norm=1)
    for name in ("qkv", "q", "keys", "values"):
        assert counted[name] == least[name], name
        argument = report.argument(name)
        assert (argument.read + argument.written).efficiency == 1.0, name


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": np.zeros((1, 16, 1, 64), np.float32)}, "keys is float32; supported are float16, and uint16"),
        (
            {"keys": np.zeros((1, 16, 1, 96), np.float16), "values": np.zeros((1, 16, 1, 96), np.float16)},
            "96; .* 64 and",
        ),
        ({"qkv": np.zeros((2, 4 * 64 + 8), np.float32)}, r"qkv has 264 columns; supported are H \+ 2 \* 1 heads of 64"),
        ({"qkv": np.zeros((2, 4 * 64), np.float64)}, "qkv is float64 .* supported is float32"),
        ({"positions": np.zeros(2, np.int64)}, "positions is int64"),
        ({"slots": np.zeros(3, np.int32)}, r"slots is int32 \(3,\)"),
        ({"norms": {"q_norm": Norm(np.zeros(64, np.float32), 1e-6), "k_norm": None}}, "one of q_norm and k_norm"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    call = replace(make_call(2, 2, 1, 64, "fp16"), **changes)
    with pytest.raises(DeviceError, match=message):
        call.run(CheckedLaunches())
