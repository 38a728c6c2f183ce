"""server.py: settings, help, and one-line errors before anything is loaded."""

from __future__ import annotations

import dataclasses
import socket
from pathlib import Path

import pytest

from cupyllm.api.command_line import help_text, read_arguments
from cupyllm.config import ServerConfig
from server import main


@pytest.mark.parametrize("form", [["--config", "FILE"], ["--config=FILE"]])
def test_settings_of_the_command_line_win_over_the_file(tmp_path: Path, form: list[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"port": 1, "model": "a"}')
    config = read_arguments([*(word.replace("FILE", str(file)) for word in form), "--port", "2", "--seed=null"])
    assert (config.model, config.port, config.seed) == ("a", 2, None)


def test_help_lists_every_key_with_meaning_and_default(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert text == help_text()
    for field in dataclasses.fields(ServerConfig):
        assert f"--{field.name} (default: " in text
    assert "where to listen" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config"], "--config needs a file"),
        (["--config", "nowhere.json"], "nowhere.json cannot be read"),
        (["--prot", "1"], "did you mean 'port'?"),
        (["--port", "x"], "'port' cannot be 'x'"),
        (["--model", "nowhere/"], "nowhere"),
        (["--host", "256.1.1.1"], "cannot listen on 256.1.1.1"),
    ],
)
def test_a_wrong_setting_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--port", "0", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_taken_port_is_refused_before_the_model_is_looked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["--port", str(taken.getsockname()[1]), "--model", "nowhere/"]) == 2
    assert "cannot listen on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize("value", [",", " , ", " "])
def test_a_key_variable_without_a_key_is_refused(
    model_folder: Path, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUPYLLM_API_KEY", value)
    assert main(["--port", "0", "--model", str(model_folder), "--kv_cache_gib", "0.01"]) == 2
    assert "CUPYLLM_API_KEY is set but holds no API key" in capsys.readouterr().err
