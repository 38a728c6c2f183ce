"""One model folder and one server for all API tests that need no settings of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.api.live_server import LiveServer, run_server, write_model_folder
from tests.api.scripted import Actor, ScriptedOps


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def server(model_folder: Path) -> Iterator[LiveServer]:
    with run_server(model_folder) as live:
        yield live


@pytest.fixture(scope="session")
def actor(model_folder: Path) -> Iterator[Actor]:
    """A server whose model says what a test tells it to."""
    made: list[ScriptedOps] = []
    with run_server(model_folder, prepare=lambda loaded: made.append(ScriptedOps(loaded))) as live:
        yield Actor(live, made[0])
