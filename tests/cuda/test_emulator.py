"""The emulator finds every kind of mistake it promises to find, names its place, and passes correct kernels."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest

from cupyllm.cuda import emulator
from cupyllm.cuda.emulator import (
    EmulatedKernel,
    EmulatedModule,
    KernelBuildError,
    KernelFault,
    LaunchError,
    guarded_copy,
    guarded_empty,
)
from cupyllm.cuda.emulator import compiler as compiler_module
from cupyllm.errors import DeviceError

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")

FOLDER = Path(__file__).parent / "emulator_kernels"


def source(stem: str) -> str:
    return (FOLDER / f"{stem}.cu").read_text()


def module(
    stem: str, *defines: str, mode: compiler_module.Mode = "check", global_races: bool = False
) -> EmulatedModule:
    options = tuple(f"-D{define}" for define in defines)
    return EmulatedModule(source(stem), options=options, mode=mode, name=stem, global_races=global_races)


def kernel_of(text: str, *, mode: compiler_module.Mode = "check") -> EmulatedKernel:
    """The kernel `k` of a short source."""
    return EmulatedModule(text, mode=mode, name="inline").get_function("k")


def run_faulty(stem: str, fault: int, mode: compiler_module.Mode = "check", *, global_races: bool = False) -> None:
    """Two blocks of two warps over 128 floats; one more float in y, 64 floats of dynamic shared memory."""
    x, y = guarded_copy(np.arange(128, dtype=np.float32)), guarded_empty(128, np.float32)
    if stem == "global_races":
        y = guarded_copy(np.zeros(129, np.float32))
    kernel = module(stem, mode=mode, global_races=global_races).get_function("kernel")
    kernel((2,), (64,), (x, y, np.int32(128), np.int32(fault)), shared_mem=256)


def line_of(stem: str, fault: int) -> int:
    lines = source(stem).splitlines()
    return next(number for number, line in enumerate(lines, 1) if re.search(rf"//.*\bfault {fault}\b", line))


FAULTS = [
    *[("bounds", fault, "out of bounds", name) for fault, name in [(1, "x"), (2, "y"), (3, "y"), (4, None), (5, None)]],
    *[
        ("bounds", 6, "shared memory over-use", None),
        ("bounds", 7, "out of bounds", "y"),
        ("bounds", 8, "out of bounds", None),
    ],
    *[("alignment", 1, "misaligned", "x"), ("alignment", 2, "misaligned", "y"), ("alignment", 3, "misaligned", None)],
    ("constness", 1, "write to const", "x"),
    *[("races", fault, "shared-memory race", None) for fault in range(1, 9)],
    *[("uninitialised", fault, "uninitialised shared read", None) for fault in (1, 2, 3)],
    *[("barriers", fault, "divergent barrier", None) for fault in (1, 2)],
    ("barriers", 3, "deadlock", None),
    *[("barriers", fault, "warp mask", None) for fault in (4, 5, 6, 7, 8)],
    *[("arithmetic_faults", fault, "integer division by zero", None) for fault in (1, 2)],
    *[("arithmetic_faults", fault, "arithmetic", None) for fault in (3, 4, 5)],
    ("arithmetic_faults", 6, "trap", None),
    *[("global_races", fault, "global race", "y") for fault in range(1, 7)],
    *[("async_copies", 1, "asynchronous copy", None), ("async_copies", 2, "shared-memory race", None)],
    *[("async_copies", 3, "asynchronous copy", None), ("async_copies", 4, "shared-memory race", None)],
    *[("async_copies", 5, "misaligned", None), ("async_copies", 6, "out of bounds", "x")],
]


@pytest.mark.parametrize(("stem", "fault", "kind", "argument"), FAULTS, ids=lambda value: str(value))
def test_a_fault_is_reported_with_kind_argument_and_line(
    stem: str, fault: int, kind: str, argument: str | None
) -> None:
    with pytest.raises(KernelFault) as caught:
        run_faulty(stem, fault, global_races=stem == "global_races")
    assert (caught.value.kind, caught.value.argument_name) == (kind, argument)
    # Of two accesses that race, the later one in this run is the place and the earlier one the other place.
    assert f"{stem}.cu:{line_of(stem, fault)}" in (caught.value.frames[0], *caught.value.other_frames)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("mode", ["fast", "check"])
@pytest.mark.parametrize("stem", sorted({stem for stem, *_ in FAULTS}))
def test_a_correct_twin_passes_without_a_report(stem: str, mode: compiler_module.Mode) -> None:
    run_faulty(stem, 0, mode, global_races=mode == "check")


FAST_FAULTS = [
    *[("bounds", 1, "out of bounds"), ("bounds", 8, "out of bounds"), ("bounds", 6, "shared memory over-use")],
    *[("barriers", 1, "divergent barrier"), ("barriers", 3, "deadlock"), ("barriers", 4, "warp mask")],
    *[("barriers", 5, "warp mask"), ("barriers", 6, "warp mask"), ("arithmetic_faults", 6, "trap")],
    *[("async_copies", 5, "misaligned"), ("async_copies", 6, "out of bounds")],
]


@pytest.mark.parametrize(("stem", "fault", "kind"), FAST_FAULTS)
def test_fast_mode_reports_what_the_hardware_would_notice(stem: str, fault: int, kind: str) -> None:
    with pytest.raises(KernelFault) as caught:
        run_faulty(stem, fault, "fast")
    assert caught.value.kind == kind
    assert caught.value.frames[0] == f"{stem}.cu:{line_of(stem, fault)}"


def test_a_fault_in_a_helper_names_the_helper_and_its_caller() -> None:
    x, y = guarded_empty(32, np.float32), guarded_empty(32, np.float32)
    with pytest.raises(KernelFault) as caught:
        module("helper_lines").get_function("caller")((1,), (32,), (x, y))
    assert caught.value.frames == ("cupyllm/cuda/shared_helper.cuh:2", "cupyllm/cuda/caller.cu:2")
    assert (caught.value.block, caught.value.thread) == ((0, 0, 0), (31, 0, 0))


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_the_process_stays_usable_after_faults_and_the_earliest_block_is_reported(mode: compiler_module.Mode) -> None:
    text = """extern "C" __global__ void k(float* x, int n, int bad) {
        __shared__ float s[32];
        int i = blockIdx.x * 32 + threadIdx.x;
        s[threadIdx.x] = 1.0f;
        __syncthreads();
        x[bad && i >= 320 ? n + threadIdx.x : i] = s[31 - threadIdx.x];
    }"""
    kernel, x = kernel_of(text, mode=mode), guarded_empty(3200, np.float32)
    for _ in range(20):
        with pytest.raises(KernelFault, match=r"argument 0 \(x\)") as caught:
            kernel((100,), (32,), (x, np.int32(3200), np.int32(1)))
        assert caught.value.block == (10, 0, 0)
        x[:] = 0
        assert kernel((100,), (32,), (x, np.int32(3200), np.int32(0))).barriers == 100
        np.testing.assert_array_equal(x, 1)


def test_a_local_array_too_large_for_the_stack_is_a_fault() -> None:
    text = """extern "C" __global__ void k(float* y, int n) {
        volatile float large[20000];
        for (int i = 0; i < n; i++) large[i] = i;
        y[0] = large[n / 2];
    }"""
    with pytest.raises(KernelFault) as caught:
        kernel_of(text)((1,), (32,), (guarded_empty(1, np.float32), np.int32(20000)))
    assert caught.value.kind == "stack overflow"


def test_one_array_passed_as_const_and_as_output_is_not_a_write_to_const() -> None:
    text = 'extern "C" __global__ void k(const float* x, float* y) { y[threadIdx.x] = 2.0f * x[threadIdx.x]; }'
    x = guarded_copy(np.arange(32, dtype=np.float32))
    report = kernel_of(text)((1,), (32,), (x, x))
    np.testing.assert_array_equal(x, 2 * np.arange(32))
    assert report.argument("y").written.bytes == 128


# What the intrinsics compute ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("argument", "width"), [(1, 32), (3, 32), (16, 32), (5, 16), (2, 4), (0, 1)])
def test_shuffles_follow_the_definition(argument: int, width: int) -> None:
    x, out = guarded_copy(np.arange(64, dtype=np.int32) * 7), guarded_empty((4, 64), np.int32)
    kernel = module("semantics", mode="fast").get_function("shuffles")
    kernel((1,), (64,), (x, out, np.int32(argument), np.int32(width)))
    lane = np.arange(64) % 32
    first = lane // width * width
    last = first + width - 1
    sources = [
        first + (argument + np.arange(64)) % width,
        np.where((lane ^ argument) > last, lane, lane ^ argument),
        np.where(lane + argument > last, lane, lane + argument),
        np.where(lane - argument < first, lane, lane - argument),
    ]
    for got, source_lane in zip(out, sources, strict=True):
        np.testing.assert_array_equal(got, x[np.arange(64) // 32 * 32 + source_lane])


@pytest.mark.parametrize(
    "values", [np.arange(-5, 27) % 7 - 2, np.full(32, 3), np.zeros(32)], ids=["mixed", "equal", "zero"]
)
def test_votes_matches_and_reductions_follow_the_definition(values: np.ndarray) -> None:
    x, out = guarded_copy(values.astype(np.int32)), guarded_empty((10, 32), np.uint32)
    module("semantics", mode="fast").get_function("votes")((1,), (32,), (x, out))
    masks = np.array([sum(1 << lane for lane in range(32) if x[lane] == value) for value in x])
    full = 2**32
    expected = [
        sum(1 << lane for lane in range(32) if x[lane] > 0),
        int((x > 0).any()),
        int((x > 0).all()),
        masks,
        (full - 1 + 1) % full if (masks == full - 1).all() else 0,
        int(x.sum()) % full,
        int(x.min()) % full,
        int(x.max()) % full,
        int(np.bitwise_xor.reduce(x.view(np.uint32))),
        int(x.view(np.uint32).max()),
    ]
    for got, want in zip(out, expected, strict=True):
        np.testing.assert_array_equal(got, want)


def test_barriers_that_vote_see_all_threads() -> None:
    x = guarded_copy((np.arange(96) % 3 == 0).astype(np.int32))
    out = guarded_empty(96, np.int32)
    module("semantics", mode="fast").get_function("block_votes")((1,), (96,), (x, out))
    np.testing.assert_array_equal(out, 32 * 4 + 2)


def test_indices_run_x_first_in_three_dimensions() -> None:
    out = guarded_empty((24, 30), np.int32)
    module("semantics", mode="fast").get_function("indices")((2, 3, 4), (5, 3, 2), (out,))
    np.testing.assert_array_equal(out, np.arange(24)[:, None] * 1000 + np.arange(30))


@pytest.mark.parametrize("mode", ["fast", "check"])
def test_atomics_of_many_blocks_add_up(mode: compiler_module.Mode) -> None:
    out, total, wrapped = (
        guarded_copy(np.zeros(size, dtype)) for size, dtype in ((6, np.int32), (1, np.float32), (1, np.uint32))
    )
    out[2] = 5
    module("semantics", mode=mode).get_function("atomics")((50,), (96,), (out, total, wrapped))
    n = 4800
    np.testing.assert_array_equal(out, [n * (n - 1) // 2, n - 1, 0, -n, 255, 7])
    assert (float(total[0]), int(wrapped[0])) == (n / 2, n % 10)


@pytest.mark.parametrize(("kind", "letter", "dtype"), [("float", "f", np.float32), ("double", "d", np.float64)])
def test_sums_and_products_rounded_one_by_one_are_never_fused(kind: str, letter: str, dtype: type) -> None:
    text = f"""extern "C" __global__ void k(const {kind}* x, {kind}* y) {{
        int i = threadIdx.x;
        y[i] = __{letter}add_rn(x[i], __{letter}mul_rn(x[i + 32], x[i + 64]));
        y[i + 32] = __{letter}sub_rn(x[i], __{letter}mul_rn(x[i + 32], x[i + 64]));
    }}"""
    x = np.random.default_rng(0).standard_normal((3, 32)).astype(dtype)
    x[0] = -x[1] * x[2]  # of which only the rounding of the product is left
    y = guarded_empty((2, 32), dtype)
    kernel_of(text)((1,), (32,), (guarded_copy(x), y))
    np.testing.assert_array_equal(y, [np.zeros(32), 2 * x[0]])


def test_half_and_bfloat16_convert_as_ieee_says() -> None:
    bits = np.arange(65536, dtype=np.uint16)
    x = np.concatenate(
        [
            np.random.default_rng(0).standard_normal(65527) * 10.0 ** np.arange(-9, 9).repeat(3641)[:65527],
            [np.nan, np.inf, -np.inf, 65504, 65519.9, 65520, 1e-8, -0.0, 2**-25],
        ]
    ).astype(np.float32)
    outs = [guarded_empty(65536, dtype) for dtype in (np.float32, np.float32, np.float16, np.uint16)]
    halves, bfloats, to_half, to_bfloat = outs
    args = (guarded_copy(bits), halves, bfloats, guarded_copy(x), to_half, to_bfloat, np.int32(65536))
    module("semantics", mode="fast").get_function("convert")((256,), (256,), args)
    np.testing.assert_array_equal(halves, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(bfloats, (bits.astype(np.uint32) << 16).view(np.float32))
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(to_half, x.astype(np.float16))
    back = (to_bfloat.astype(np.uint32) << 16).view(np.float32)
    finite = np.isfinite(x)
    assert np.isnan(back[np.isnan(x)]).all()
    assert (np.abs(back[finite] - x[finite]) <= np.spacing(np.abs(x[finite])) * 2.0**15).all()  # half of a bf16 step


def test_integer_intrinsics_follow_the_definition() -> None:
    x, y = 0x89ABCDEF, 0x10F32547
    out = guarded_empty(10, np.uint32)
    module("semantics", mode="fast").get_function("integers")((1,), (1,), (np.uint32(x), np.uint32(y), out))
    xs, ys = np.array([x, y], "<u4").view(np.uint8).reshape(2, 4).astype(int)
    signed_xs, signed_ys = np.array([x, y], "<u4").view(np.int8).reshape(2, 4).astype(int)
    expected = [
        int.from_bytes(bytes([xs[1], ys[1], xs[2], ys[3]]), "little"),
        ((y << 32 | x) << 8 >> 32) % 2**32,
        ((y << 32 | x) >> 8) % 2**32,
        int(f"{x:032b}"[::-1], 2),
        int(xs @ ys) + 5,
        (int(signed_xs @ signed_ys) + 5) % 2**32,
        x * y >> 32,
        0 * 100 + x.bit_count() * 10 + 1,
        2 * 100 + 3 * 10 + 2,
        2**31 - 1,
    ]
    np.testing.assert_array_equal(out, np.array(expected, np.uint32))


def test_shared_memory_starts_as_nan() -> None:
    y = guarded_empty(64, np.float32)
    module("semantics", mode="fast").get_function("shared_start")((1,), (64,), (y,), shared_mem=256)
    assert np.isnan(y).all()


def matrices(k: int, dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(k)
    a, b, c = (rng.standard_normal(shape).astype(np.float32) for shape in ((16, k), (k, 8), (16, 8)))
    if dtype == "bf16":
        a, b = ((m.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32) for m in (a, b))
    else:
        a, b = a.astype(np.float16), b.astype(np.float16)
    return a, b, c


def as_bits(m: np.ndarray) -> np.ndarray:
    """16-bit patterns of fp16 values, or of fp32 values that are bf16 values."""
    return m.view(np.uint16) if m.dtype == np.float16 else (m.view(np.uint32) >> 16).astype(np.uint16)


@pytest.mark.parametrize(("k", "dtype"), [(16, "f16"), (16, "bf16"), (8, "f16")])
def test_mma_multiplies_matrices(k: int, dtype: str) -> None:
    a, b, c = matrices(k, dtype)
    d = guarded_empty((16, 8), np.float32)
    pairs = [guarded_copy(np.ascontiguousarray(as_bits(m)).view(np.uint32)) for m in (a, np.ascontiguousarray(b.T))]
    kernel = module("matrices", f"K={k}", mode="fast").get_function("by_hand")
    kernel((1,), (32,), (*pairs, guarded_copy(c), d, np.int32(dtype == "bf16")))
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64) + c, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trans", [False, True])
@pytest.mark.parametrize("mode", ["fast", "check"])
def test_ldmatrix_brings_tiles_into_the_layout_of_mma(trans: bool, mode: compiler_module.Mode) -> None:
    a, b, c = matrices(16, "f16")
    d = guarded_empty((16, 8), np.float32)
    b_stored = b if trans else np.ascontiguousarray(b.T)
    args = (guarded_copy(as_bits(a)), guarded_copy(as_bits(b_stored)), guarded_copy(c), d, np.int32(trans))
    module("matrices", mode=mode).get_function("by_ldmatrix")((1,), (32,), args)
    np.testing.assert_allclose(d, a.astype(np.float64) @ b.astype(np.float64) + c, rtol=1e-5, atol=1e-5)


def test_ldmatrix_needs_a_barrier_after_the_stores_of_the_same_warp() -> None:
    kernel = module("matrices").get_function("unordered_ldmatrix")
    out = guarded_empty(32, np.uint32)
    kernel((1,), (32,), (out, np.int32(0)))
    np.testing.assert_array_equal(out, np.arange(32) // 4)
    with pytest.raises(KernelFault) as caught:
        kernel((1,), (32,), (out, np.int32(1)))
    assert caught.value.kind == "shared-memory race"
    assert caught.value.frames[0] == f"matrices.cu:{line_of('matrices', 1)}"


def test_asynchronous_copies_arrive_with_the_wait_for_their_group_and_fill_with_zeros() -> None:
    x, y = guarded_copy(np.arange(1, 9, dtype=np.float32)), guarded_empty(8, np.float32)
    kernel = module("copies", mode="fast").get_function("stages")
    kernel((1,), (1,), (x, y, np.int32(3), np.int32(0)))
    np.testing.assert_array_equal(y, [1, 2, 3, 0, 5, 6, 7, 8])
    kernel((1,), (1,), (x, y, np.int32(4), np.int32(1)))
    np.testing.assert_array_equal(y, [1, 2, 3, 4, -1, -1, -1, -1])


# Counts -------------------------------------------------------------------------------------------------------------

# Two blocks of 64 threads, so four warps. Per argument: bytes, warp accesses, sectors, bytes used.
TRAFFIC = [
    ("coalesced", np.float32, 128, (512, 4, 16, 512), (512, 4, 16, 512)),
    ("shifted", np.float32, 132, (512, 4, 20, 512), (512, 4, 16, 512)),
    ("strided", np.float32, 1024, (512, 4, 128, 512), (512, 4, 16, 512)),
    ("reversed", np.float32, 128, (512, 4, 16, 512), (512, 4, 16, 512)),
    ("broadcast", np.float32, 128, (512, 4, 4, 16), (512, 4, 16, 512)),
    ("half_warp", np.float32, 128, (256, 4, 8, 256), (256, 4, 8, 256)),
    ("vectors", np.float32, 512, (2048, 4, 64, 2048), (2048, 4, 64, 2048)),
    ("halves", np.float16, 128, (256, 4, 8, 256), (256, 4, 8, 256)),
    ("atomics", np.float32, 128, (512, 4, 16, 512), (512, 4, 4, 16)),
]


@pytest.mark.parametrize(("name", "dtype", "size", "read", "written"), TRAFFIC, ids=[case[0] for case in TRAFFIC])
def test_sectors_and_bytes_are_exact(
    name: str, dtype: type, size: int, read: tuple[int, ...], written: tuple[int, ...]
) -> None:
    x, y = guarded_copy(np.zeros(size, dtype)), guarded_copy(np.zeros(size, dtype))
    report = module("traffic").get_function(name)((2,), (64,), (x, y))
    assert report.argument("x").read == emulator.Traffic(*read)
    assert report.argument("y").written == emulator.Traffic(*written)
    assert report.argument("x").written.bytes == 0
    assert report.argument("y").read == (
        emulator.Traffic(*written) if name == "atomics" else emulator.Traffic(0, 0, 0, 0)
    )


def test_loops_of_different_length_count_one_access_per_iteration() -> None:
    x, y = guarded_copy(np.zeros(96, np.float32)), guarded_empty(32, np.float32)
    report = module("traffic").get_function("uneven_loops")((1,), (32,), (x, y))
    # 32 lanes take 1 step, 21 a second, 10 a third.
    assert report.argument("x").read.bytes == (32 + 21 + 10) * 4
    assert report.argument("x").read.warp_accesses == 3
    assert report.argument("x").read.bytes_used == (32 + 21 + 10) * 4


# The stride of a warp's stores, in elements, and the wavefronts it costs beyond the necessary ones.
@pytest.mark.parametrize(
    ("name", "step", "shared_mem", "conflicts"),
    [
        *[("banks", stride, 0, extra) for stride, extra in [(0, 0), (1, 0), (2, 1), (4, 3), (32, 31), (33, 0)]],
        *[("vector_banks", stride, 0, extra) for stride, extra in [(1, 0), (2, 4)]],
        *[("matrix_banks", pitch, 32 * pitch, extra) for pitch, extra in [(16, 0), (128, 28), (144, 0)]],
    ],
)
def test_bank_conflicts_are_exact(name: str, step: int, shared_mem: int, conflicts: int) -> None:
    y = guarded_empty(32, np.float32)
    kernel = module("traffic").get_function(name)
    if step == 0:
        with pytest.raises(KernelFault, match="race"):
            kernel((1,), (32,), (y, np.int32(step)), shared_mem=shared_mem)
        return
    report = kernel((1,), (32,), (y, np.int32(step)), shared_mem=shared_mem)
    assert report.bank_conflicts == conflicts


def test_barriers_are_counted_over_all_blocks_in_both_modes() -> None:
    for mode in ("fast", "check"):
        y = guarded_empty(64, np.float32)
        report = module("traffic", mode=mode).get_function("three_barriers")((1,), (64,), (y,))
        assert report.barriers == 3
        assert (report.bank_conflicts is None) == (mode == "fast")


# Refusals -----------------------------------------------------------------------------------------------------------

ARGUMENTS = """struct pair { int a, b; };
extern "C" __global__ __launch_bounds__(2 * 32) void k(
    const float* x, __half* y, int n, float scale, bool flag, pair p) {
    extern __shared__ float s[];
    s[0] = n;
    if (threadIdx.x == 0) y[0] = __float2half(x[0] * scale + n + flag + p.a + p.b);
}"""
PAIR = np.array([(3, 4)], [("a", "i4"), ("b", "i4")])[0]
GOOD = (np.ones(4, np.float32), np.zeros(4, np.float16), np.int32(2), np.float32(0.5), np.bool_(True), PAIR)


def replaced(index: int, value: object) -> tuple[object, ...]:
    return (*GOOD[:index], value, *GOOD[index + 1 :])


def read_only(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array


def test_good_arguments_of_every_kind_arrive() -> None:
    y = guarded_empty(4, np.float16)
    kernel_of(ARGUMENTS, mode="fast")((1,), (32,), replaced(1, y), shared_mem=4)
    assert float(y[0]) == 1 * 0.5 + 2 + 1 + 3 + 4


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (GOOD[:-1], "5 arguments for 6 parameters (x, y, n, scale, flag, p)"),
        (replaced(2, 2), "argument 2 (n): pass a NumPy scalar of 4 bytes"),
        (replaced(2, np.int64(2)), "argument 2 (n): is an integer of 4 bytes"),
        (replaced(2, np.float32(2)), "argument 2 (n): is an integer of 4 bytes"),
        (replaced(3, 0.5), "argument 3 (scale): pass a NumPy scalar of 4 bytes"),
        (replaced(3, np.float64(0.5)), "argument 3 (scale): is a float of 4 bytes"),
        (replaced(5, np.int32(1)), "argument 5 (p): is a struct of 8 bytes"),
        (replaced(2, np.zeros(1, np.int32)), "argument 2 (n): pass a NumPy scalar"),
        (replaced(0, np.float32(1)), "argument 0 (x): is an array in the kernel"),
        (replaced(0, np.ones(4, np.float64)), "argument 0 (x): points to 4-byte elements, but the array is float64"),
        (replaced(0, np.ones(4, np.float16)), "argument 0 (x): points to 4-byte elements, but the array is float16"),
        (replaced(0, np.ones((4, 4), np.float32)[:, 0]), "argument 0 (x): the array of shape (4,) and strides (16,)"),
        (replaced(1, read_only(np.zeros(4, np.float16))), "argument 1 (y): is not const in the kernel"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_wrong_arguments_are_refused_by_name(args: tuple[object, ...], words: str) -> None:
    with pytest.raises(LaunchError, match=re.escape(words)):
        kernel_of(ARGUMENTS, mode="fast")((1,), (32,), args, shared_mem=4)


@pytest.mark.parametrize(
    ("grid", "block", "shared_mem", "words"),
    [
        ((0,), (32,), 0, "grid (0, 1, 1)"),
        ((1, 1, 1, 1), (32,), 0, "one to three sizes"),
        ((1, 65536), (32,), 0, "grid (1, 65536, 1)"),
        ((1,), (1, 1, 65), 0, "block (1, 1, 65)"),
        ((1,), (64, 32), 0, "block (64, 32, 1)"),
        ((1,), (96,), 0, "96 threads, but __launch_bounds__ promises 64"),
        ((1,), (32,), 48 * 1024 + 1, "set max_dynamic_shared_size_bytes"),
        ((1,), (32,), 1 << 20, "no GPU has that much"),
    ],
)
def test_impossible_launches_are_refused(
    grid: tuple[int, ...], block: tuple[int, ...], shared_mem: int, words: str
) -> None:
    with pytest.raises(LaunchError, match=re.escape(words)):
        kernel_of(ARGUMENTS, mode="fast")(grid, block, GOOD, shared_mem=shared_mem)


def test_more_shared_memory_can_be_asked_for() -> None:
    kernel = kernel_of(ARGUMENTS, mode="fast")
    kernel.max_dynamic_shared_size_bytes = 100_000
    kernel((1,), (32,), GOOD, shared_mem=100_000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('extern "C" __global__ void k(int* x) {\n  x[0] = undeclared;\n}', "inline.cu:2:"),
        (
            'extern __shared__ float s[];\nextern "C" __global__ void k() { s[0] = 0; }',
            "declare `extern __shared__ s[]` inside",
        ),
        ("__global__ void k(int* x) {}", 'no extern "C" __global__ kernel'),
        (
            'extern "C" __global__ void k() { __shared__ float s[12292]; s[threadIdx.x] = s[0]; }',
            "49168 bytes of 49152",
        ),
        ('extern "C" __global__ void k(int* x) { x[0] = __activemask(); }', "__activemask"),
        ('extern "C" __global__ void other() {}', "no kernel named 'k'; there are other"),
    ],
)
def test_sources_that_cannot_work_are_refused(text: str, words: str) -> None:
    with pytest.raises(KernelBuildError, match=re.escape(words)) as caught:
        kernel_of(text, mode="fast")
    assert "\n" not in str(caught.value)


def test_options_are_honoured_or_refused() -> None:
    text = 'extern "C" __global__ void k(int* x) { x[0] = VALUE; }'
    x = np.zeros(1, np.int32)
    options = ("-DVALUE=7", "-std=c++17", "--use_fast_math")
    EmulatedModule(text, options=options, name="inline").get_function("k")((1,), (1,), (x,))
    assert x[0] == 7
    with pytest.raises(KernelBuildError, match="'--dopt' is not known"):
        EmulatedModule(text, options=("--dopt",), name="inline")


def test_a_missing_compiler_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler_module.compiler.cache_clear()
    try:
        with pytest.raises(DeviceError, match=r"g\+\+, which was not found; install g\+\+ 12") as caught:
            kernel_of('extern "C" __global__ void k() {}')
    finally:
        compiler_module.compiler.cache_clear()
    assert "\n" not in str(caught.value)


def test_compiled_kernels_are_kept_in_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text = 'extern "C" __global__ void k(int* x) { x[blockIdx.x] = 1; }'
    x = np.zeros(64, np.int32)
    for _ in range(2):
        kernel_of(text, mode="fast")((64,), (1,), (x,))
    folder = tmp_path / "cupyllm" / "emulator"
    first = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    kernel_of(text, mode="fast")((64,), (1,), (x,))
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == first
    assert {path.suffix for path in folder.iterdir()} == {".o", ".so"}


def test_threads_of_the_host_can_launch_at_the_same_time() -> None:
    text = 'extern "C" __global__ void k(int* x, int v) { __syncthreads(); x[blockIdx.x * 32 + threadIdx.x] = v; }'
    kernel = kernel_of(text, mode="fast")
    outs = [np.zeros(320, np.int32) for _ in range(4)]

    def work(number: int) -> None:
        for _ in range(50):
            kernel((10,), (32,), (outs[number], np.int32(number)))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, out in enumerate(outs):
        np.testing.assert_array_equal(out, number)


@pytest.mark.parametrize("shape", [(0,), (1,), (5, 3), (4096,)])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_guarded_arrays_are_aligned_and_hold_their_contents(shape: tuple[int, ...], dtype: type) -> None:
    original = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    copy = guarded_copy(original)
    np.testing.assert_array_equal(copy, original)
    assert copy.dtype == original.dtype
    assert copy.ctypes.data % 16 == 0
    assert (copy.ctypes.data + copy.nbytes + 15) // 16 * 16 % 4096 == 0
