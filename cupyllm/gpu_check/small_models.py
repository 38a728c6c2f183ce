"""Whole small models: the engine over CUDA kernels beside the engine over the reference ops, token by token, and with
captured decode steps beside the same without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cupyllm.config import EngineConfig
from cupyllm.cuda.examples.case import EPSILON, to_floats
from cupyllm.cuda.loader import KernelLoader
from cupyllm.device import Array, Capture, Device, HostDevice
from cupyllm.engine import Engine
from cupyllm.figures import Row
from cupyllm.kv_cache import allocate_kv_cache
from cupyllm.model import make_model
from cupyllm.model_config import GenerationDefaults, ModelConfig
from cupyllm.ops.cuda import CudaOps
from cupyllm.ops.reference import ReferenceOps
from cupyllm.sampling import SamplingParams
from cupyllm.simulator.known_models import find_model
from cupyllm.step_result import TokenEvent
from cupyllm.weights import random_weights

PROMPT_LENGTHS = (1, 5, 70, 16, 33)
NUM_TOKENS = 6
# Log-probabilities are logits of about 1, and every operand of two layers' products is rounded to the type.
TOLERANCE_EPSILONS = 8


def small_model(model_type: str) -> ModelConfig:
    """Two layers of a Qwen2 with heads of 64, or of a Qwen3 with heads of 128."""
    name, heads, head_size = {"qwen2": ("qwen2.5-0.5b", 4, 64), "qwen3": ("qwen3-0.6b", 4, 128)}[model_type]
    return replace(
        find_model(name),
        vocab_size=512,
        hidden_size=256,
        intermediate_size=200,
        num_layers=2,
        num_heads=heads,
        num_kv_heads=2,
        head_size=head_size,
        sliding_windows=(None, None),
        end_token_ids=(511,),
    )


def check_models(loader: KernelLoader, device: Device) -> Iterator[tuple[Row, bool]]:
    """A row for each model and type: the largest error of a log-probability, and whether all tokens agree too."""
    for model_type in ("qwen2", "qwen3"):
        for dtype in ("bfloat16", "float16"):
            config = replace(small_model(model_type), dtype=dtype)
            own = small_engine(config, CudaOps(loader, device), device, dtype)
            reference = small_engine(config, ReferenceOps(), HostDevice(), "float32")
            tolerance = TOLERANCE_EPSILONS * EPSILON[dtype]
            error, same = compare(answers(own), answers(reference), tolerance)
            row = Row(f"correct.model[{model_type} dtype={dtype}]", "of logprob", [error], limit=f"<= {tolerance:.3g}")
            yield row, error <= tolerance and same
            captured = small_engine(config, CudaOps(loader, device), device, dtype, capture=loader.capture)
            plain = small_engine(config, CudaOps(loader, device), device, dtype)
            wrong = sum(a != b for a, b in zip(token_ids(captured), token_ids(plain), strict=True))
            name = f"correct.graphs[{model_type} dtype={dtype}]"
            yield Row(name, "answers that differ", [float(wrong)], limit="<= 0"), wrong == 0


def small_engine(
    config: ModelConfig, ops: ReferenceOps, device: Device, dtype: str, *, capture: Capture | None = None
) -> Engine:
    """An engine with the random weights of the config's dtype, held as `dtype`: the reference widens them."""

    def upload(host: np.ndarray) -> Array:
        return device.upload(to_floats(host) if dtype == "float32" else host)

    weights = random_weights(config, dtype=config.dtype, seed=0, upload=upload)
    return Engine(
        EngineConfig(max_step_tokens=80, max_decode_batch_size=8),
        make_model(config, weights, device, num_positions=512),
        allocate_kv_cache(device, config, num_pages=32, page_size=16, dtype=dtype),
        ops,
        device,
        max_model_len=512,
        vocab_limit=config.vocab_size,
        defaults=GenerationDefaults(temperature=0.0),
        capture=capture,
    )


def answers(engine: Engine) -> dict[int, list[TokenEvent]]:
    """Sequence id -> its tokens with log-probabilities: greedy answers to ragged prompts, and a drawn one."""
    rng = np.random.default_rng(0)
    greedy = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
    for length in PROMPT_LENGTHS:
        engine.add(rng.integers(0, 500, length).tolist(), greedy)
    engine.add(rng.integers(0, 500, 20).tolist(), drawn)
    found: dict[int, list[TokenEvent]] = {}
    while engine.has_work:
        for event in engine.step():
            found.setdefault(event.sequence.id, []).append(event)
    return found


def token_ids(engine: Engine) -> list[list[int]]:
    """Greedy, drawn, penalised and biased answers to ragged prompts in steps that are captured; some enter a page."""
    rng = np.random.default_rng(0)
    greedy = SamplingParams(temperature=0.0, max_tokens=4 * NUM_TOKENS, ignore_eos=True)
    drawn = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=2 * NUM_TOKENS, ignore_eos=True)
    penalised = replace(drawn, repetition_penalty=1.2, frequency_penalty=0.3)
    prompts = [rng.integers(0, 500, length).tolist() for length in PROMPT_LENGTHS]
    sequences = [engine.add(prompt, params) for prompt in prompts for params in (greedy, drawn, penalised)]
    # The shortest: sampling is launched by itself until it has ended.
    sequences.append(engine.add(prompts[0], replace(drawn, logit_bias={7: 2.0}, max_tokens=NUM_TOKENS)))
    while engine.has_work:
        engine.step()
    return [sequence.output_ids for sequence in sequences]


def compare(
    own: dict[int, list[TokenEvent]], reference: dict[int, list[TokenEvent]], tolerance: float
) -> tuple[float, bool]:
    """The largest difference of a top log-probability, and whether every token is the reference's.

    Where two tokens are closer than rounding either may be chosen; from there on the texts are not compared.
    """
    worst, same = 0.0, True
    for sequence_id, theirs in reference.items():
        ours = own.get(sequence_id, [])
        same &= len(ours) == len(theirs)
        for event, expected in zip(ours, theirs, strict=False):
            if event.logprobs is None or expected.logprobs is None:
                return float("nan"), False  # a row that was not finite
            values = [value for _, value in expected.logprobs.top]
            errors = np.abs(np.subtract([value for _, value in event.logprobs.top], values))
            worst = max(worst, float(errors.max()) if np.isfinite(errors).all() else float("inf"))
            if event.token_id != expected.token_id:
                tied = expected.sequence.params.temperature or values[0] - values[1] < 2 * tolerance
                same &= bool(tied)
                break
    return worst, same
