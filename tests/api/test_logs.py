"""What the log of a server process looks like, as text and as JSON."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from cupyllm.api.logs import JsonFormatter, log_fields
from tests.api.live_server import LiveServer, frames, wait_until

ROOT = Path(__file__).parents[2]
NUMBER = r"\d+(\.\d+)?(e-\d+)?"


@pytest.fixture
def lines() -> io.StringIO:
    """What a logger with the JSON format has written."""
    return io.StringIO()


@pytest.fixture
def logger(lines: io.StringIO) -> logging.Logger:
    made = logging.Logger("test")
    handler = logging.StreamHandler(lines)
    handler.setFormatter(JsonFormatter())
    made.addHandler(handler)
    return made


def test_a_finished_request_has_all_its_times(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    ask = {"prompt": "secret", "max_tokens": 5, "ignore_eos": True, "stream": True}
    frames(server.post("/v1/completions", ask, headers={"x-request-id": "timed-1"}))
    wait_until(lambda: "timed-1 " in caplog.text, "the stream has been closed")
    (line,) = [record.message for record in caplog.records if record.message.startswith("timed-1 ")]
    assert re.fullmatch(
        r"timed-1 /v1/completions prompt_tokens=\d+ cached_tokens=0 output_tokens=5 finish=length preemptions=0 "
        rf"queue_s={NUMBER} ttft_s={NUMBER} tpot_s={NUMBER} total_s={NUMBER}",
        line,
    )


def test_what_a_request_never_reached_is_a_dash(server: LiveServer, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    server.post("/v1/embeddings", {"input": "one"}, headers={"x-request-id": "vector-1"})
    (line,) = [record.message for record in caplog.records if record.message.startswith("vector-1 ")]
    assert " finish=stop " in line
    assert " ttft_s=- tpot_s=- " in line


def test_json_lines_have_fields_as_keys_and_tracebacks_as_text(lines: io.StringIO, logger: logging.Logger) -> None:
    log_fields(logger, {"request_id": "a", "route": "/x"}, {"tokens": 3, "ttft_s": None})
    logger.warning('quoted "%s"\nand a second line', "ü\ud800")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    first, second, third = map(json.loads, lines.getvalue().splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", first.pop("time"))
    expected = {"level": "info", "message": "request ended", "request_id": "a", "route": "/x", "tokens": 3}
    assert first == expected | {"ttft_s": None}
    assert second["message"] == 'quoted "ü\ud800"\nand a second line'
    assert third["level"] == "error"
    assert third["error"].startswith("Traceback")
    assert third["error"].endswith("ValueError: why")


def test_every_line_of_a_server_with_json_logs_is_json(model_folder: Path) -> None:
    settings = {"model": model_folder, "port": 0, "kv_cache_gib": 0.01, "device": "reference", "log_format": "json"}
    words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
    with subprocess.Popen(
        [sys.executable, "server.py", *words, "--api_key_env", "NOT_SET_IN_TESTS"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            url = next(line.split()[1] for line in process.stdout if line.startswith("url "))
            ask = {"prompt": "very secret text", "max_tokens": 2}
            httpx.post(f"{url}/v1/completions", json=ask, headers={"x-request-id": "json-1"}, timeout=60)
            httpx.post(f"{url}/v1/completions", json=ask | {"temperature": 9}, timeout=60)
        finally:
            process.terminate()
            _, log = process.communicate(timeout=60)
    entries = [json.loads(line) for line in log.splitlines()]
    assert [entry["output_tokens"] for entry in entries if entry.get("request_id") == "json-1"] == [2]
    assert any("refused with 400" in entry["message"] for entry in entries)
    assert "secret" not in log
    assert process.returncode == 0
