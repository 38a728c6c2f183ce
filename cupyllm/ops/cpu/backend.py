"""Making `CpuOps` from the config, and compiling its kernels before the first request needs them."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd
from typing import Any

import numpy as np

from cupyllm.batch import Batch
from cupyllm.device import HostDevice
from cupyllm.errors import DeviceError
from cupyllm.model_config import ModelConfig
from cupyllm.ops.cpu.dot_tile import GROUP
from cupyllm.ops.cpu.isa import choose, usable_processors
from cupyllm.ops.cpu.ops import CpuOps
from cupyllm.ops.reference import Norm
from cupyllm.sampling_batch import SamplingBatch
from cupyllm.weights import LayerWeights


def check_model(config: ModelConfig, page_size: int) -> None:
    """Raise DeviceError naming the sizes of a model for which there is no kernel."""
    widths = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads * head_dim": config.num_heads * config.head_size,
        "head_dim": config.head_size,
    }
    wrong = [f"{name} {width}" for name, width in widths.items() if width % 8]
    if wrong:
        problem = f"the CPU kernels need multiples of 8, and this model has {', '.join(wrong)}"
        raise DeviceError(f'{problem}; use device "reference"')


def make_ops(cpu_isa: str, threads: int | str) -> CpuOps:
    """The ops for the config keys `cpu_isa` and `threads`. Raises DeviceError for what the machine does not have."""
    cores, most = usable_processors()
    threads = cores if threads == "auto" else threads
    assert isinstance(threads, int)
    if threads > most:
        raise DeviceError(f"threads {threads}: this process may use {most} processors; set threads to {most} or less")
    return CpuOps(choose(cpu_isa), threads)


def make_int8(ops: CpuOps, config: ModelConfig) -> Callable[[np.ndarray], Any]:
    """The function that quantises what is a matrix of the host arrays it is given, for `weights: "int8"`.

    Raises DeviceError for a model whose rows cannot be cut into groups.
    """
    widths = {"hidden_size": config.hidden_size, "intermediate_size": config.intermediate_size}
    widths["num_attention_heads * head_dim"] = config.num_heads * config.head_size
    wrong = [f"{name} {width}" for name, width in widths.items() if width % GROUP]
    if wrong:
        raise DeviceError(f'weights "int8" needs multiples of {GROUP}, and this model has {", ".join(wrong)}')
    return lambda host: ops.quantise(host) if host.ndim == 2 else host


def warm_ups(
    ops: CpuOps, config: ModelConfig, dtype: str, cache_dtype: str, upload: Callable[[np.ndarray], Any]
) -> list[tuple[str, Callable[[], object]]]:
    """What to run once so that every kernel of this model is compiled, or read from disk: (op, call) pairs.

    The widths are such that the kernels are those of the model, but small, so the time is that of compiling. `upload`
    is what the weights go through.
    """
    device, C, D = HostDevice(), config.hidden_size, config.head_size
    norm = Norm(np.ones(C, np.float32), 1e-6)
    one = np.zeros(1, np.int32)

    def activations(width: int) -> np.ndarray:
        return np.zeros((1, width), np.float32)

    def weights(rows: int, width: int) -> Any:
        return upload(device.zeros((rows, width), dtype))

    def layer() -> None:
        C, I = gcd(config.hidden_size, 64), gcd(config.intermediate_size, 64)  # noqa: E741
        heads, kv_heads = config.num_heads, config.num_kv_heads
        head_norm = np.ones(D, np.float32) if config.qk_norm else None
        w = LayerWeights(
            attention_norm=np.ones(C, np.float32), qkv=weights((heads + 2 * kv_heads) * D, C),
            qkv_bias=device.zeros(((heads + 2 * kv_heads) * D,), dtype) if config.qkv_bias else None,
            q_norm=head_norm, k_norm=head_norm, o=weights(C, heads * D),
            mlp_norm=np.ones(C, np.float32), gate_up=weights(2 * I, C), down=weights(C, I),
        )  # fmt: skip
        batch = Batch(one, one, one, np.array([0, 1], np.int32), one + np.int32(1), one[None], one, 1, 1, 1)
        cache = device.zeros((1, 1, kv_heads, D), cache_dtype)
        ops.whole_layer(activations(C), w, activations(D), cache, cache.copy(), batch, eps=1e-6, window=None)

    def sample() -> None:
        nothing, ones = np.empty(0, np.int32), np.ones(1, np.float32)
        masks = np.ones((1, 1), np.uint32)
        batch = SamplingBatch(
            temperature=ones, top_k=one, top_p=ones, min_p=ones, repetition_penalty=ones,
            penalty_starts=np.zeros(2, np.int32), penalty_ids=nothing,
            offset_starts=np.zeros(2, np.int32), offset_ids=nothing, offsets=ones[:0], mask_rows=one, masks=masks,
            seeds=np.zeros(1, np.uint64), positions=one, num_logprobs=1, vocab_limit=8,
        )  # fmt: skip
        ops.sample(activations(8), batch)

    return [
        ("decoder layer", layer),
        ("logits", lambda: ops.logits(activations(C), weights(8, C), rows=one, norm=norm)),
        ("embedding", lambda: [ops.embedding(one, weights(1, C)), ops.embedding(one, activations(C))]),
        ("rms_norm", lambda: ops.rms_norm(activations(C), norm)),
        ("sample", sample),
    ]
