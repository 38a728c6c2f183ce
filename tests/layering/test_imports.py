"""Who may import whom: the table of the design, read from the imports in the source text."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "cupyllm"
# module -> what of cupyllm it may import ("ops" is everything below cupyllm/ops). Modules that are not named may
# import what they like, but api is only for server.py and the command `serve`, and nothing below may know it.
ALLOWED = {
    "errors": set(),
    "philox": set(),
    "page_allocator": set(),
    "config": {"errors"},
    "device": {"errors"},
    "prefix_cache": {"page_allocator"},
    "token_guide": set(),
    "sequence": {"errors", "prefix_cache", "prompt_readout", "sampling", "token_guide"},
    "plan": {"sequence"},
    "scheduler": {"page_allocator", "plan", "prefix_cache", "sequence"},
    "batch": {"plan", "sequence"},
    "sampling": {"errors", "model_config", "token_guide"},
    "sampling_batch": {"errors", "sampling", "token_guide"},
    "row_sampling": {"sampling_batch"},
    "prompt_readout": {"sampling_batch"},
    "step_result": {"beam_search", "sampling_batch", "sequence"},
    "kv_cache": {"device", "model_config"},
    "model": {"batch", "device", "kv_cache", "model_config", "ops", "rope", "weights"},
    "beam_search": {"errors", "sequence"},
    "beam_rows": {"beam_search", "sampling_batch", "scheduler", "sequence"},
    "admission": {"beam_search", "errors", "model_config", "sampling", "sequence", "token_guide"},
    "unread": {"device", "sampling_batch", "sequence"},
    "decode_rows": {"batch", "device", "ops", "plan", "row_sampling", "sampling_batch", "sequence", "unread"},
    "decode_graphs": {
        "batch", "decode_rows", "device", "kv_cache", "model", "ops", "plan", "sequence", "unread",
    },
    "model_runner": {
        "batch", "decode_graphs", "device", "errors", "kv_cache", "model", "ops", "plan", "prompt_reader",
        "sampling_batch", "sequence", "unread",
    },
    "engine_stats": {"scheduler"},
    "engine": {
        "admission", "beam_rows", "beam_search", "config", "decode_graphs", "device", "engine_stats", "errors",
        "kv_cache", "model", "model_config", "model_runner", "ops", "page_allocator", "plan", "prefix_cache",
        "prompt_readout", "sampling", "scheduler", "sequence", "step_result", "unread",
    },
    "tokenizer": {"errors", "json_object"},
}  # fmt: skip
MAY_IMPORT_CUPY = {"device", "ops.cuda", "cuda.loader"}


def modules() -> dict[str, set[str]]:
    """Every module of the package, by dotted name below cupyllm, with all that it imports."""
    found = {}
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")
        folder = ".".join(("cupyllm", *path.relative_to(PACKAGE).parts[:-1]))
        imports = set()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imports |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level <= 1, f"{path}: imports from above its folder"
                imports.add(f"{folder}.{node.module or ''}" if node.level else node.module or "")
        found[name] = imports
    return found


MODULES = modules()


def own_imports(name: str) -> set[str]:
    return {module.split(".")[1] for module in MODULES[name] if module.startswith("cupyllm.")}


@pytest.mark.parametrize("name", ALLOWED)
def test_a_module_imports_only_what_its_layer_allows(name: str) -> None:
    assert own_imports(name) <= ALLOWED[name]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.startswith("api") and name != "cli.serve"])
def test_nothing_below_the_server_knows_http(name: str) -> None:
    assert "api" not in own_imports(name)
    assert not {"starlette", "uvicorn"} & {module.split(".")[0] for module in MODULES[name]}


@pytest.mark.parametrize("name", ["scheduler", "plan", "page_allocator", "prefix_cache", "sequence"])
def test_the_control_plane_imports_no_array_library(name: str) -> None:
    assert not {"numpy", "cupy"} & {module.split(".")[0] for module in MODULES[name]}


@pytest.mark.parametrize("name", [name for name in MODULES if name not in MAY_IMPORT_CUPY])
def test_cupy_stays_in_three_files(name: str) -> None:
    assert not {"cupy", "cupyx"} & {module.split(".")[0] for module in MODULES[name]}


def test_importing_the_package_imports_neither_cupy_nor_a_server() -> None:
    code = "import sys, cupyllm; print(sorted({'cupy', 'starlette', 'uvicorn', 'torch'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize("name", MODULES)
def test_no_code_from_data(name: str) -> None:
    """No pickle, eval, exec or shell: a model folder and a request are data."""
    assert not {"pickle", "marshal", "shelve", "torch"} & {module.split(".")[0] for module in MODULES[name]}
    path = PACKAGE.joinpath(*name.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in ("eval", "exec", "compile", "__import__")
        if isinstance(node, ast.keyword) and node.arg == "shell":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False
