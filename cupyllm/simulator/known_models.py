"""The models that can be simulated by name, without their files; any other by its folder with config.json.

The sizes are those of the config.json that Qwen published with each model.
"""

from __future__ import annotations

from pathlib import Path

from cupyllm.errors import ConfigError
from cupyllm.model_config import ModelConfig, read_model_config
from cupyllm.rope import RopeConfig
from cupyllm.simulator.cost_model import nearest

# name: type, vocabulary V, hidden C, intermediate I, layers, heads H, KV heads KH, head size D, positions, tied head
_SIZES = (
    ("qwen2.5-0.5b", ("qwen2", 151936, 896, 4864, 24, 14, 2, 64, 32768, True)),
    ("qwen2.5-1.5b", ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, 32768, True)),
    ("qwen2.5-7b", ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, 32768, False)),
    ("qwen3-0.6b", ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, 40960, True)),
    ("qwen3-8b", ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, 40960, False)),
)


def known_model_names() -> list[str]:
    """The names that `find_model` knows, smallest first within a family."""
    return [name for name, _ in _SIZES]


def find_model(name: str) -> ModelConfig:
    """The sizes of a model by its name or its folder. Raises ConfigError or CheckpointError."""
    sizes = dict(_SIZES).get(name.lower())
    if sizes is not None:
        return _make_config(*sizes)
    if Path(name).is_dir():
        return read_model_config(Path(name))
    raise ConfigError(f"{name!r} is neither a folder nor a known model; {nearest(name, known_model_names())}")


def _make_config(
    model_type: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_size: int,
    max_position_embeddings: int,
    tied_head: bool,
) -> ModelConfig:
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=1e6),
        tied_head=tied_head,
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        dtype="bfloat16",
        sliding_windows=(None,) * num_layers,
        end_token_ids=(151645,),
    )
