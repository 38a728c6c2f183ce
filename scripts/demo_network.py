"""The network of the demo model: Qwen2 as Hugging Face defines it, small, for training in PyTorch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
}
HEAD_SIZE = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(CONFIG["hidden_size"]))

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * self.weight


class Attention(nn.Module):
    """Causal attention; several query heads share one key/value head. Only q, k and v have a bias."""

    def __init__(self) -> None:
        super().__init__()
        width, kv_width = CONFIG["hidden_size"], CONFIG["num_key_value_heads"] * HEAD_SIZE
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, kv_width)
        self.v_proj = nn.Linear(width, kv_width)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, T, C)
        q, k, v = (split_heads(proj(x)) for proj in (self.q_proj, self.k_proj, self.v_proj))  # (B, H or KH, T, D)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def split_heads(x: Tensor) -> Tensor:  # (B, T, H * D) -> (B, H, T, D)
    return x.unflatten(-1, (-1, HEAD_SIZE)).transpose(1, 2)


def rope_table(length: int) -> tuple[Tensor, Tensor]:
    """cos and sin of position * theta^(-2i/D), the D/2 angles written twice in a row: (T, D) each."""
    exponents = torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE
    angles = torch.outer(torch.arange(length), CONFIG["rope_theta"] ** -exponents)  # (T, D/2)
    return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # (B, H, T, D)
    """RoPE: dimension i and dimension i + D/2 are one pair (the convention of Hugging Face's Qwen2)."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self) -> None:
        super().__init__()
        width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and added to the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = RMSNorm(), Attention()
        self.post_attention_layernorm, self.mlp = RMSNorm(), MLP()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen2(nn.Module):
    """The network; attributes are named so that state_dict() has Hugging Face's tensor names."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(CONFIG["vocab_size"], CONFIG["hidden_size"])
        self.model.layers = nn.ModuleList(Layer() for _ in range(CONFIG["num_hidden_layers"]))
        self.model.norm = RMSNorm()
        for name, tensor in self.named_parameters():
            initialise(name, tensor)

    def forward(self, ids: Tensor, wanted: Tensor) -> Tensor:
        """Logits (N, V) of the N positions where `wanted` (B, T) is true."""
        x = self.model.embed_tokens(ids)  # (B, T, C)
        cos, sin = rope_table(ids.shape[1])
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return functional.linear(self.model.norm(x)[wanted], self.model.embed_tokens.weight)  # the head is tied


def initialise(name: str, tensor: Tensor) -> None:
    """Small random matrices, zero biases; what is added to the residual stream starts smaller (GPT-2's recipe)."""
    if name.endswith("bias"):
        nn.init.zeros_(tensor)
    elif tensor.dim() == 2:
        ends_in_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        scale = math.sqrt(2 * CONFIG["num_hidden_layers"]) if ends_in_residual else 1.0
        nn.init.normal_(tensor, std=CONFIG["initializer_range"] / scale)
