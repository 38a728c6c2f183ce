"""docs/tour.md: its blocks run one after another, and the files that it names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"
TOUR = (DOCS / "tour.md").read_text(encoding="utf-8")


def test_the_blocks_run_one_after_another_and_answer(capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", TOUR, re.DOTALL):
        exec(compile(block, "docs/tour.md", "exec"), names)  # what the page tells the reader to run
    shown = capsys.readouterr().out
    assert "What is a page table?" in shown
    assert "FinishReason." in shown
    assert shown.rstrip().endswith(str(names["llm"].tokenizer.decode(names["sequence"].output_ids)).rstrip())  # type: ignore[attr-defined]
