"""`python -m cupyllm kernels`: what each action prints, and the one line and exit code 2 of what cannot be done."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from cupyllm.cli import kernel_report, main
from cupyllm.cuda import gemv, loader
from cupyllm.cuda.emulator import compiler as compiler_module
from cupyllm.cuda.nvrtc import kernel_names

needs_gpp = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++")
KERNELS = Path(loader.__file__).parent


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return capsys.readouterr().out


def refusal_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize("arguments", [["kernels"], ["kernels", "list"]])
def test_the_list_has_every_kernel_with_twin_constant_sets_and_purpose(
    capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    text = output_of(capsys, *arguments)
    assert re.findall(r"^(\w+) ", text, re.MULTILINE) == kernel_names()
    assert f"gemv   twin: linear, gate_up_silu_mul; {len(gemv.CONSTANT_SETS)} sets of constants\n" in text
    assert "silu_mul   twin: silu_mul; 1 set of constants\n" in text
    assert "    RMSNorm of every row." in text


def test_show_prints_the_source_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    own, common = ((KERNELS / file).read_text(encoding="utf-8") for file in ("gemv.cu", "common.cuh"))
    assert output_of(capsys, "kernels", "show", "gemv") == own
    assert output_of(capsys, "kernels", "show", "gemv", "--with-common") == common + own


@needs_gpp
def test_run_prints_geometry_traffic_conflicts_and_error(capsys: pytest.CaptureFixture[str]) -> None:
    text = output_of(capsys, "kernels", "run", "rms_norm")
    assert re.search(r"^grid +3 blocks$", text, re.MULTILINE)
    assert re.search(r"^block +256 threads, 8 warps$", text, re.MULTILINE)
    assert re.search(r"^shared memory +32 static \+ 0 dynamic bytes a block$", text, re.MULTILINE)
    # 3 rows of 1024 floats, read twice: 24,576 bytes in 768 sectors
    assert re.search(r"^x +12,288 +24,576 +2\.00 +768 +100%$", text, re.MULTILINE)
    assert re.search(r"^shared memory +\d+ accesses by warps, 0 bank conflicts$", text, re.MULTILINE)
    assert re.search(
        r"^against ReferenceOps\.rms_norm\ny +error \d\.\de-\d\d of .* allowed: agrees$", text, re.MULTILINE
    )


@needs_gpp
def test_run_exits_with_1_when_the_kernel_and_its_twin_differ(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    example = kernel_report.EXAMPLES["silu_mul"]

    def stricter(*arguments):
        run = example(*arguments)
        return replace(run, outputs=(replace(run.outputs[0], expected=run.outputs[0].expected * 2),))

    monkeypatch.setattr(kernel_report, "EXAMPLES", {"silu_mul": stricter})
    assert main(["kernels", "run", "silu_mul"]) == 1
    assert "DIFFERS" in capsys.readouterr().out


@pytest.mark.parametrize("action", ["show", "run"])
def test_an_unknown_kernel_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str], action: str) -> None:
    assert "no kernel 'rmsnorm'; did you mean 'rms_norm'?" in refusal_of(capsys, "kernels", action, "rmsnorm")


def test_without_a_compiler_run_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    compiler_module.compiler.cache_clear()
    try:
        assert "apt-get install g++" in refusal_of(capsys, "kernels", "run", "gemv")
    finally:
        compiler_module.compiler.cache_clear()


@pytest.mark.parametrize(
    ("arguments", "first"),
    [(["--help"], "python -m cupyllm chat"), (["kernels", "--help"], "python -m cupyllm kernels")],
)
def test_help_has_examples(capsys: pytest.CaptureFixture[str], arguments: list[str], first: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert f"examples:\n  {first}" in capsys.readouterr().out


def test_the_module_runs_and_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "cupyllm", "kernels", "show", "gemv", "--with-common"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("// ")
        process.stdout.close()
        _, complaint = process.communicate()
    assert complaint == ""
    assert process.returncode == 0


def test_a_missing_subcommand_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "SUBCOMMAND" in capsys.readouterr().err
