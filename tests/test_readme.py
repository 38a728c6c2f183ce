"""README.md: its commands and its Python run as they stand, but for what needs a network, much time, or an end."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cupyllm.cli import main, subcommands
from cupyllm.config import ServerConfig, load_config
from tests.api.live_server import LiveServer, run_server

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SERVER = "http://127.0.0.1:8000"
ON_REFERENCE = ["--device", "reference", "--kv_cache_gib", "0.05"]
# Behind a command of the README: what makes it quick.
SMALL = {
    "bench": ["--concurrency", "2", "--requests", "3", "--output-tokens", "4", "--warm-up", "0"],
    "chat": ON_REFERENCE,
    "generate": [*ON_REFERENCE, "--max_tokens", "8"],
}
# The beginning of a command that does not run here -> why not, and what runs it.
SKIPPED = {
    "python -m venv": "installs from the network; .ci/run runs the test command so",
    "python server.py": "serves until it is stopped, some with a model from the network; tests/e2e starts server.py",
    "python -m cupyllm serve": "serves until it is stopped; what it reads of its command line is in tests/api",
    "python benchmarks/ladder/ladder.py": "slow, and writes LADDER.md; tests/ladder runs its parts",
}


def blocks(language: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return [text for of, text in found if of == language]


COMMANDS = [line.partition("  #")[0].partition(" # ")[0].strip() for block in blocks("") for line in block.splitlines()]


@pytest.fixture(scope="module")
def served() -> Iterator[LiveServer]:
    with run_server(Path("demo"), served_model_name="demo", device="reference", kv_cache_gib=0.05) as live:
        yield live


def test_the_two_commands_for_a_fresh_machine_are_there() -> None:
    fresh = "python -m venv .venv && .venv/bin/pip install -e "
    assert f"{fresh}. && .venv/bin/python server.py --config configs/default.json" in COMMANDS
    assert f"{fresh}'.[test]' && .venv/bin/python -m pytest" in COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(
    command: str,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for beginning, reason in SKIPPED.items():
        if command.startswith(beginning):
            pytest.skip(reason)
    if "kernels run" in command and shutil.which("g++") is None:
        pytest.skip("needs g++: apt-get install g++")
    if SERVER in command:
        command = command.replace(SERVER, request.getfixturevalue("served").url)
    python, dash_m, cupyllm, *arguments = shlex.split(command)
    assert (python, dash_m, cupyllm) == ("python", "-m", "cupyllm")
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n/quit\n" if arguments == ["chat"] else ""))
    assert main([*arguments, *SMALL.get(arguments[0], [])]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("path", sorted(set(re.findall(r"configs/[\w.-]+\.json", README))))
def test_a_config_that_is_named_can_be_read(path: str) -> None:
    assert load_config(ServerConfig, ROOT / path).model


@pytest.mark.parametrize("name", [module.__name__.rpartition(".")[2].replace("_", "-") for module in subcommands()])
def test_every_subcommand_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code = main([name, "--help"])
    except SystemExit as end:  # argparse's way
        code = int(end.code or 0)
    assert code == 0
    assert capsys.readouterr().out.startswith("usage: python ")


def test_an_openai_client_gets_an_answer(served: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks("python") if "openai" in block)
    names: dict[str, object] = {}
    exec(compile(block.replace(SERVER, served.url), "README.md", "exec"), names)
    names["client"].close()  # type: ignore[attr-defined]
    assert "page" in capsys.readouterr().out


def test_the_program_without_a_server_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = (block for block in blocks("python") if "openai" not in block)
    names: dict[str, object] = {}
    exec(compile(block, "README.md", "exec"), names)
    assert "page table" in capsys.readouterr().out
    assert len(names["outputs"][0].outputs) == 2  # type: ignore[index]
    assert names["vectors"].shape == (2, 256)  # type: ignore[attr-defined]
