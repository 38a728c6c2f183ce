"""Clients that people use, run as programs of their own against a live server.

Three environment variables say where they are installed; .ci/run sets them:

    CUPYLLM_TEST_CLIENTS        the python of an environment with tests/clients/requirements.txt
    CUPYLLM_TEST_OLDEST_OPENAI  the python of an environment with openai==1.0.0 and httpx<0.28
    CUPYLLM_TEST_NODE           a folder in which `npm install openai` was run
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.api.live_server import LiveServer, run_server, write_model_folder
from tests.api.scripted import Actor, ScriptedOps

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def actor(model_folder: Path) -> Iterator[Actor]:
    """A server whose model says what a test tells it to."""
    made: list[ScriptedOps] = []
    with run_server(model_folder, prepare=lambda loaded: made.append(ScriptedOps(loaded))) as live:
        yield Actor(live, made[0])


@pytest.fixture(scope="session")
def server(actor: Actor) -> LiveServer:
    """The same server; what its model says when it has been told nothing is random, but always the same."""
    return actor.server


def installed(variable: str) -> str:
    """What an environment variable says, or a skip that names it."""
    if not os.environ.get(variable):
        pytest.skip(f"needs {variable}; tests/clients/conftest.py says what it is, .ci/run makes it")
    return os.environ[variable]


def run_client(*command: str, cwd: Path | None = None, **variables: str) -> str:
    """What a client prints. A client that ends with an error fails the test with what it said."""
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        command, cwd=cwd, env=environment | quiet | variables, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def run_script(python: str, server: LiveServer, script: str, *arguments: str) -> Any:
    """The JSON that a client's script prints last."""
    printed = run_client(python, str(SCRIPTS / script), f"{server.url}/v1", "tiny", *arguments)
    return json.loads(printed.splitlines()[-1])
