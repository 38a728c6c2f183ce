"""The header of every kernel: its sections, and that what it says of names, constants and bytes is true."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

import pytest

from cupyllm.cuda.nvrtc import kernel_names, launch_module
from cupyllm.ops.reference import ReferenceOps

FOLDER = Path(str(resources.files("cupyllm.cuda")))
LABELS = (
    "Purpose",
    "Computes",
    "Arrays",
    "Constants",
    "Launch",
    "Bytes",
    "Numerics",
    "Preconditions",
    "Why this way",
    "Source",
)
H200_BYTES_PER_US = 4.8e6
EXAMPLE = re.compile(
    r"Example: least_bytes\((?P<sizes>.*?)\) totals (?P<total>[\d,]+) bytes: "
    r"(?P<time>[\d.,]+) us at the 4\.8 TB/s of an H200"
)
every_kernel = pytest.mark.parametrize("name", kernel_names())


def text_of(name: str) -> str:
    return (FOLDER / f"{name}.cu").read_text(encoding="utf-8")


def header_of(name: str) -> dict[str, list[str]]:
    """Label -> its lines, from the comment at the top of the file."""
    sections: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text_of(name).splitlines():
        if not line.startswith("//"):
            break
        content = line[2:].rstrip()
        if content and not content.startswith("  "):
            lines = sections.setdefault(content.strip(), [])
        elif content:
            lines.append(content.strip())
    return sections


@every_kernel
def test_the_sections_are_all_there_in_order_and_not_empty(name: str) -> None:
    header = header_of(name)
    assert tuple(header) == LABELS
    assert all(header.values())


@every_kernel
def test_the_file_holds_one_kernel_named_like_the_file(name: str) -> None:
    assert re.findall(r"\bvoid\s+(?:__launch_bounds__\([^)]*\)\s*)?(\w+)\(\n", text_of(name)) == [name]
    assert text_of(name).count('extern "C" __global__') == 1


@every_kernel
def test_the_body_has_numbered_sections(name: str) -> None:
    numbers = [int(number) for number in re.findall(r"^ +// (\d) \w", text_of(name), re.MULTILINE)]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 3


@every_kernel
def test_the_twin_is_an_op_of_the_reference(name: str) -> None:
    twins = re.findall(r"Twin: ReferenceOps\.(\w+)", "\n".join(header_of(name)["Computes"]))
    assert twins
    assert all(callable(getattr(ReferenceOps, twin)) for twin in twins)


@every_kernel
def test_every_array_of_the_table_is_an_argument_and_the_reverse(name: str) -> None:
    signature = re.sub(r"//.*", "", text_of(name)).split(f" {name}(\n")[1].split(") {")[0]
    arguments = re.findall(r"\*\s*(?:__restrict__\s+)?(\w+)", signature)
    table = [line.split()[0] for line in header_of(name)["Arrays"] if re.search(r"\b(read|written)\b", line)]
    assert table == arguments


@every_kernel
def test_every_constant_is_listed_checked_and_in_use(name: str) -> None:
    listed = {line.split()[0] for line in header_of(name)["Constants"]} - {"none"}
    listed = {word for word in listed if word.isupper()}
    given = {constant for constants in launch_module(name).CONSTANT_SETS for constant in constants}
    assert listed == given
    for constant in listed - {"ELEMENT_BF16"}:  # which common.cuh checks
        assert re.search(rf"static_assert\([^;]*\b{constant}\b", text_of(name)), f"{constant} has no static_assert"


@every_kernel
def test_the_example_of_bytes_is_what_least_bytes_computes(name: str) -> None:
    example = EXAMPLE.search(" ".join(header_of(name)["Bytes"]))
    assert example
    sizes = {size.split("=")[0]: int(size.split("=")[1]) for size in example["sizes"].replace(" ", "").split(",")}
    counted = launch_module(name).least_bytes(**sizes)
    total = sum(counted.values())
    assert int(example["total"].replace(",", "")) == total
    assert float(example["time"].replace(",", "")) == pytest.approx(total / H200_BYTES_PER_US, rel=0.05)
    arrays = " ".join(header_of(name)["Arrays"])
    assert all(re.search(rf"\b{array}\b", arrays) for array in counted)


@every_kernel
def test_the_code_below_the_header_is_short_enough_to_read(name: str) -> None:
    lines = text_of(name).splitlines()
    header = next(number for number, line in enumerate(lines) if not line.startswith("//"))
    assert len(lines) - header <= 200
    assert max(map(len, lines)) <= 120


@every_kernel
def test_the_reading_order_names_the_kernel(name: str) -> None:
    assert f"`{name}`" in (FOLDER / "README.md").read_text(encoding="utf-8")
