"""Small engines for tests: a random checkpoint, few pages, greedy unless asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cupyllm.checkpoint import Checkpoint
from cupyllm.config import EngineConfig
from cupyllm.device import HostDevice
from cupyllm.engine import Engine
from cupyllm.kv_cache import allocate_kv_cache
from cupyllm.model import Model, make_model
from cupyllm.model_config import GenerationDefaults, read_model_config
from cupyllm.ops.reference import ReferenceOps
from cupyllm.step_result import TokenEvent
from cupyllm.weights import load_weights


def load_model(folder: Path, *, num_positions: int = 1024, dtype: str = "float32") -> Model:
    config = read_model_config(folder)
    weights = load_weights(Checkpoint.open(folder), config, dtype=dtype, upload=HostDevice().upload)
    return make_model(config, weights, HostDevice(), num_positions=num_positions)


def make_engine(
    model: Model,
    *,
    num_pages: int = 1000,
    page_size: int = 4,
    ops: ReferenceOps | None = None,
    max_model_len: int | None = None,
    vocab_limit: int | None = None,
    defaults: GenerationDefaults | None = None,
    **config: Any,
) -> Engine:
    positions = min(model.config.max_position_embeddings, num_pages * page_size)
    return Engine(
        EngineConfig(page_size=page_size, **config),
        model,
        allocate_kv_cache(HostDevice(), model.config, num_pages=num_pages, page_size=page_size, dtype="float32"),
        ops or ReferenceOps(),
        HostDevice(),
        max_model_len=max_model_len or positions,
        vocab_limit=vocab_limit or model.config.vocab_size,
        defaults=defaults or GenerationDefaults(temperature=0.0),
    )


def run_to_end(engine: Engine, most_steps: int = 10_000) -> list[TokenEvent]:
    """Step until nothing is left, checking the books after every step."""
    events = []
    for _ in range(most_steps):
        if not engine.has_work:
            assert engine.stats.num_live_pages == 0
            return events
        events += engine.step()
        engine.scheduler.check_integrity()
    raise AssertionError(f"still working after {most_steps} steps")
