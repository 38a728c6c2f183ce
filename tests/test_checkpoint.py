"""Reading safetensors files: exact bits, every conversion, and a clear refusal of every kind of damage."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupyllm.checkpoint import Checkpoint
from cupyllm.errors import CheckpointError
from cupyllm.number_formats import float32_to_bfloat16
from tests.tiny_checkpoint import (
    Tensors,
    read_raw_safetensors,
    write_json,
    write_raw_safetensors,
    write_safetensors,
    write_weights,
)

ALL_16_BITS = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
TENSORS: Tensors = {
    "first": np.arange(12, dtype=np.float32).reshape(3, 4),
    "second": np.arange(6, dtype=np.float16).reshape(2, 3),
    "third": np.arange(8, dtype=np.uint16),
}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def read(folder: Path, name: str, dtype: str) -> NDArray[Any]:
    checkpoint = Checkpoint.open(folder)
    out = np.empty(checkpoint.shape(name), dtype=dtype)
    checkpoint.read_into(name, out)
    return out


def one_tensor(folder: Path, values: NDArray[Any]) -> Path:
    write_weights(folder, {"w": values})
    return folder


def test_names_shapes_dtypes_and_sizes_are_known_without_reading(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.names == ("first", "second", "third")
    assert [checkpoint.shape(name) for name in checkpoint.names] == [(3, 4), (2, 3), (8,)]
    assert [checkpoint.dtype(name) for name in checkpoint.names] == ["float32", "float16", "bfloat16"]
    assert [checkpoint.tensor_bytes(name) for name in checkpoint.names] == [48, 12, 16]
    assert checkpoint.num_bytes == 76


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_shards_read_as_one_file_does(tmp_path: Path, shards: int) -> None:
    write_weights(tmp_path, TENSORS, shards)
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(read(tmp_path, name, values.dtype.name), values, strict=True)


def test_files_that_the_safetensors_library_writes_are_read(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    values = {name: TENSORS[name] for name in ("first", "second")}
    save_file(values, tmp_path / SINGLE)
    for name, expected in values.items():
        np.testing.assert_array_equal(read(tmp_path, name, expected.dtype.name), expected, strict=True)


@pytest.mark.parametrize("source", ["uint16", "float16"])
def test_every_16_bit_pattern_is_kept_without_conversion(tmp_path: Path, source: str) -> None:
    one_tensor(tmp_path, ALL_16_BITS.view(source))
    np.testing.assert_array_equal(read(tmp_path, "w", source).view(np.uint16), ALL_16_BITS)


def test_every_bfloat16_pattern_becomes_the_upper_half_of_a_float32(tmp_path: Path) -> None:
    bits = read(one_tensor(tmp_path, ALL_16_BITS), "w", "float32").view(np.uint32)
    np.testing.assert_array_equal(bits, ALL_16_BITS.astype(np.uint32) * 65536)


@pytest.mark.parametrize(
    ("bits", "value"),
    [
        (0x3F80, 1.0),
        (0xC049, -3.140625),
        (0x0001, 2.0**-133),  # the smallest subnormal
        (0x007F, 127 * 2.0**-133),  # the largest one
        (0x7F7F, 255 * 2.0**120),  # the largest finite value
        (0x7F80, np.inf),
        (0xFF80, -np.inf),
        (0x8000, -0.0),
    ],
)
def test_known_bfloat16_values(tmp_path: Path, bits: int, value: float) -> None:
    read_back = read(one_tensor(tmp_path, np.array([bits], dtype=np.uint16)), "w", "float32")[0]
    assert float(read_back) == value
    assert np.signbit(read_back) == np.signbit(value)


def test_every_float16_pattern_becomes_the_same_float32(tmp_path: Path) -> None:
    halves = ALL_16_BITS.view(np.float16)
    wide = read(one_tensor(tmp_path, halves), "w", "float32")
    finite = np.isfinite(halves)
    sign = np.where(ALL_16_BITS >> 15, -1.0, 1.0)
    exponent = (ALL_16_BITS >> 10 & 0x1F).astype(np.int64)
    fraction = (ALL_16_BITS & 0x3FF).astype(np.float64)
    by_definition = sign * np.where(exponent > 0, 1024 + fraction, fraction) * 2.0 ** (np.maximum(exponent, 1) - 25)
    np.testing.assert_array_equal(wide[finite], by_definition[finite].astype(np.float32))
    np.testing.assert_array_equal(np.isnan(wide), np.isnan(halves))
    np.testing.assert_array_equal(np.isinf(wide), np.isinf(halves))


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F800000, 0x3F80),
        (0x3F808000, 0x3F80),  # half way: to the even neighbour, down
        (0x3F808001, 0x3F81),  # just above half way
        (0x3F818000, 0x3F82),  # half way: to the even neighbour, up
        (0x3F817FFF, 0x3F81),
        (0x3FFFFFFF, 0x4000),  # carries into the exponent
        (0x7F7FFFFF, 0x7F80),  # beyond the largest bfloat16
        (0x00000001, 0x0000),
        (0x00018000, 0x0002),  # among subnormals too
        (0x80000000, 0x8000),
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a NaN whose upper half alone would be infinity
        (0xFFFFFFFF, 0xFFFF),  # a NaN that adding would turn into zero
    ],
)
def test_float32_is_rounded_to_the_nearest_bfloat16(tmp_path: Path, bits: int, expected: int) -> None:
    values = np.array([bits], dtype=np.uint32).view(np.float32)
    assert read(one_tensor(tmp_path, values), "w", "uint16")[0] == expected


def test_rounding_to_bfloat16_equals_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs torch (pip install torch)")
    bits = np.random.default_rng(0).integers(0, 2**32, 100_000, dtype=np.uint64).astype(np.uint32)
    values = bits.view(np.float32)[np.isfinite(bits.view(np.float32))]
    expected = torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(float32_to_bfloat16(values), expected)


@pytest.mark.parametrize("source", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("target", ["float32", "float16", "uint16"])
@pytest.mark.parametrize("size", [0, 1, 2**17 - 1, 2**17, 2**17 + 1, 300_001])
def test_all_conversions_keep_small_integers_at_any_length(tmp_path: Path, source: str, target: str, size: int) -> None:
    numbers = (np.arange(size) % 255 - 127).astype(np.float32)

    def as_type(dtype: str) -> NDArray[Any]:
        if dtype == "uint16":
            return (numbers.view(np.uint32) >> 16).astype(np.uint16)
        return numbers.astype(dtype)

    write_weights(tmp_path, {"before": np.ones(3, dtype=np.float32), "w": as_type(source)})
    np.testing.assert_array_equal(read(tmp_path, "w", target), as_type(target), strict=True)


def test_rows_of_a_larger_array_are_filled_in_place(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS)
    whole = np.full((5, 4), -1.0, dtype=np.float32)
    Checkpoint.open(tmp_path).read_into("first", whole[1:4])
    np.testing.assert_array_equal(whole[1:4], TENSORS["first"])
    assert np.all(whole[[0, 4]] == -1.0)


@pytest.mark.parametrize("values", [np.array([1.0, 70_000.0], np.float32), np.array([0x3F80, 0x7F00], np.uint16)])
def test_a_value_beyond_float16_is_refused_rather_than_made_infinite(tmp_path: Path, values: NDArray[Any]) -> None:
    one_tensor(tmp_path, values)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'w' .*float16.*bfloat16 or float32"):
        read(tmp_path, "w", "float16")


def test_infinities_of_the_file_stay_infinite_in_float16(tmp_path: Path) -> None:
    values = np.array([np.inf, -np.inf, np.nan, 65_504.0], dtype=np.float32)
    np.testing.assert_array_equal(read(one_tensor(tmp_path, values), "w", "float16"), values.astype(np.float16))


def edit_header(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header, data = read_raw_safetensors(folder / SINGLE)
    change(header)
    write_raw_safetensors(folder / SINGLE, header, data)


def claim_header_size(folder: Path, size: int) -> None:
    header, data = read_raw_safetensors(folder / SINGLE)
    write_raw_safetensors(folder / SINGLE, header, data, header_size=size)


def replace_header(folder: Path, text: bytes) -> None:
    (folder / SINGLE).write_bytes(len(text).to_bytes(8, "little") + text + b"\0" * 76)


def add_header_bytes(folder: Path, count: int) -> None:
    """A sound header made too long by spaces, in a file that really has them (but as a hole, not on the disk)."""
    header, data = read_raw_safetensors(folder / SINGLE)
    with (folder / SINGLE).open("wb") as stream:
        stream.write(count.to_bytes(8, "little") + json.dumps(header).encode())
        stream.seek(8 + count)
        stream.write(data)


def cut(folder: Path, size: int) -> None:
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:size])


def append(folder: Path, content: bytes) -> None:
    path = folder / SINGLE
    path.write_bytes(path.read_bytes() + content)


DAMAGED_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut by one byte": (lambda f: cut(f, -1), "'third' ends at byte"),
    "cut inside the second tensor": (lambda f: cut(f, -20), "'second' ends at byte"),
    "cut inside the header": (lambda f: cut(f, 40), "header"),
    "cut inside the header's length": (lambda f: cut(f, 5), "header"),
    "empty": (lambda f: cut(f, 0), "header"),
    "one byte too long": (lambda f: append(f, b"x"), "not fully covered"),
    "header longer than the file": (lambda f: claim_header_size(f, 10**6), "header"),
    "header of 2**63 bytes": (lambda f: claim_header_size(f, 2**63), "header"),
    "header above 100 MB": (lambda f: add_header_bytes(f, 100_000_001), "100000000"),
    "header not JSON": (lambda f: replace_header(f, b'{"first": '), "not JSON"),
    "header not UTF-8": (lambda f: replace_header(f, b'{"\xff": 1}'), "not JSON"),
    "header a list": (lambda f: replace_header(f, b"[1, 2]"), "object"),
    "header nested deeply": (lambda f: replace_header(f, b'{"first":' + b"[" * 100_000), "not JSON"),
    "overlapping offsets": (lambda f: edit_header(f, lambda h: h["second"].update(data_offsets=[44, 56])), "second"),
    "gap between tensors": (lambda f: edit_header(f, lambda h: h.pop("second")), "third"),
    "offsets reversed": (lambda f: edit_header(f, lambda h: h["first"].update(data_offsets=[48, 0])), "'first'"),
    "offset negative": (lambda f: edit_header(f, lambda h: h["first"].update(data_offsets=[-1, 47])), "'first'"),
    "offset a fraction": (lambda f: edit_header(f, lambda h: h["first"].update(data_offsets=[0.0, 48])), "'first'"),
    "offsets missing": (lambda f: edit_header(f, lambda h: h["second"].pop("data_offsets")), "'second'"),
    "shape not of the tensor's size": (lambda f: edit_header(f, lambda h: h["first"].update(shape=[3, 5])), "'first'"),
    "shape huge": (lambda f: edit_header(f, lambda h: h["first"].update(shape=[2**40, 2**40])), "'first'"),
    "dtype of another size": (lambda f: edit_header(f, lambda h: h["first"].update(dtype="F16")), "'first'"),
    "dtype unknown": (lambda f: edit_header(f, lambda h: h["first"].update(dtype="Q9")), "Q9"),
    "entry not an object": (lambda f: edit_header(f, lambda h: h.update(first=[1])), "'first'"),
}


@pytest.mark.parametrize("damage", DAMAGED_FILES)
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    write_weights(tmp_path, TENSORS)
    do_damage, named = DAMAGED_FILES[damage]
    do_damage(tmp_path)
    refused(tmp_path, SINGLE, named)


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    write_json(folder / INDEX, index)


FIRST_SHARD, SECOND_SHARD = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DAMAGED_SHARDS: dict[str, tuple[Callable[[Path], object], tuple[str, ...]]] = {
    "missing shard": (lambda f: (f / SECOND_SHARD).unlink(), (SECOND_SHARD, "does not exist")),
    "cut shard": (
        lambda f: (f / SECOND_SHARD).write_bytes((f / SECOND_SHARD).read_bytes()[:-1]),
        (SECOND_SHARD, "'second'"),
    ),
    "shard is a folder": (
        lambda f: ((f / SECOND_SHARD).unlink(), (f / SECOND_SHARD).mkdir()),
        (SECOND_SHARD, "cannot be read"),
    ),
    "index names a tensor absent from its shard": (
        lambda f: edit_index(f, lambda m: m.update(ghost=FIRST_SHARD)),
        (INDEX, "'ghost'", FIRST_SHARD),
    ),
    "index names the wrong shard": (
        lambda f: edit_index(f, lambda m: m.update(second=FIRST_SHARD, first=SECOND_SHARD)),
        ("'first'", FIRST_SHARD),
    ),
    "shard has a tensor that the index lacks": (
        lambda f: edit_index(f, lambda m: m.pop("third")),
        ("'third'", FIRST_SHARD),
    ),
    "two shards have the same tensor": (
        lambda f: write_safetensors(f / SECOND_SHARD, {name: TENSORS[name] for name in ("second", "first")}),
        ("'first'", SECOND_SHARD),
    ),
    "index without weight_map": (lambda f: write_json(f / INDEX, {"metadata": {}}), (INDEX, "weight_map")),
    "weight_map empty": (lambda f: write_json(f / INDEX, {"weight_map": {}}), (INDEX, "weight_map")),
    "weight_map a list": (lambda f: write_json(f / INDEX, {"weight_map": ["first"]}), (INDEX, "weight_map")),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), (INDEX, "JSON")),
    "file name not a string": (lambda f: edit_index(f, lambda m: m.update(first=1)), (INDEX, "'first'")),
}


@pytest.mark.parametrize("damage", DAMAGED_SHARDS)
def test_damaged_shards_are_refused_by_file_and_tensor(tmp_path: Path, damage: str) -> None:
    write_weights(tmp_path, TENSORS, shards=2)
    do_damage, named = DAMAGED_SHARDS[damage]
    do_damage(tmp_path)
    refused(tmp_path, *named)


@pytest.mark.parametrize(
    "file_name",
    [
        "../model.safetensors",
        "/elsewhere/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "C:model.safetensors",
        "model.safetensors\0",
        ".safetensors",
        "pytorch_model.bin",
        "",
    ],
)
def test_an_index_reaches_only_safetensors_files_in_its_folder(tmp_path: Path, file_name: str) -> None:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    write_safetensors(tmp_path / SINGLE, {"w": TENSORS["first"]})
    write_safetensors(inside / "sub" / SINGLE, {"w": TENSORS["first"]})
    write_json(inside / INDEX, {"weight_map": {"w": file_name}})
    refused(inside, INDEX, "'w'", repr(file_name))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pth", "model.gguf", "consolidated.safetensors"])
def test_other_weight_files_are_refused_with_what_is_needed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"anything")
    refused(tmp_path, name, SINGLE, "safetensors")


def test_a_folder_without_weights_and_no_folder_are_refused(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), SINGLE, INDEX)
    refused(tmp_path / "absent", "absent", "not a folder")


def refused(folder: Path, *named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    for words in named:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_unsupported_dtype_is_refused_when_asked_for(tmp_path: Path) -> None:
    write_weights(tmp_path, {"w": np.zeros(2, dtype=np.float64), "positions": np.zeros(2, dtype=np.int64)})
    checkpoint = Checkpoint.open(tmp_path)
    for name, dtype in (("w", "F64"), ("positions", "I64")):
        with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor '{name}' is {dtype}; supported"):
            checkpoint.dtype(name)


def test_a_file_that_shrinks_after_opening_is_refused_by_tensor(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS)
    checkpoint = Checkpoint.open(tmp_path)
    cut(tmp_path, -20)
    checkpoint.read_into("first", np.empty((3, 4), dtype=np.float32))
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the file ends inside tensor 'second'"):
        checkpoint.read_into("second", np.empty((2, 3), dtype=np.float32))


def test_a_file_that_vanishes_after_opening_is_refused_by_tensor(tmp_path: Path) -> None:
    write_weights(tmp_path, TENSORS)
    checkpoint = Checkpoint.open(tmp_path)
    (tmp_path / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'first' cannot be read"):
        checkpoint.read_into("first", np.empty((3, 4), dtype=np.float32))
