"""A model's weights under our names, in the arrays that the ops want.

Here are the table from our names to the checkpoint's, the shapes each tensor must have, and loading. Matrices that are
applied to the same input are stored below each other as one (q, k and v; gate and up), so that one product serves all.
How a tensor is read from its file is checkpoint.py's subject.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from cupyllm.checkpoint import Checkpoint
from cupyllm.device import host_array
from cupyllm.errors import CheckpointError
from cupyllm.model_config import ModelConfig
from cupyllm.number_formats import convert, numpy_type

Array = Any  # an array of NumPy, CuPy or the emulator, whichever `upload` returns
Upload = Callable[[np.ndarray], Array]
Shape = tuple[int, ...]
INT8_GROUP = 64  # numbers of a row in one byte each that share a scale of two bytes (ops/cpu/int8.py)
Parts = tuple["Part", ...]  # stacked in this order


@dataclass(frozen=True)
class LayerWeights:
    """One transformer layer. Norms are float32, the rest has the dtype asked for."""

    attention_norm: Array  # (C,)
    qkv: Array  # ((H + 2 * KH) * D, C): q rows, then k, then v
    qkv_bias: Array | None  # ((H + 2 * KH) * D,); Qwen2
    q_norm: Array | None  # (D,); Qwen3
    k_norm: Array | None  # (D,); Qwen3
    o: Array  # (C, H * D)
    mlp_norm: Array  # (C,)
    gate_up: Array  # (2 * I, C): gate rows, then up
    down: Array  # (C, I)


@dataclass(frozen=True)
class ModelWeights:
    """All weights of a model."""

    embedding: Array  # (V, C)
    layers: tuple[LayerWeights, ...]
    final_norm: Array  # (C,)
    lm_head: Array | None  # (V, C); the same object as embedding where the head is tied; None: it only embeds


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint: the rows that it fills in one of our arrays."""

    name: str
    shape: Shape


def model_parts(config: ModelConfig) -> dict[str, Parts]:
    """Our name -> the checkpoint's tensors, for what stands outside the layers."""
    vocabulary = (config.vocab_size, config.hidden_size)
    parts: dict[str, Parts] = {
        "embedding": (Part("model.embed_tokens.weight", vocabulary),),
        "final_norm": (Part("model.norm.weight", (config.hidden_size,)),),
    }
    if not config.tied_head:
        parts["lm_head"] = (Part("lm_head.weight", vocabulary),)
    return parts


def layer_parts(config: ModelConfig, layer: int) -> dict[str, Parts]:
    """Our name -> the checkpoint's tensors stacked in it, for one layer."""
    C, I, D = config.hidden_size, config.intermediate_size, config.head_size  # noqa: E741
    q, kv = config.num_heads * D, config.num_kv_heads * D

    def part(name: str, *shape: int) -> Part:
        return Part(f"model.layers.{layer}.{name}", shape)

    parts: dict[str, Parts] = {
        "attention_norm": (part("input_layernorm.weight", C),),
        "qkv": (
            part("self_attn.q_proj.weight", q, C),
            part("self_attn.k_proj.weight", kv, C),
            part("self_attn.v_proj.weight", kv, C),
        ),
        "o": (part("self_attn.o_proj.weight", C, q),),
        "mlp_norm": (part("post_attention_layernorm.weight", C),),
        "gate_up": (part("mlp.gate_proj.weight", I, C), part("mlp.up_proj.weight", I, C)),
        "down": (part("mlp.down_proj.weight", C, I),),
    }
    if config.qkv_bias:
        parts["qkv_bias"] = (
            part("self_attn.q_proj.bias", q),
            part("self_attn.k_proj.bias", kv),
            part("self_attn.v_proj.bias", kv),
        )
    if config.qk_norm:
        parts["q_norm"] = (part("self_attn.q_norm.weight", D),)
        parts["k_norm"] = (part("self_attn.k_norm.weight", D),)
    return parts


def load_weights(
    checkpoint: Checkpoint,
    config: ModelConfig,
    *,
    dtype: str,
    upload: Upload,
    progress: Callable[[int], object] = lambda num_bytes: None,
) -> ModelWeights:
    """Read all weights, converting to `dtype` ("float32", "float16" or "bfloat16", held as uint16); norms to float32.

    Each array goes to `upload` as soon as it is complete, so that on the host only one of them exists at a time.
    `progress` is called with the bytes just read from the checkpoint. Raises CheckpointError, before any weight is
    read, when tensors are missing, too many, or of the wrong shape or dtype.
    """
    check_tensors(checkpoint, config)
    prefix = _prefix(checkpoint)

    def load(parts: Parts, name: str) -> Array | None:
        if name == "lm_head" and _has_no_head(checkpoint):
            return None
        array = host_array(_stacked_shape(parts), _host_type(name, dtype))
        row = 0
        for part in parts:
            stored = _stored_name(part.name, prefix)
            checkpoint.read_into(stored, array[row : row + part.shape[0]])
            row += part.shape[0]
            progress(checkpoint.tensor_bytes(stored))
        return upload(array)

    return _assemble(config, load)


def random_weights(config: ModelConfig, *, dtype: str, seed: int, upload: Upload) -> ModelWeights:
    """Weights of the right shapes and a harmless size, for benchmarks of speed: norms are 1, the rest is random.

    One block of random values is repeated: drawing billions would take minutes. Its length is a prime, so that the
    rows of a matrix still differ.
    """
    block = np.random.default_rng(seed).standard_normal(1_048_573, dtype=np.float32)

    def fill(parts: Parts, name: str) -> Array:
        array = host_array(_stacked_shape(parts), _host_type(name, dtype))
        values = np.ones_like(block) if name.endswith("norm") else block / np.sqrt(np.float32(array.shape[-1]))
        pattern = np.empty(len(block), dtype=array.dtype)
        convert(values, pattern)
        flat = array.reshape(-1)
        for start in range(0, len(flat), len(pattern)):
            piece = flat[start : start + len(pattern)]
            piece[...] = pattern[: len(piece)]
        return upload(array)

    return _assemble(config, fill)


def weight_bytes(config: ModelConfig, dtype: str, *, int8: bool = False) -> int:
    """Bytes that all arrays take, in the dtype asked for; matrices in int8 if that is asked for."""
    tables = [model_parts(config), *(layer_parts(config, layer) for layer in range(config.num_layers))]
    return sum(_array_bytes(name, parts, dtype, int8) for table in tables for name, parts in table.items())


def _array_bytes(name: str, parts: Parts, dtype: str, int8: bool) -> int:
    shape = _stacked_shape(parts)
    numbers = math.prod(shape)
    if int8 and len(shape) == 2:
        return numbers + 2 * (numbers // INT8_GROUP)
    return numbers * _host_type(name, dtype).itemsize


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """The checkpoint holds the tensors that the model needs, and no others. Raises CheckpointError naming the first."""
    prefix = _prefix(checkpoint)
    needed = {_stored_name(part.name, prefix): part.shape for part in _all_parts(config)}
    if _has_no_head(checkpoint):
        needed.pop("lm_head.weight", None)
    present = set(checkpoint.names)
    for name, shape in needed.items():
        if name not in present:
            raise CheckpointError(
                f"{checkpoint.folder}: no file holds tensor {name!r}, which {config.model_type} needs"
            )
        if checkpoint.shape(name) != shape:
            found = f"has shape {checkpoint.shape(name)}, but config.json asks for {shape}"
            raise CheckpointError(f"{checkpoint.file(name)}: tensor {name!r} {found}")
        checkpoint.dtype(name)  # raises where it is not supported
    for name in checkpoint.names:
        if name not in needed and not _is_needless(name, config):
            problem = f"is not part of a {config.model_type} model as config.json describes it"
            raise CheckpointError(f"{checkpoint.file(name)}: tensor {name!r} {problem}")


def _prefix(checkpoint: Checkpoint) -> str:
    """What stands before the names of a checkpoint's tensors: nothing in Qwen3-Embedding, which was saved without its
    head.
    """
    return "" if "embed_tokens.weight" in checkpoint.names else "model."


def _stored_name(name: str, prefix: str) -> str:
    return prefix + name.removeprefix("model.") if name.startswith("model.") else name


def _has_no_head(checkpoint: Checkpoint) -> bool:
    """Whether this is a model that was saved without its head, which then can only embed."""
    return _prefix(checkpoint) == "" and "lm_head.weight" not in checkpoint.names


def _is_needless(name: str, config: ModelConfig) -> bool:
    """Tensors that some programs write although they follow from others: a tied head, and rope frequencies."""
    return name.endswith("rotary_emb.inv_freq") or (config.tied_head and name == "lm_head.weight")


def _all_parts(config: ModelConfig) -> Iterator[Part]:
    tables = [model_parts(config), *(layer_parts(config, layer) for layer in range(config.num_layers))]
    for table in tables:
        for parts in table.values():
            yield from parts


def _assemble(config: ModelConfig, make: Callable[[Parts, str], Array | None]) -> ModelWeights:
    """A ModelWeights whose arrays are made by `make(parts, our name)`, one after another."""
    outside = {name: make(parts, name) for name, parts in model_parts(config).items()}
    layers = []
    for layer in range(config.num_layers):
        arrays: dict[str, Array] = {"qkv_bias": None, "q_norm": None, "k_norm": None}
        arrays |= {name: make(parts, name) for name, parts in layer_parts(config, layer).items()}
        layers.append(LayerWeights(**arrays))
    lm_head = outside["embedding"] if config.tied_head else outside["lm_head"]
    return ModelWeights(outside["embedding"], tuple(layers), outside["final_norm"], lm_head)


def _stacked_shape(parts: Parts) -> Shape:
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _host_type(name: str, dtype: str) -> np.dtype[Any]:
    return numpy_type("float32" if name.endswith("norm") else dtype)
