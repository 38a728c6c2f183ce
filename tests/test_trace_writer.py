"""`trace`: a file for Perfetto that tells what the engine did, and is JSON whatever ends the process."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from cupyllm.errors import ConfigError
from cupyllm.model import Model
from cupyllm.sampling import SamplingParams
from cupyllm.step_trace import StepRecord, StepTrace
from cupyllm.trace_writer import JsonArrayFile, TraceWriter
from tests.api.live_server import write_model_folder
from tests.engine_case import load_model, make_engine
from tests.tiny_checkpoint import write_tiny_checkpoint

ROOT = Path(__file__).parents[1]


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))


def spans(events: list[dict[str, Any]], *, may_be_open: bool = False) -> dict[int, list[str]]:
    """Row -> the states it went through; spans must be balanced and in order."""
    states: dict[int, list[str]] = {}
    opened: dict[int, dict[str, Any]] = {}
    last: dict[int, float] = {}
    for event in (event for event in events if event["ph"] in "BE"):
        row = event["tid"]
        assert event["ts"] >= last.get(row, 0.0)
        last[row] = event["ts"]
        if event["ph"] == "B":
            assert row not in opened
            opened[row] = event
            states.setdefault(row, []).append(event["name"])
        else:
            assert opened.pop(row)["name"] == event["name"]
    assert may_be_open or not opened
    return states


def test_an_array_is_complete_after_every_append(tmp_path: Path) -> None:
    path = tmp_path / "array.json"
    file = JsonArrayFile(path)
    expected: list[Any] = []
    assert read(path) == expected
    for values in ([1], [{"a": "ü\n"}, "x" * 5000], [], [None]):
        if values:
            file.append(values)
        expected += values
        assert read(path) == expected
    file.close()
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        JsonArrayFile(tmp_path / "nowhere" / "array.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder)
    return load_model(folder)


def test_steps_spans_and_counters_are_what_the_engine_did(model: Model, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    engine = make_engine(model, num_pages=12)
    records: list[StepRecord] = []
    trace = StepTrace(engine)
    writer = TraceWriter(path)
    trace.listen(writer.record)
    trace.listen(records.append)
    params = SamplingParams(max_tokens=14, temperature=0.0, ignore_eos=True)
    sequences = [engine.add(list(range(9 * k + 1, 9 * k + 10)), params) for k in range(4)]
    sequences += engine.add_parallel(list(range(100, 110)), [params, params])
    for _ in range(4):
        engine.step()
    engine.abort(sequences[0])
    while engine.has_work:
        engine.step()
    writer.close()
    events = read(path)
    steps = [event for event in events if event["ph"] == "X"]
    worked = [record for record in records if record.num_tokens]
    assert len(steps) == len(worked)
    for event, record in zip(steps, worked, strict=True):
        assert event["args"]["decode_rows"] == list(record.decode_ids)
        chunks = [(chunk["sequence"], chunk["start"], chunk["length"]) for chunk in event["args"]["chunks"]]
        assert chunks == list(record.chunks)
        assert event["dur"] == pytest.approx(record.seconds * 1e6, abs=0.01)
    assert {sum(event["args"].values()) for event in events if event.get("name") == "pages"} == {12}
    assert engine.stats.num_preemptions > 0
    assert sum(len(event["args"]["preempted"]) for event in steps) == engine.stats.num_preemptions
    states = spans(events)
    assert set(states) == {sequence.id + 1 for sequence in sequences}
    for sequence in sequences[:-1]:
        expected = ["queue", "prefill", "decode"] * (1 + sequence.num_preemptions)
        assert states[sequence.id + 1] == expected[: len(states[sequence.id + 1])]
        assert states[sequence.id + 1][-1] == "decode" or sequence is sequences[0]
    finishes = {event["tid"] - 1: event["args"]["finish"] for event in events if event["ph"] == "E" and "args" in event}
    assert finishes == {sequence.id: sequence.finish_reason.value for sequence in sequences if sequence.finish_reason}


def test_a_full_disk_ends_the_trace_and_not_the_engine(
    model: Model, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(model)
    trace, writer = StepTrace(engine), TraceWriter(tmp_path / "trace.json")
    trace.listen(writer.record)
    assert writer._file is not None
    with open("/dev/full", "wb", buffering=0) as full:
        writer._file._file.close()
        writer._file._file = full
        sequence = engine.add([1, 2, 3], SamplingParams(max_tokens=5, ignore_eos=True))
        while engine.has_work:
            engine.step()
    assert sequence.num_output_tokens == 5
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["the trace cannot be written and ends here: No space left on device"]


@contextmanager
def traced_server(folder: Path, trace: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server process that writes a trace, and its address."""
    settings = {"model": folder, "port": 0, "kv_cache_gib": 0.05, "device": "reference", "trace": trace}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "server.py", *words, "--api_key_env", "NOT_SET_IN_TESTS"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, next(line.split()[1] for line in process.stdout if line.startswith("url "))
        finally:
            process.kill()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_the_file_of_a_server_is_json_however_the_server_ends(tmp_path: Path, end: signal.Signals) -> None:
    trace = tmp_path / "trace.json"
    ask = {"prompt": "the weather", "max_tokens": 3, "ignore_eos": True}
    with traced_server(write_model_folder(tmp_path / "model"), trace) as (process, url):
        for _ in range(2):
            assert httpx.post(f"{url}/v1/completions", json=ask, timeout=60).status_code == 200
        long = ask | {"max_tokens": 900, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=60) as answer:
            pieces = answer.iter_text()
            next(pieces)
            process.send_signal(end)
            if end == signal.SIGTERM:  # what runs may finish
                assert "".join(pieces).endswith("[DONE]\n\n")
        process.wait(60)
    events = read(trace)
    states = list(spans(events, may_be_open=end == signal.SIGKILL).values())
    assert states[:2] == [["queue", "prefill", "decode"]] * 2
    assert len([event for event in events if event["ph"] == "X"]) >= 6
    assert "weather" not in trace.read_text(encoding="utf-8")


def test_a_trace_that_cannot_be_written_stops_the_server_before_it_listens(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model")
    command = [sys.executable, "server.py", "--model", str(folder), "--trace", str(tmp_path / "no" / "trace.json")]
    command += ["--port", "0", "--kv_cache_gib", "0.01", "--device", "reference"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "trace.json cannot be written: No such file or directory" in ended.stderr
