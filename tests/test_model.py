"""The whole forward pass against transformers on torch, and against itself in other chunks and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm.batch import BatchBuilder
from cupyllm.device import HostDevice
from cupyllm.kv_cache import allocate_kv_cache
from cupyllm.model import Model, forward, logits
from cupyllm.ops.reference import ReferenceOps
from cupyllm.plan import Plan, PlannedChunk
from cupyllm.sampling import SamplingParams
from cupyllm.sequence import Sequence
from tests.engine_case import load_model
from tests.tiny_checkpoint import write_tiny_checkpoint

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen2 untied": {"tied": False},
    "qwen2 fp16": {"dtype": "float16"},
    "qwen2 bf16 in 3 shards": {"dtype": "bfloat16", "shards": 3},
    "qwen2 yarn": {"rope_scaling": YARN, "max_position_embeddings": 128},
    "qwen2 sliding window": {
        "use_sliding_window": True,
        "sliding_window": 7,
        "max_window_layers": 1,
        "num_layers": 3,
    },
    "qwen3": {"model_type": "qwen3"},
    "qwen3 head size 48": {"model_type": "qwen3", "head_size": 48, "num_heads": 6, "num_kv_heads": 2},
    "qwen3 untied bf16": {"model_type": "qwen3", "tied": False, "dtype": "bfloat16"},
}
PAGE_SIZE = 4


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 500, length).tolist()


def logits_in_chunks(model: Model, prompts: list[list[int]], chunk_lengths: list[int]) -> list[np.ndarray]:
    """The logits after every prompt, all prompts in one batch, run chunk after chunk over shuffled pages."""
    pages_each = -(-max(map(len, prompts)) // PAGE_SIZE)
    cache = allocate_kv_cache(
        HostDevice(), model.config, num_pages=pages_each * len(prompts), page_size=PAGE_SIZE, dtype="float32"
    )
    for array in (*cache.keys, *cache.values):
        array.fill(np.nan)
    shuffled = np.random.default_rng(1).permutation(cache.num_pages).reshape(len(prompts), -1).tolist()
    sequences = [
        Sequence(s, ids, len(ids), SamplingParams(), 0, 1, frozenset(), page_table=shuffled[s])
        for s, ids in enumerate(prompts)
    ]
    results: list[np.ndarray] = [np.empty(0)] * len(prompts)
    for length in chunk_lengths:
        chunks = [
            PlannedChunk(sequence, sequence.num_computed, min(length, sequence.num_uncomputed))
            for sequence in sequences
            if sequence.num_uncomputed
        ]
        if not chunks:
            break
        batch = BatchBuilder(PAGE_SIZE).build(Plan([], chunks, []))
        scores = logits(ReferenceOps(), model, forward(ReferenceOps(), model, cache, batch), batch.logit_rows)
        ended = [chunk.sequence.id for chunk in chunks if chunk.reaches_end]
        for sequence_id, row in zip(ended, scores, strict=True):
            results[sequence_id] = row
        for chunk in chunks:
            chunk.sequence.num_computed += chunk.length
    assert all(len(row) for row in results)
    return results


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="install torch and transformers to compare with them")
    transformers = pytest.importorskip("transformers", reason="install torch and transformers to compare with them")
    folder = write_tiny_checkpoint(tmp_path / "model", **CHECKPOINTS[name])
    ids = prompt(61)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0].numpy()
    model = load_model(folder, num_positions=128)
    for length in (1, 2, 33, 61):
        (row,) = logits_in_chunks(model, [ids[:length]], [61])
        np.testing.assert_allclose(row, expected[length - 1], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "qwen2 sliding window"])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 16])
def test_chunks_do_not_change_the_logits(name: str, chunk: int, tmp_path: Path) -> None:
    model = load_model(write_tiny_checkpoint(tmp_path / "model", **CHECKPOINTS[name]))
    ids = prompt(17)
    (whole,) = logits_in_chunks(model, [ids], [17])
    (pieces,) = logits_in_chunks(model, [ids], [chunk] * 17)
    np.testing.assert_allclose(pieces, whole, rtol=0, atol=1e-4)


def test_a_sequence_does_not_see_its_neighbours(tmp_path: Path) -> None:
    model = load_model(write_tiny_checkpoint(tmp_path / "model"))
    prompts = [prompt(length, seed=length) for length in (1, 3, 4, 5, 17, 32)]
    together = logits_in_chunks(model, prompts, [6] * 6)
    for ids, row in zip(prompts, together, strict=True):
        (alone,) = logits_in_chunks(model, [ids], [len(ids)])
        np.testing.assert_allclose(row, alone, rtol=0, atol=1e-4)
