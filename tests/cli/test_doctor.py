"""`python -m cupyllm doctor`, and that every subcommand explains itself."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from typing import Any

import httpx
import pytest

from cupyllm.cli import main, subcommands
from cupyllm.cli.doctor import examine
from tests.cli.terminal_process import COMMAND, ROOT, environment, run


def test_the_report_names_what_decides_and_what_auto_chose() -> None:
    result = run("doctor")
    assert (result.returncode, result.stderr) == (0, "")
    found = dict(re.findall(r"^(\S.{18} )(\S.*)$", result.stdout, re.MULTILINE))
    found = {name.strip(): value for name, value in found.items()}
    assert found["Python"].startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert re.fullmatch(r"\d+\.\d GiB can be had", found["memory"])
    code = "from cupyllm.ops.select import make_backend as m; b = m('auto'); print(f'{b.ops.name}: {b.reason}')"
    auto = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found["device auto"] == auto.stdout.strip()
    assert {"processor", "NumPy", "numba", "huggingface_hub", "llguidance", "emulated device", "dtypes"} <= set(found)


def test_the_report_tells_what_the_cpu_engine_would_run_with() -> None:
    pytest.importorskip("numba")
    from cupyllm.ops.cpu.isa import available
    from cupyllm.ops.select import make_backend

    found = {finding.name: finding.value for finding in examine()}
    ops: Any = make_backend("cpu").ops
    assert found["instruction set"].startswith(f"{ops.isa.name}, which cpu_isa auto chose")
    assert found["threads"].startswith(f"{ops.threads}, which threads auto chose")
    named = set(re.findall(r"\w+", found["instruction set"]))
    assert {isa.name for isa in available()} <= named


def test_what_is_not_installed_comes_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec

    def without_llguidance(name: str, *arguments: Any) -> Any:
        return None if name == "llguidance" else real(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", without_llguidance)
    assert main(["doctor"]) == 0
    todo = capsys.readouterr().out.split("\nto do:\n")[1]
    assert "pip install 'cupyllm[structured]'" in todo


def test_every_line_has_a_name_and_a_value() -> None:
    findings = list(examine())
    assert all(finding.name and finding.value for finding in findings)
    assert len({finding.name for finding in findings if finding.name != "missing"}) == len(
        [finding for finding in findings if finding.name != "missing"]
    )


NAMES = [module.__name__.rpartition(".")[2].replace("_", "-") for module in subcommands()]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "serve"])
def test_every_subcommand_has_help_with_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    assert re.search(rf"^examples:\n  .*python -m cupyllm {name}", capsys.readouterr().out, re.MULTILINE)


def test_the_help_names_every_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\s+\S", text, re.MULTILINE) for name in NAMES)


def test_nothing_to_run_shows_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "examples:\n  python -m cupyllm chat" in shown.err


def test_serve_is_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help"]) == 0
    assert "--drain_seconds (default: 30.0)" in capsys.readouterr().out
    assert main(["serve", "--prot", "1"]) == 2
    assert "did you mean 'port'?" in capsys.readouterr().err
    command = [*COMMAND, "serve", "--port", "0", "--device", "reference", "--kv_cache_gib", "0.05"]
    with subprocess.Popen(
        [*command, "--api_key_env", "NOT_SET_IN_TESTS"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
        env=environment(),
    ) as process:
        try:
            assert process.stdout is not None
            url = next(line.split()[1] for line in process.stdout if line.startswith("url "))
            listed = json.loads(httpx.get(f"{url}/v1/models").text)
        finally:
            process.terminate()
    assert [model["id"] for model in listed["data"]] == ["demo"]
    assert process.returncode == 0
