"""Config files and command lines: every key is typed, unknown ones are named with the nearest known one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cupyllm.config import EngineConfig, ServerConfig, load_config, parse_overrides
from cupyllm.errors import ConfigError


def test_the_command_line_lies_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"port": 1, "page_size": 32, "cors_origins": ["http://a"]}))
    config = load_config(ServerConfig, path, parse_overrides(ServerConfig, ["--port", "8001", "--device=cpu"]))
    assert (config.port, config.page_size, config.device, config.kv_cache_gib) == (8001, 32, "cpu", 2.0)
    assert config.cors_origins == ("http://a",)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--max-model-len", "auto"], {"max_model_len": "auto"}),
        (["--max_model_len", "99"], {"max_model_len": 99}),
        (["--served_model_name", "7"], {"served_model_name": "7"}),
        (["--served_model_name", "null"], {"served_model_name": None}),
        (["--model", "123"], {"model": "123"}),
        (["--strict_parameters", "false"], {"strict_parameters": False}),
        (["--kv_cache_gib=0.5"], {"kv_cache_gib": 0.5}),
        (["--cors_origins", '["http://a"]'], {"cors_origins": ["http://a"]}),
        (["--model=a=b"], {"model": "a=b"}),
    ],
)
def test_words_of_the_command_line_are_typed_as_the_key_is(words: list[str], expected: dict[str, Any]) -> None:
    assert parse_overrides(ServerConfig, words) == expected
    load_config(ServerConfig, overrides=expected)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"prot": 1}, r"'prot'; did you mean 'port'\?"),
        ({"zzzz": 1}, "known keys: model"),
        ({"port": "8000"}, "'port' cannot be '8000': expected a whole number"),
        ({"port": True}, "'port' cannot be True"),
        ({"port": 70000}, "from 0 to 65535"),
        ({"page_size": 0}, "'page_size' cannot be 0"),
        ({"page_size": 1.5}, "expected a whole number"),
        ({"kv_cache_gib": float("nan")}, "'kv_cache_gib'"),
        ({"kv_cache_gib": -1}, "a number above 0"),
        ({"device": "tpu"}, "one of auto, reference"),
        ({"dtype": "int3"}, "'dtype'"),
        ({"max_model_len": "long"}, 'a whole number or "auto"'),
        ({"max_model_len": 1}, "'max_model_len'"),
        ({"max_step_tokens": 8, "max_decode_batch_size": 9}, "at least max_decode_batch_size"),
        ({"strict_parameters": 1}, "true or false"),
        ({"cors_origins": "http://a"}, "a list of strings"),
        ({"cors_origins": [1]}, "a list of strings"),
        ({"model": ""}, "a folder, 'demo' or a hub name"),
        ({"seed": -1}, "'seed'"),
        ({"log_level": "loud"}, "'log_level'"),
    ],
)
def test_a_wrong_value_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(ServerConfig, overrides=values)


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "cannot be read"), ("{", "not valid JSON"), ("[]", "one JSON object"), ("{'a': 1}", "not valid JSON")],
)
def test_a_broken_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "broken.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config(ServerConfig, path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("words", [["port"], ["--port"], ["--"], ["-p", "1"]])
def test_a_broken_command_line_is_named(words: list[str]) -> None:
    with pytest.raises(ConfigError):
        parse_overrides(ServerConfig, words)


def test_the_page_on_configuration_is_what_the_script_makes_of_the_types() -> None:
    root = Path(__file__).parents[1]
    made = subprocess.run(
        [sys.executable, "scripts/config_docs.py"], cwd=root, capture_output=True, text=True, check=True
    )
    assert (root / "docs" / "configuration.md").read_text(encoding="utf-8") == made.stdout, (
        "run: python scripts/config_docs.py > docs/configuration.md"
    )


def test_server_keys_are_not_engine_keys() -> None:
    with pytest.raises(ConfigError, match="unknown config key 'port'"):
        load_config(EngineConfig, overrides={"port": 1})
