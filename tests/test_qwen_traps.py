"""docs/qwen-traps.md names a test for each trap: they must exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
DOCUMENT = (TESTS.parent / "docs" / "qwen-traps.md").read_text(encoding="utf-8")


def test_every_trap_names_tests_that_exist() -> None:
    source = "\n".join(path.read_text(encoding="utf-8") for path in TESTS.rglob("test_*.py"))
    rows = re.findall(r"^\| T(\d+) \|.*$", DOCUMENT, re.MULTILINE)
    assert [int(row) for row in rows] == list(range(1, 21))
    for line in re.findall(r"^\| T\d+ \|.*$", DOCUMENT, re.MULTILINE):
        named = re.findall(r"`(test_\w+)`", line)
        assert named, line
        for name in named:
            assert f"def {name}(" in source, name
