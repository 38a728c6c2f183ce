"""Documents that name a test for each of their rows: the tests must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
DOCS = TESTS.parent / "docs"


@pytest.mark.parametrize(
    ("document", "rows"),
    [
        ("qwen-traps.md", [f"T{number}" for number in range(1, 21)]),
        ("bug-cases.md", [f"A{number}" for number in (*range(1, 19), *range(29, 40))]),
    ],
)
def test_every_row_names_tests_that_exist(document: str, rows: list[str]) -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    lines = re.findall(r"^\| [TA]\d+ \|.*$", (DOCS / document).read_text(encoding="utf-8"), re.MULTILINE)
    assert [line.split()[1] for line in lines] == rows
    for line in lines:
        named = re.findall(r"`(test_\w+)`", line)
        assert named, line
        for name in named:
            assert f"def {name}(" in source, name
