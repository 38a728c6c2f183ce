"""Tokens per second of the engine's own steps, for random weights in the shapes of a real model.

A step is timed on the host, as a user sees it: planning, launches, and waiting for the tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cupyllm.config import EngineConfig
from cupyllm.engine import Engine
from cupyllm.figures import Row
from cupyllm.gpu_check.gpu import Gpu
from cupyllm.gpu_check.limits import Limits
from cupyllm.kv_cache import allocate_kv_cache, bytes_per_page
from cupyllm.model import make_model
from cupyllm.model_config import GenerationDefaults, ModelConfig
from cupyllm.ops.cuda import CudaOps
from cupyllm.plan import PlannedChunk
from cupyllm.sampling import SamplingParams
from cupyllm.simulator.cost_model import CostModel, Machine
from cupyllm.weights import random_weights, weight_bytes

PAGE_SIZE = 16
MAX_STEP_TOKENS = 2048
# For activations of MAX_STEP_TOKENS rows, logits, and what CuPy and the driver take.
SPARE_BYTES = 2 * 2**30
SPARE_STEPS = 64


def decode_context(prompt_tokens: int, steps: int, runs: int) -> int:
    """Slots for a sequence: its prompt, the steps that are timed, and those before, while others' prompts run."""
    return prompt_tokens + steps * runs + SPARE_STEPS


def needed_bytes(config: ModelConfig, batch_size: int, context: int) -> int:
    """Memory for the weights, the cache of so many sequences, and the rest."""
    pages = batch_size * -(-context // PAGE_SIZE)
    return weight_bytes(config, config.dtype) + pages * bytes_per_page(config, PAGE_SIZE, config.dtype) + SPARE_BYTES


def decode_engine(gpu: Gpu, config: ModelConfig, *, batch_size: int, context: int) -> Engine:
    """An engine with random weights and a cache for `batch_size` sequences of `context` tokens."""
    weights = random_weights(config, dtype=config.dtype, seed=0, upload=gpu.device.upload)
    num_pages = batch_size * -(-context // PAGE_SIZE)
    cache = allocate_kv_cache(gpu.device, config, num_pages=num_pages, page_size=PAGE_SIZE, dtype=config.dtype)
    return Engine(
        EngineConfig(
            max_decode_batch_size=batch_size,
            max_prefill_batch_size=batch_size,
            max_step_tokens=max(MAX_STEP_TOKENS, batch_size),
            prefix_cache=False,
        ),
        make_model(config, weights, gpu.device, num_positions=context),
        cache,
        CudaOps(gpu.loader, gpu.device),
        gpu.device,
        max_model_len=context,
        vocab_limit=config.vocab_size,
        defaults=GenerationDefaults(temperature=0.0),
        capture=gpu.loader.capture,
    )


def decode_rows(
    engine: Engine,
    name: str,
    limits: Limits,
    *,
    batch_sizes: Sequence[int],
    prompt_tokens: int,
    steps: int,
    runs: int,
    clock: Callable[[], float],
) -> Iterator[Row]:
    """Tokens/s of decoding with each batch size, beside what the measured limits would allow for the same steps."""
    cost = CostModel(
        engine.runner.model.config, Machine("measured", limits.bandwidth, limits.flops or float("inf"), 0.0)
    )
    for batch_size in batch_sizes:
        _start(engine, batch_size, prompt_tokens)
        rates, floors = [], []
        for _ in range(runs):
            first = _floor_of_next_step(engine, cost)
            start = clock()
            for _ in range(steps):
                engine.step()
            rates.append(batch_size * steps / (clock() - start))
            # A context grows by one token a step, and with it the floor by the same time.
            growth = _floor_of_next_step(engine, cost) - first
            floors.append(batch_size / (first + growth * (steps - 1) / (2 * steps)))
        assert len(engine.scheduler.decoding) == batch_size, "some sequence ended early"
        engine.abort_all()
        yield Row(f"decode.{name}.batch{batch_size}", "tokens/s", rates, "limit of measured rates", floors)


def _floor_of_next_step(engine: Engine, cost: CostModel) -> float:
    """Seconds that the limits allow for the step that decodes what runs now."""
    rows = engine.scheduler.decoding
    return cost.step(PlannedChunk(sequence, sequence.num_tokens - 1, 1) for sequence in rows).seconds


def _start(engine: Engine, batch_size: int, prompt_tokens: int) -> None:
    """Bring the prompts so far that every step from here decodes all of them."""
    params = SamplingParams(temperature=0.0, max_tokens=engine.max_model_len - prompt_tokens, ignore_eos=True)
    rng = np.random.default_rng(batch_size)
    vocab_size = engine.runner.model.config.vocab_size
    for _ in range(batch_size):
        engine.add(rng.integers(0, vocab_size, prompt_tokens).tolist(), params)
    while len(engine.scheduler.decoding) < batch_size:
        engine.step()
