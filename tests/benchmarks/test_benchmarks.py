"""Every benchmark runs from beginning to end on a machine like this, small, and writes its rows."""

from __future__ import annotations

import importlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm import LLM
from cupyllm.checkpoint import Checkpoint
from cupyllm.figures import Row, write_record
from cupyllm.hub import resolve_model
from cupyllm.simulator.cost_model import CostModel, Machine

FOLDER = Path(__file__).parents[2] / "benchmarks"
DEMO = resolve_model("demo")
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
        code = importlib.import_module(name).main(list(arguments))
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


def test_starts(benchmark: Runner) -> None:
    found = benchmark.rows("startup", "--rounds", "1", "--no-cold", "--device", "reference")
    assert found["startup.first_token_s"]["value"] >= found["startup.listening_s"]["value"] > 0
    assert found["startup.import_s"]["peer"] == "import numpy"


def test_prompts(benchmark: Runner) -> None:
    found = benchmark.rows(
        "prefill", "--lengths", "20,40,100000", "--rounds", "1", "--no-peers", "--device", "reference"
    )
    assert set(found) == {f"prefill.{kind}{length}" for kind in ("", "batch8.", "products.") for length in (20, 40)}


def test_decode_steps(benchmark: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("decode"), "SECONDS", 0.05)
    small = ("--rounds", "1", "--no-peers", "--device", "reference", "--kv-cache-gib", "0.05")
    found = benchmark.rows("decode", *small, "--batch", "1,3", "--context", "40,200,100000")
    grid = {f"decode.batch{batch}.context{context}" for batch in (1, 3) for context in (40, 200)}
    assert set(found) == grid | {"decode.batch3.step_rate", "decode.host_share", "memory.peak"}
    assert all(found[name]["ratio"] > 0 for name in grid)
    assert found["decode.host_share"]["value"] < 1


def test_a_step_reads_all_weights_once_and_the_cache_of_each_sequence(benchmark: Runner) -> None:
    """Against the sums of the cost model, and a context that is found without being computed."""
    decode = importlib.import_module("decode")
    llm = LLM("demo", device="reference", kv_cache_gib=0.05, generation_config="none")
    engine = llm.engine
    cost = CostModel(engine.runner.model.config, Machine("", 1.0, 1.0, 0.0))
    # The reference holds in float32 what the cost model counts in 16 bits, but for norms and biases, which are small.
    assert decode.step_bytes(engine, 3, 100) == pytest.approx(
        2 * (cost.step_weight_bytes + 300 * cost.kv_bytes_per_token), rel=0.01
    )
    decode.start_decoding(engine, 3, 101)
    sequences = engine.scheduler.decoding
    assert [sequence.num_cached_tokens for sequence in sequences] == [96] * 3
    pages = [page for sequence in sequences for page in sequence.page_table]
    assert len(set(pages)) == len(pages)
    engine.abort_all()


def test_host_work(benchmark: Runner) -> None:
    assert benchmark.rows("host_overhead", "--rounds", "1")["host.control_us.1"]["value"] > 0


def test_http_overhead(benchmark: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("api_overhead"), "CONNECTIONS", (16,))
    found = benchmark.rows("api_overhead", "--rounds", "1")
    assert found["api.chunks_per_s.16"]["value"] > 0
    assert found["api.requests_per_s.16"]["value"] > 0


def test_structured_output(benchmark: Runner) -> None:
    pytest.importorskip("llguidance", reason="needs llguidance: pip install 'cupyllm[structured]'")
    assert benchmark.rows("structured", "--rounds", "1")["structured.mask_us.small"]["value"] > 0


def test_peers_are_measured_in_turns(benchmark: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a second server of our own in the place of transformers'."""
    peers, servers = (importlib.import_module(name) for name in ("peers", "servers"))
    arguments = ["--device", "reference", "--model", str(DEMO), "--kv_cache_gib", "0.1"]
    monkeypatch.setattr(peers, "own_server", lambda _: servers.own_server(arguments))
    monkeypatch.setattr(peers, "transformers_server", lambda program, model, dtype: servers.own_server(arguments))
    small = ("--requests", "2", "--rounds", "2", "--loads", "closed1,closed8")
    found = benchmark.rows("peers", "--model", str(DEMO), "--transformers", "unused", *small)
    for load in ("closed1", "closed8"):
        row = found[f"peers.transformers.{load}.output_tokens_per_s"]
        assert (len(row["runs"]), len(row["peer_runs"]), row["peer"]) == (2, 2, "cupyllm")
        assert found[f"peers.transformers.{load}.errors"]["runs"] == [0, 0]
        assert found[f"peers.transformers.{load}.their_errors"]["runs"] == [0, 0]


def test_the_same_weights_for_llama_cpp(benchmark: Runner, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
    file = tmp_path / "demo.gguf"
    assert benchmark.run("write_gguf", str(DEMO), str(file))[0] == 0
    written = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
    checkpoint = Checkpoint.open(DEMO)
    assert len(written) == len(checkpoint.names)
    for name, theirs in (
        ("model.embed_tokens.weight", "token_embd"),
        ("model.layers.1.mlp.down_proj.weight", "blk.1.ffn_down"),
    ):
        values = np.empty(checkpoint.shape(name), np.uint16)
        checkpoint.read_into(name, values)
        found = written[f"{theirs}.weight"]
        assert found.tensor_type == gguf.GGMLQuantizationType.BF16
        assert found.data.tobytes() == values.tobytes()
    norm = written["output_norm.weight"]
    assert norm.tensor_type == gguf.GGMLQuantizationType.F32


def test_quantised_weights_for_llama_cpp_are_near(benchmark: Runner, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf", reason="needs gguf: pip install gguf")
    file = tmp_path / "demo.gguf"
    assert benchmark.run("write_gguf", str(DEMO), str(file), "--quantise", "Q8_0")[0] == 0
    (found,) = (tensor for tensor in gguf.GGUFReader(file).tensors if tensor.name == "blk.1.ffn_down.weight")
    assert found.tensor_type == gguf.GGMLQuantizationType.Q8_0
    name, checkpoint = "model.layers.1.mlp.down_proj.weight", Checkpoint.open(DEMO)
    values = np.empty(checkpoint.shape(name), np.float32)
    checkpoint.read_into(name, values)
    steps = np.abs(values).reshape(-1, 32).max(axis=1, keepdims=True) / 127
    error = np.abs(gguf.quants.dequantize(found.data, found.tensor_type).reshape(values.shape) - values)
    assert np.all(error.reshape(-1, 32) <= 0.6 * steps)  # the scale itself is rounded to float16


def test_the_report_has_every_record_and_its_plot(benchmark: Runner, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="needs matplotlib: pip install 'cupyllm[bench]'")
    report = importlib.import_module("report")
    names = {
        "decode": "decode.batch8.context128",
        "peers": "peers.llama.closed8.output_tokens_per_s",
        "prefill": "prefill.128",
        "serve": "serve.closed8.output_tokens_per_s",
        "startup": "startup.import_s",
        "other": "x",
    }
    (tmp_path / "results").mkdir()
    for stem, name in names.items():
        row = Row(name, "s", [1.0, 2.0, 4.0], "a peer", [2.0, 2.0, 2.0], "ratio >= 0.9")
        write_record(tmp_path / "results" / f"{stem}.json", [row])
    drawn = []
    for _ in range(2):
        assert report.main([], tmp_path) == 0
        drawn.append({path.stem: path.read_bytes() for path in (tmp_path / "plots").iterdir()})
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == set(names) - {"other"}
    assert all(b"<svg" in plot and len(plot) < 60_000 for plot in drawn[0].values())
    text = (tmp_path / "RESULTS.md").read_text(encoding="utf-8")
    for stem, name in names.items():
        assert f"| {name} | 1 / 2 / 4 s | a peer | 2 / 2 / 2 | 1.00 | ratio >= 0.9 | yes |" in text
        assert (f"](plots/{stem}.svg)" in text) == (stem != "other")


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_the_peak_of_memory_is_above_the_weights_and_int8_takes_less(benchmark: Runner) -> None:
    pytest.importorskip("numba", reason="needs numba: pip install 'cupyllm[cpu]'")
    found = benchmark.rows("cpu_memory", "--rounds", "1")
    stored, int8, compiling = (found[f"cpu.memory.peak_gib{ending}"] for ending in ("", ".int8", ".no_kernels"))
    assert stored["peer_value"] < stored["value"] < compiling["value"]
    assert int8["peer_value"] < 0.55 * stored["peer_value"]


def test_watching_is_held_against_the_same_server_unwatched(benchmark: Runner) -> None:
    found = benchmark.rows("live_cost", "--rounds", "1", "--tokens", "20", "--device", "reference")
    assert set(found) == {f"live.{kind}.{count}" for kind in ("unwatched", "watched", "watcher") for count in (1, 8)}
    for count in (1, 8):
        unwatched, watched = found[f"live.unwatched.{count}"], found[f"live.watched.{count}"]
        assert watched["peer_runs"] == unwatched["runs"] != unwatched["peer_runs"]
        assert 0 < found[f"live.watcher.{count}"]["value"] < 2
