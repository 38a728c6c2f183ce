"""Which folder a model's name means; the hub is a cache folder that the test makes, without any network."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import cupyllm.hub
from cupyllm.errors import ConfigError
from cupyllm.hub import resolve_model

NEEDS_HUB = "needs huggingface_hub (pip install 'cupyllm[hub]')"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty hub cache; the hub itself is out of reach."""
    constants = pytest.importorskip("huggingface_hub.constants", reason=NEEDS_HUB)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def add_to_cache(hub_cache: Path, owner: str, name: str) -> Path:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = hub_cache / f"models--{owner}--{name}"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    return snapshot


def test_an_existing_folder_is_taken_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "Qwen" / "Qwen2.5-0.5B-Instruct"
    folder.mkdir(parents=True)
    assert resolve_model(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert resolve_model("Qwen/Qwen2.5-0.5B-Instruct").samefile(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/Qwen/Qwen2.5-0.5B-Instruct") == folder


def test_demo_means_the_bundled_model_whatever_the_working_directory_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, work = tmp_path / "cupyllm", tmp_path / "work"
    (package / "demo").mkdir(parents=True)
    (work / "demo").mkdir(parents=True)
    monkeypatch.setattr(cupyllm.hub, "__file__", str(package / "hub.py"))
    monkeypatch.chdir(work)
    assert resolve_model("demo") == package / "demo"
    assert resolve_model("./demo").samefile(work / "demo")


def test_a_package_without_its_demo_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupyllm.hub, "__file__", str(tmp_path / "hub.py"))
    with pytest.raises(ConfigError, match=r"bundled model is missing at .*demo"):
        resolve_model("demo")


@pytest.mark.parametrize(
    "model",
    ["", "qwen", "/no/such/folder", "~nobody-of-that-name/x", "../x", "a/b/c", "a/../b", "a b/c", "a/b\n", "./model"],
)
def test_what_is_neither_a_folder_nor_a_hub_name_is_refused(model: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_model(model)
    assert repr(model) in str(caught.value)


def test_a_hub_name_in_the_local_cache_needs_no_network(hub_cache: Path) -> None:
    snapshot = add_to_cache(hub_cache, "acme", "tiny-1.0")
    assert resolve_model("acme/tiny-1.0").samefile(snapshot)


def test_a_hub_name_that_is_not_to_be_had_is_refused_in_one_line(hub_cache: Path) -> None:
    add_to_cache(hub_cache, "acme", "tiny-1.0")
    with pytest.raises(ConfigError) as caught:
        resolve_model("acme/other")
    assert "'acme/other'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_the_hub_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # makes the import fail
    with pytest.raises(ConfigError) as caught:
        resolve_model("acme/tiny-1.0")
    assert "'acme/tiny-1.0'" in str(caught.value)
    assert "pip install 'cupyllm[hub]'" in str(caught.value)


def test_the_hub_library_is_imported_only_for_hub_names(tmp_path: Path) -> None:
    code = (
        "import sys; from cupyllm.hub import resolve_model; "
        "resolve_model(sys.argv[1]); sys.exit('huggingface_hub' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False).returncode == 0
