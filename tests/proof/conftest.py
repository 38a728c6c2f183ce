"""The models of the proof runs."""

from __future__ import annotations

import pytest

from cupyllm.model import Model
from tests.engine_case import load_model
from tests.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture(scope="session", params=["qwen2", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A tiny random model; every test runs on either family, unless it chooses one."""
    folder = tmp_path_factory.mktemp("proof") / request.param
    return load_model(write_tiny_checkpoint(folder, model_type=request.param, hidden_size=32))
