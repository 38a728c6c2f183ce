"""How long a step takes, from first principles: the roofline of a GPU (Williams et al., 2009) plus a fixed overhead.

    seconds = max(bytes / bandwidth, operations / peak) + overhead

    bytes       every weight matrix once, whatever the batch; the output head only when a row is sampled; the keys and
                values of every token that a chunk looks at, read once a chunk; those of its own tokens, written
    operations  2 per weight and token in the layers, 2 * V * C per sampled row in the head, and in attention
                4 * H * D per layer and pair of a token and a token it sees

This is what the hardware must move and compute at least. Activations, the embedding's rows and the norms' arithmetic
are left out (under 1 %), and so is that memory and arithmetic never overlap perfectly. Real engines are slower.
"""

from __future__ import annotations

import difflib
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cupyllm.errors import ConfigError
from cupyllm.kv_cache import DTYPE_BYTES, bytes_per_page
from cupyllm.model_config import ModelConfig
from cupyllm.plan import PlannedChunk
from cupyllm.weights import layer_parts, model_parts

DEFAULT_OVERHEAD_S = 200e-6  # of a step: about 170 kernels in a replayed graph, 1 us apart, and 30 us of planning
USABLE_MEMORY = 0.95  # of a GPU's memory; the rest is for the driver, the context and activations


@dataclass(frozen=True)
class Gpu:
    """A GPU's datasheet, and the share of it that programs have been seen to reach."""

    bandwidth_gbs: float  # GB/s (10**9)
    bandwidth_share: float
    tflops: float  # fp16 or bf16 in, fp32 accumulation, dense
    tflops_share: float
    memory_gib: float


# Shares: RTX 4090 955 GB/s (calm), A100 1700 GB/s (gpt-fast), H200 4300 GB/s of device copies and 780 TFLOP/s of
# matrix products (measured). The others are assumed: the H100 like the H200, 0.9 of bandwidth, 0.7 of a tensor peak.
GPUS = (
    ("rtx3060", Gpu(360, 0.90, 25.5, 0.70, 12)),
    ("rtx4090", Gpu(1008, 0.947, 165.2, 0.70, 24)),
    ("a100", Gpu(2039, 0.834, 312, 0.70, 80)),
    ("h100", Gpu(3350, 0.896, 989, 0.79, 80)),
    ("h200", Gpu(4800, 0.896, 989, 0.79, 140)),
)


@dataclass(frozen=True)
class Machine:
    """The rates that a step is costed with, already reduced to what is attainable."""

    name: str
    bandwidth: float  # bytes/s
    flops: float  # operations/s
    overhead_s: float  # seconds that every step takes besides
    memory_bytes: float = math.inf  # usable for weights and cache

    @classmethod
    def of_gpu(cls, name: str) -> Machine:
        """A GPU by its name. Raises ConfigError naming the nearest known one."""
        gpu = dict(GPUS).get(name)
        if gpu is None:
            raise ConfigError(f"there is no GPU {name!r} in the table; {nearest(name, [known for known, _ in GPUS])}")
        return cls(
            name,
            gpu.bandwidth_gbs * 1e9 * gpu.bandwidth_share,
            gpu.tflops * 1e12 * gpu.tflops_share,
            DEFAULT_OVERHEAD_S,
            gpu.memory_gib * 2**30 * USABLE_MEMORY,
        )


@dataclass(frozen=True)
class StepCost:
    """What a step moves and computes, and the time of each on a machine."""

    num_bytes: int
    operations: int
    memory_s: float
    compute_s: float
    overhead_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s) + self.overhead_s

    @property
    def bound(self) -> str:
        """Which of the two the step waits for: "memory" or "compute"."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


class CostModel:
    """The cost of steps of one model on one machine. Raises ConfigError for float32 weights."""

    def __init__(self, config: ModelConfig, machine: Machine) -> None:
        if config.dtype == "float32":
            raise ConfigError(
                "the model's dtype is float32; the cost model knows the rates of float16 and bfloat16 only"
            )
        self.config = config
        self.machine = machine
        self.width = DTYPE_BYTES[config.dtype]
        self.layer_params = config.num_layers * sum(
            math.prod(part.shape) for parts in layer_parts(config, 0).values() for part in parts
        )
        self.head_params = config.vocab_size * config.hidden_size
        self.kv_bytes_per_token = bytes_per_page(config, 1, config.dtype)  # over all layers
        self._layers_of_window = Counter(config.sliding_windows)

    @property
    def step_weight_bytes(self) -> int:
        """Bytes of weights that a step with a sampled row reads; a tied head is the embedding, read as the head."""
        return (self.layer_params + self.config.hidden_size + self.head_params) * self.width

    @property
    def held_weight_bytes(self) -> int:
        """Bytes of all weights in memory: an embedding that is no head is held, and hardly read."""
        outside = (math.prod(part.shape) for parts in model_parts(self.config).values() for part in parts)
        return (self.layer_params + sum(outside)) * self.width

    def step(self, chunks: Iterable[PlannedChunk]) -> StepCost:
        """The cost of running `chunks` as one step."""
        num_tokens = num_sampled = kv_bytes = pair_layers = 0
        for chunk in chunks:
            num_tokens += chunk.length
            num_sampled += chunk.reaches_end
            kv_bytes += self._kv_bytes(chunk)
            pair_layers += self._attended_pairs(chunk)
        num_bytes = self.step_weight_bytes + kv_bytes
        if num_sampled == 0:
            num_bytes -= self.head_params * self.width
        operations = 2 * (self.layer_params * num_tokens + self.head_params * num_sampled)
        operations += 4 * self.config.num_heads * self.config.head_size * pair_layers
        machine = self.machine
        return StepCost(
            num_bytes, operations, num_bytes / machine.bandwidth, operations / machine.flops, machine.overhead_s
        )

    def _kv_bytes(self, chunk: PlannedChunk) -> int:
        end = chunk.start + chunk.length
        token_layers = chunk.length * self.config.num_layers  # written
        for window, num_layers in self._layers_of_window.items():
            token_layers += num_layers * (end if window is None else min(end, chunk.length + window - 1))
        return token_layers * self.kv_bytes_per_token // self.config.num_layers

    def _attended_pairs(self, chunk: PlannedChunk) -> int:
        """Pairs of a token of the chunk and a token that it sees, itself counted, summed over the layers."""
        end = chunk.start + chunk.length
        return sum(
            num_layers * (pairs_up_to(end, window) - pairs_up_to(chunk.start, window))
            for window, num_layers in self._layers_of_window.items()
        )


def pairs_up_to(num_tokens: int, window: int | None) -> int:
    """How many (token, token it sees) pairs the first `num_tokens` make when each sees itself and those before it.

    >>> pairs_up_to(4, None), pairs_up_to(4, 2)
    (10, 7)
    """
    full = num_tokens if window is None else min(num_tokens, window)
    return full * (full + 1) // 2 + (num_tokens - full) * full


def nearest(name: str, known: list[str]) -> str:
    """The end of a message about an unknown name: the nearest known one, and all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    return f"did you mean {near!r}? Known: {', '.join(known)}"
