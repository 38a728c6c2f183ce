"""Qwen2, Qwen2.5 and Qwen3 (dense) as one forward pass over an ops object. What differs is in the config:

- Qwen2 and 2.5 have biases on q, k and v; Qwen3 has none, and norms every head of q and k instead;
- small models tie the output head to the embedding.

A layer is six ops, and so six kernels in a decode step on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

from cupyllm.batch import Batch
from cupyllm.device import Array, Device
from cupyllm.kv_cache import KVCache
from cupyllm.model_config import ModelConfig
from cupyllm.ops.reference import Norm, ReferenceOps
from cupyllm.rope import cos_sin_table
from cupyllm.weights import LayerWeights, ModelWeights


@dataclass(frozen=True)
class Model:
    """A checkpoint ready to run: its config, its weights on the device, and the rotations of all positions."""

    config: ModelConfig
    weights: ModelWeights
    rope_table: Array  # (positions, D) float32, cosines then sines


def make_model(config: ModelConfig, weights: ModelWeights, device: Device, *, num_positions: int) -> Model:
    """Put config, weights and the RoPE table for `num_positions` together."""
    return Model(config, weights, device.upload(cos_sin_table(config.rope, config.head_size, num_positions)))


def forward(ops: ReferenceOps, model: Model, cache: KVCache, batch: Batch) -> Array:
    """Run one step: write its keys and values into the cache, return the residual stream after all layers: (T, C)
    float32.
    """
    return all_layers(ops, model, ops.embedding(batch.token_ids, model.weights.embedding), cache, batch)


def all_layers(ops: ReferenceOps, model: Model, x: Array, cache: KVCache, batch: Batch) -> Array:
    """`forward` from the embeddings on: (T, C) -> (T, C)."""
    if ops.whole_layer is None:
        for layer in range(model.config.num_layers):
            x = decoder_layer(ops, model, layer, x, cache, batch)
        return x
    eps, windows = model.config.rms_norm_eps, model.config.sliding_windows
    for weights, keys, values, window in zip(model.weights.layers, cache.keys, cache.values, windows, strict=True):
        x = ops.whole_layer(x, weights, model.rope_table, keys, values, batch, eps=eps, window=window)
    return x


def logits(ops: ReferenceOps, model: Model, hidden: Array, rows: Array) -> Array:
    """The scores of all tokens to come after the chosen rows of what `forward` gave: (T, C), (R,) -> (R, V) float32."""
    return ops.logits(hidden, model.weights.lm_head, rows=rows, norm=final_norm(model))


def final_norm(model: Model) -> Norm:
    """The norm between the last layer and the output head."""
    return Norm(model.weights.final_norm, model.config.rms_norm_eps)


def decoder_layer(ops: ReferenceOps, model: Model, layer: int, x: Array, cache: KVCache, batch: Batch) -> Array:
    """Attention and MLP, each on a norm of the residual stream and added back to it: (T, C) -> (T, C)."""
    w, eps = model.weights.layers[layer], model.config.rms_norm_eps
    keys, values = cache.keys[layer], cache.values[layer]
    q_norm, k_norm = _head_norms(w, eps)

    qkv = ops.linear(x, w.qkv, w.qkv_bias, norm=Norm(w.attention_norm, eps))  # (T, (H + 2 * KH) * D)
    q = ops.rope_and_kv_write(qkv, model.rope_table, batch, keys, values, q_norm=q_norm, k_norm=k_norm)  # (T, H, D)
    attention = ops.paged_attention(q, keys, values, batch, window=model.config.sliding_windows[layer])  # (T, H * D)
    x = ops.linear(attention, w.o, residual=x)  # (T, C)

    hidden = ops.gate_up_silu_mul(x, w.gate_up, norm=Norm(w.mlp_norm, eps))  # (T, I)
    return ops.linear(hidden, w.down, residual=x)  # (T, C)


def _head_norms(w: LayerWeights, eps: float) -> tuple[Norm | None, Norm | None]:
    if w.q_norm is None or w.k_norm is None:
        return None, None
    return Norm(w.q_norm, eps), Norm(w.k_norm, eps)
