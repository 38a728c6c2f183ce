"""What config.json and generation_config.json of a model folder say, checked and in our own words.

Every size, switch and default of a model comes from here; weights are weights.py's subject and the tokenizer's files
tokenizer.py's. Both layouts that transformers writes are read: version 4 (`rope_theta`, `rope_scaling`, `torch_dtype`)
and version 5 (`rope_parameters`, `dtype`, `layer_types`). What would change the computation in a way that the model
code does not have is refused, never ignored.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cupyllm.json_object import JsonObject, read_json_object
from cupyllm.rope import RopeConfig, read_rope_config

CONFIG_FILE = "config.json"
GENERATION_CONFIG_FILE = "generation_config.json"

_ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_DTYPES = ("bfloat16", "float16", "float32")
_LAYER_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of one model. The letters are those of the shape comments everywhere."""

    model_type: str  # "qwen2" (also Qwen2.5) or "qwen3"
    vocab_size: int  # V
    hidden_size: int  # C
    intermediate_size: int  # I
    num_layers: int
    num_heads: int  # H
    num_kv_heads: int  # KH
    head_size: int  # D
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_head: bool  # the output head is the embedding
    qkv_bias: bool
    qk_norm: bool  # an RMS norm over each head of q and k before rope
    dtype: str  # of the checkpoint: "bfloat16", "float16" or "float32"
    sliding_windows: tuple[int | None, ...]  # per layer: a token sees itself and window - 1 before it; None: all
    end_token_ids: tuple[int, ...]  # any of them ends a text


@dataclass(frozen=True)
class GenerationDefaults:
    """Sampling settings that the model's makers advise for requests that leave a field out."""

    temperature: float = 1.0  # 0: always the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def read_model_config(folder: Path) -> ModelConfig:
    """The model in `folder`. Raises CheckpointError naming the file and key that is missing, wrong or not supported."""
    config = read_json_object(folder / CONFIG_FILE)
    model_type = _model_type(config)
    _refuse_unsupported(config, model_type)
    num_heads = config.integer("num_attention_heads")
    vocab_size = config.integer("vocab_size")
    return ModelConfig(
        model_type=model_type,
        vocab_size=vocab_size,
        hidden_size=config.integer("hidden_size"),
        intermediate_size=config.integer("intermediate_size"),
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_size=_head_size(config, model_type, num_heads),
        max_position_embeddings=config.integer("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps", above=0.0),
        rope=read_rope_config(config),
        tied_head=config.flag("tie_word_embeddings", default=False),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        dtype=config.choice("dtype" if config.has("dtype") else "torch_dtype", _DTYPES),
        sliding_windows=_sliding_windows(config),
        end_token_ids=_end_token_ids(config, _read_generation_config(folder), vocab_size),
    )


def read_generation_defaults(folder: Path) -> GenerationDefaults:
    """The model's own sampling defaults; neutral ones where the file, or a key in it, is absent or null.

    `do_sample: false` means temperature 0. Other keys (lengths, beams) are not defaults that a request inherits and are
    left alone. Raises CheckpointError naming file and key for values out of range.
    """
    file = _read_generation_config(folder)
    temperature = file.number("temperature", default=1.0, at_least=0.0)
    return GenerationDefaults(
        temperature=temperature if file.flag("do_sample", default=True) else 0.0,
        top_k=file.integer("top_k", default=0, at_least=0),
        top_p=file.number("top_p", default=1.0, above=0.0, at_most=1.0),
        min_p=file.number("min_p", default=0.0, at_least=0.0, at_most=1.0),
        repetition_penalty=file.number("repetition_penalty", default=1.0, above=0.0),
    )


def _read_generation_config(folder: Path) -> JsonObject:
    path = folder / GENERATION_CONFIG_FILE
    return read_json_object(path) if path.exists() else JsonObject(path, {})


def _model_type(config: JsonObject) -> str:
    model_type = config.choice("model_type", _ARCHITECTURES)
    expected = [_ARCHITECTURES[model_type]]
    found = config.get("architectures", expected)
    if found != expected:
        config.fail("architectures", f"is {found!r}, which is not supported; supported for {model_type}: {expected!r}")
    return model_type


def _refuse_unsupported(config: JsonObject, model_type: str) -> None:
    """Settings that would change the computation in ways that the model code does not have."""
    config.choice("hidden_act", ("silu",), default="silu")
    if config.has("quantization_config"):
        config.fail("quantization_config", "is given; supported are plain bfloat16, float16 and float32 weights")
    if model_type == "qwen3" and config.flag("attention_bias", default=False):
        config.fail("attention_bias", "is true, which is not supported for qwen3")


def _num_kv_heads(config: JsonObject, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads")
    if num_heads % num_kv_heads:
        config.fail("num_key_value_heads", f"is {num_kv_heads}, not a divisor of num_attention_heads {num_heads}")
    return num_kv_heads


def _head_size(config: JsonObject, model_type: str, num_heads: int) -> int:
    """head_dim where it is given: Qwen3's differs from hidden_size / heads. Qwen2's files often lack the key."""
    if model_type == "qwen3" or config.has("head_dim"):
        head_size = config.integer("head_dim")
        if head_size % 2:
            config.fail("head_dim", f"is {head_size}; rotary embedding needs an even number")
        return head_size
    hidden_size = config.integer("hidden_size")
    if hidden_size % (2 * num_heads):
        config.fail(
            "hidden_size",
            f"is {hidden_size}, not an even multiple of num_attention_heads {num_heads}; head_dim is missing",
        )
    return hidden_size // num_heads


def _sliding_windows(config: JsonObject) -> tuple[int | None, ...]:
    """The window of each layer. A `sliding_window` number counts only where `use_sliding_window` is true.

    Which layers: those that `layer_types` (version 5) names, else those from index `max_window_layers` on.
    """
    num_layers = config.integer("num_hidden_layers")
    kinds = config.get("layer_types", ["full_attention"] * num_layers)
    if not (isinstance(kinds, list) and len(kinds) == num_layers and all(kind in _LAYER_TYPES for kind in kinds)):
        config.fail("layer_types", f"is not a list of {num_layers} names out of {', '.join(_LAYER_TYPES)}")
    if not config.flag("use_sliding_window", default=False):
        if "sliding_attention" in kinds:
            config.fail("layer_types", "names sliding_attention while use_sliding_window is not true")
        return (None,) * num_layers
    window = config.integer("sliding_window")
    if config.has("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = config.integer("max_window_layers", at_least=0)
    return tuple(window if layer >= first else None for layer in range(num_layers))


def _end_token_ids(config: JsonObject, generation: JsonObject, vocab_size: int) -> tuple[int, ...]:
    """The ids of both files, each an int, a list of ints or absent; chat models name some of them in one file only."""
    ids: list[int] = []
    for file in (config, generation):
        value = file.get("eos_token_id", [])
        for token in value if isinstance(value, list) else [value]:
            if type(token) is not int or not 0 <= token < vocab_size:
                file.fail("eos_token_id", f"is {value!r}, not ids of a vocabulary of {vocab_size}")
            ids.append(token)
    return tuple(dict.fromkeys(ids))
