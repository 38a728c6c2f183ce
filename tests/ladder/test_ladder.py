"""The teaching versions of gemv compute the reference op, and cost what their headers and LADDER.md say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from cupyllm.cuda.emulator import guarded_copy
from cupyllm.cuda.recording import RecordingLoader
from cupyllm.number_formats import bfloat16_to_float32
from cupyllm.ops.reference import ReferenceOps

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")

FOLDER = Path(__file__).parents[2] / "benchmarks" / "ladder"
NAMES = ["gemv_1_naive", "gemv_2_coalesced", "gemv_3_vectorised", "gemv_4_split_k", "gemv"]


@pytest.fixture
def ladder(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import ladder

    return ladder


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("N", "K"), [(1, 8), (45, 264), (300, 40), (5, 1032)])
def test_every_step_is_the_reference_op(ladder: ModuleType, name: str, N: int, K: int) -> None:
    x, weight = ladder.random_layer(N, K)
    y = ladder.STEPS[name][1](RecordingLoader(ladder.ladder_source), guarded_copy(x), guarded_copy(weight))
    expected = ReferenceOps().linear(x, bfloat16_to_float32(weight))
    np.testing.assert_allclose(y, expected, rtol=0, atol=1e-5)


def test_each_step_improves_what_its_header_says(ladder: ModuleType) -> None:
    assert list(ladder.STEPS) == NAMES
    naive, coalesced, vectorised, split, production = (ladder.count(name, 256, 512) for name in NAMES)
    assert {step.traffic("weight").bytes for step in (naive, coalesced, vectorised, split, production)} == {
        2 * 256 * 512
    }
    assert naive.traffic("weight").efficiency == 1 / 16
    assert coalesced.traffic("weight").efficiency == 1.0
    assert coalesced.traffic("weight").warp_accesses == naive.traffic("weight").warp_accesses
    assert vectorised.traffic("weight").warp_accesses * 8 == coalesced.traffic("weight").warp_accesses
    assert split.warps == 4 * vectorised.warps
    assert production.traffic("x").sectors < split.traffic("x").sectors


def test_the_written_table_is_what_the_script_counts_now(ladder: ModuleType) -> None:
    """Without the columns that need NVIDIA's compiler or a GPU."""

    def counts(text: str) -> list[list[str]]:
        rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| [gemv")]
        return [row[:11] for row in rows]

    now = ladder.table({name: ladder.count(name, *ladder.COUNTED) for name in NAMES})
    assert counts((FOLDER / "LADDER.md").read_text(encoding="utf-8")) == counts(now)
    assert len(counts(now)) == len(NAMES)


def test_the_script_writes_its_table_and_the_common_json(
    ladder: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ladder, "COUNTED", (64, 64))
    assert ladder.main(["--out", str(tmp_path / "table.md"), "--json", str(tmp_path / "figures.json")]) == 0
    table = (tmp_path / "table.md").read_text(encoding="utf-8")
    assert table in capsys.readouterr().out
    rows = {row["name"]: row["value"] for row in json.loads((tmp_path / "figures.json").read_text())["rows"]}
    assert rows["ladder.gemv_1_naive.weight_sectors"] == 64 * 64
    assert rows["ladder.gemv_2_coalesced.weight_sectors"] == 64 * 64 * 2 / 32


@pytest.mark.parametrize("name", NAMES[:-1])
def test_a_file_says_what_changed_why_it_helps_and_what_is_lost(name: str) -> None:
    text = (FOLDER / f"{name}.cu").read_text(encoding="utf-8")
    assert re.findall(r"^// (\w.*)\n", text, re.MULTILINE)[1:4] == ["Changed", "Why it helps", "Still lost"]
    assert f") {name}(" in text
    assert max(map(len, text.splitlines())) <= 120
