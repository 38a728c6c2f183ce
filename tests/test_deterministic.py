"""`deterministic: true`: the same logits to the last bit, alone, together, in chunks, cached, and after preemption."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm import LLM, SamplingParams
from cupyllm.engine import Engine
from cupyllm.errors import ConfigError
from tests.qwen_tokenizer import write_tokenizer_folder
from tests.tiny_checkpoint import write_tiny_checkpoint

DEVICES = [
    "reference",
    pytest.param(
        "cpu",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("numba") is None, reason="needs numba: pip install 'cupyllm[cpu]'"
        ),
    ),
    pytest.param(
        "emulated",
        marks=pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++: apt-get install g++"),
    ),
]
WAYS: dict[str, dict[str, Any]] = {
    "alone": {},
    "in chunks of 5": {"max_step_tokens": 5, "max_decode_batch_size": 4},
    "in a pool too small": {"num_pages": 8, "max_step_tokens": 32},
    "nothing reused": {"prefix_cache": False},
}
Logits = dict[tuple[int, int], bytes]  # by seed and position


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the CUDA kernels support, so that one model serves all devices."""
    folder = tmp_path_factory.mktemp("deterministic") / "model"
    write_tiny_checkpoint(
        folder,
        dtype="float16",
        vocab_size=512,
        num_layers=2,
        hidden_size=128,
        intermediate_size=104,
        num_heads=2,
        num_kv_heads=1,
    )
    return write_tokenizer_folder(folder)


class Recorder:
    """Passes everything on to real ops, and keeps every row of logits that is sampled."""

    def __init__(self, engine: Engine) -> None:
        self._ops = engine.ops
        self.seen: Logits = {}
        engine.ops = self  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: Any, sampling: Any) -> Any:
        for row, seed, position in zip(logits, sampling.seeds.tolist(), sampling.positions.tolist(), strict=True):
            before = self.seen.setdefault((seed, position), row.tobytes())
            assert before == row.tobytes(), "computed twice, with other bits"
        return self._ops.sample(logits, sampling)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    common = rng.integers(0, 250, 33).tolist()
    return [common[: 11 * k] + rng.integers(0, 250, 3 + 5 * k).tolist() for k in range(4)]


def logits_of(
    folder: Path, device: str, at_once: int, *, deterministic: bool = True, num_pages: int = 60, **config: Any
) -> Logits:
    """All logits of seeded answers to all prompts, so many of them in the engine at once."""
    page_bytes = 2 * 2 * 16 * 64 * (2 if device == "emulated" else 4)
    options = {
        "kv_cache_gib": num_pages * page_bytes / 2**30,
        "max_model_len": 96,
        "generation_config": "none",
        **config,
    }
    llm = LLM(str(folder), device=device, deterministic=deterministic, **options)
    recorder = Recorder(llm.engine)
    params = [
        SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True) for seed in range(len(prompts()))
    ]
    for first in range(0, len(params), at_once):
        part = slice(first, first + at_once)
        llm.generate(prompts()[part], params[part], show_progress=False)
    if num_pages < 60:
        assert (llm.engine.stats.num_preemptions > 0) == (at_once > 1)
    return recorder.seen


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_whatever_runs_beside(folder: Path, device: str) -> None:
    alone = logits_of(folder, device, 1)
    assert len(alone) == 4 * 24
    for way, config in WAYS.items():
        for at_once in (1, 4):
            if device != "emulated" or (at_once == 4 and config and way != "nothing reused"):  # it is slow
                assert logits_of(folder, device, at_once, **config) == alone, f"{way}, {at_once} at once"


@pytest.mark.parametrize("device", DEVICES[2:])
def test_without_it_the_order_of_sums_depends_on_the_batch(folder: Path, device: str) -> None:
    """Otherwise the test above would prove nothing."""
    alone, together = (logits_of(folder, device, at_once, deterministic=False) for at_once in (1, 4))
    assert alone.keys() == together.keys()
    assert alone != together


def test_graphs_cannot_be_had_with_it(folder: Path) -> None:
    with pytest.raises(ConfigError, match="graphs true is not supported with deterministic true"):
        LLM(str(folder), device="emulated", deterministic=True, graphs=True, kv_cache_gib=0.01)
