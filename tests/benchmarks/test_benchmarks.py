"""Every benchmark runs from beginning to end on a machine like this, small, and writes its rows."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
CONFIG = str(FOLDER.parent / "configs" / "default.json")


class Runner:
    """Runs the `main` of a benchmark in this process; what it starts has one BLAS thread, as the models are small."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path) -> None:
        monkeypatch.syspath_prepend(str(FOLDER))
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", "1")
        self._capsys = capsys
        self._file = folder / "figures.json"

    def run(self, name: str, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        self._capsys.readouterr()
        code = importlib.import_module(name).main(arguments)
        return code, *self._capsys.readouterr()

    def rows(self, name: str, *arguments: str) -> dict[str, dict[str, Any]]:
        code, output, _ = self.run(name, *arguments, "--json", str(self._file))
        assert code == 0
        record = json.loads(self._file.read_text(encoding="utf-8"))
        assert record["machine"]["cores"] >= 1
        for row in record["rows"]:
            assert row["name"] in output
            assert row["runs"]
            assert all(math.isfinite(value) and value >= 0 for value in (*row["runs"], *row["peer_runs"]))
        return {row["name"]: row for row in record["rows"]}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Runner:
    return Runner(monkeypatch, capsys, tmp_path)


def test_the_load_of_the_article_on_a_server_for_each_batch_limit(benchmark: Runner) -> None:
    small = ("--requests", "3", "--output-tokens", "4", "--warm-up", "1", "--rounds", "2", "--bandwidth-gbs", "20")
    own = ("--config", CONFIG, "--set", "device=reference", "--set", "kv_cache_gib=0.1")
    found = benchmark.rows("serve", "--article", *own, *small)
    for limit in (1, 4, 8):
        assert found[f"serve.article.batch{limit}.errors"]["runs"] == [0, 0]
        assert found[f"serve.article.batch{limit}.output_tokens_per_s"]["value"] > 0
        assert found[f"serve.article.batch{limit}.ttft_ms.p99"]["unit"] == "ms"
        assert 0 < found[f"serve.article.batch{limit}.roofline_share"]["ratio"] < 1


def test_a_server_that_is_not_told_or_not_there_is_refused_in_one_line(benchmark: Runner) -> None:
    for arguments, message in (
        ((), "one of --url and --config"),
        (("--url", "http://127.0.0.1:9", "--concurrency", "1"), "127.0.0.1:9 failed"),
        (("--url", "http://127.0.0.1:9", "--article"), "--article starts a server"),
        (("--config", CONFIG, "--article", "--prompt", "x"), "leave out --prompt"),
        (("--config", CONFIG, "--set", "device", "--concurrency", "1"), "expected KEY=VALUE"),
    ):
        code, _, error = benchmark.run("serve", *arguments)
        assert (code, error.count("\n")) == (2, 1), arguments
        assert message in error
