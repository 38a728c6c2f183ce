"""`python -m cupyllm bench`: a load on a server that runs, and on one that is started for it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.live_server import LiveServer, run_server, write_model_folder
from tests.cli.terminal_process import run

SMALL = ("--concurrency", "2", "--requests", "3", "--prompt-tokens", "12", "--output-tokens", "4", "--warm-up", "1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with run_server(write_model_folder(tmp_path_factory.mktemp("bench") / "model")) as live:
        yield live


def figures(text: str) -> dict[str, str]:
    return dict(re.findall(r"^(\S.*?\S)  +(\S.*)$", text, re.MULTILINE))


def test_a_load_on_a_server_that_runs(served: LiveServer) -> None:
    result = run("bench", "--url", served.url, *SMALL)
    assert (result.returncode, result.stderr) == (0, "")
    found = figures(result.stdout)
    assert (found["requests answered"], found["output tokens"]) == ("3", "12")
    assert {"requests/s", "output tokens/s", "time to first token, ms", "between tokens, ms"} <= set(found)


def test_a_load_on_a_server_that_is_started_for_it() -> None:
    result = run("bench", "--set", "device=reference", "--set", "kv_cache_gib=0.05", *SMALL)
    assert (result.returncode, result.stderr) == (0, "")
    assert figures(result.stdout)["requests answered"] == "3"


def test_keys_are_those_of_the_variable_that_a_server_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY_OF_THIS_TEST", "sk-1, sk-2")
    with run_server(write_model_folder(tmp_path / "model"), api_key_env="KEY_OF_THIS_TEST") as server:
        refused = run("bench", "--url", server.url, *SMALL)
        assert refused.returncode == 2
        assert refused.stderr.endswith("status 401: No API key provided; send it as 'Authorization: Bearer KEY'\n")
        for arguments, key in ((["--api-key-env", "KEY_OF_THIS_TEST"], ""), ([], "sk-1, sk-2")):
            taken = run("bench", "--url", server.url, *SMALL, *arguments, CUPYLLM_API_KEY=key)
            assert (taken.returncode, taken.stderr) == (0, "")
    started = ("--set", "device=reference", "--set", "kv_cache_gib=0.05")
    assert run("bench", *started, *SMALL, CUPYLLM_API_KEY="sk-1").returncode == 0


def test_requests_that_fail_are_counted_and_make_the_exit_code_1(served: LiveServer) -> None:
    result = run("bench", "--url", served.url, *SMALL, "--extra", '{"top_p": 7}')
    assert result.returncode == 1
    assert figures(result.stdout)["requests answered"] == "0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "127.0.0.1:9"),
        (["--url", "http://127.0.0.1:9", "--set", "a=b"], "--config and --set are for a server that is started"),
        (["--set", "port"], "expected KEY=VALUE"),
        (["--set", "prot=1"], "the server could not be started"),
        (["--poisson", "1", "--concurrency", "2"], "one of --trace, --poisson and --concurrency"),
    ],
)
def test_what_cannot_be_measured_is_exit_code_2(arguments: list[str], message: str) -> None:
    result = run("bench", *arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert message in result.stderr.splitlines()[-1]


def test_the_config_file_is_the_servers(tmp_path: Path) -> None:
    result = run("bench", "--config", str(tmp_path / "none.json"), *SMALL)
    assert result.returncode == 2
    assert "none.json cannot be read" in result.stderr
