"""Writes small random Qwen2 and Qwen3 checkpoint folders for tests, without using any of the code under test.

The safetensors format is written by hand, so that tests can also write files that no library would.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]

_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "float64": "F64", "int64": "I64"}


def write_tiny_checkpoint(
    folder: Path,
    *,
    model_type: str = "qwen2",
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_size: int | None = None,
    intermediate_size: int = 96,
    vocab_size: int = 512,
    dtype: str = "float32",
    tied: bool = True,
    shards: int = 1,
    seed: int = 0,
    generation_config: dict[str, Any] | None = None,
    **config_overrides: Any,
) -> Path:
    """Write config.json, generation_config.json and the weights of a random model; returns `folder`.

    `config_overrides` are further keys of config.json; None takes a key out. `generation_config` is the content of that
    file; by default it only names the two last ids as end tokens. No tokenizer is written.
    """
    config = {
        "architectures": [{"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[model_type]],
        "model_type": model_type,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_size or (hidden_size // num_heads if model_type == "qwen3" else None),
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "use_sliding_window": False,
        "sliding_window": 1024,
        "max_window_layers": num_layers,
        "eos_token_id": vocab_size - 1,
    } | config_overrides
    config = {key: value for key, value in config.items() if value is not None}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json", generation_config or {"eos_token_id": [vocab_size - 1, vocab_size - 2]}
    )
    write_weights(folder, {name: cast(values, dtype) for name, values in tiny_tensors(config, seed).items()}, shards)
    return folder


def tiny_tensors(config: dict[str, Any], seed: int) -> Tensors:
    """Random float32 weights by the names of the public checkpoints.

    Scaled so that a layer adds more than the embedding brings and the logits have a standard deviation of about 3:
    greedy texts then vary, and the best token leads by far more than rounding.
    """
    rng = np.random.default_rng(seed)
    C, V = config["hidden_size"], config["vocab_size"]
    intermediate, qwen2 = config["intermediate_size"], config["model_type"] == "qwen2"
    D = config.get("head_dim") or C // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D

    def matrix(rows: int, columns: int, gain: float = 1.0) -> NDArray[Any]:
        return rng.standard_normal((rows, columns), dtype=np.float32) * np.float32(gain / columns**0.5)

    def norm(size: int) -> NDArray[Any]:
        return 1 + rng.standard_normal(size, dtype=np.float32) * np.float32(0.1)

    tensors = {"model.embed_tokens.weight": matrix(V, C, gain=3.0)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = matrix(rows, C, gain=3.0)
            if qwen2:
                tensors[f"{prefix}self_attn.{name}_proj.bias"] = rng.standard_normal(rows, dtype=np.float32)
            elif name != "v":
                tensors[f"{prefix}self_attn.{name}_norm.weight"] = norm(D)
        tensors |= {
            f"{prefix}input_layernorm.weight": norm(C),
            f"{prefix}self_attn.o_proj.weight": matrix(C, q, gain=2.0),
            f"{prefix}post_attention_layernorm.weight": norm(C),
            f"{prefix}mlp.gate_proj.weight": matrix(intermediate, C, gain=1.5),
            f"{prefix}mlp.up_proj.weight": matrix(intermediate, C, gain=1.5),
            f"{prefix}mlp.down_proj.weight": matrix(C, intermediate, gain=2.0),
        }
    tensors["model.norm.weight"] = norm(C)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(V, C, gain=3.0)
    return tensors


def cast(values: NDArray[Any], dtype: str) -> NDArray[Any]:
    """float32 values as "float32", "float16" or "bfloat16" (as uint16 bits, cut off rather than rounded)."""
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    return values.astype(dtype)


def write_weights(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """model.safetensors or, for more than one shard, numbered files with an index."""
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    names = list(tensors)
    weight_map = {}
    for shard in range(shards):
        file_name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard::shards]
        write_safetensors(folder / file_name, {name: tensors[name] for name in mine})
        weight_map |= dict.fromkeys(mine, file_name)
    total = sum(values.nbytes for values in tensors.values())
    write_json(folder / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def write_safetensors(path: Path, tensors: Tensors) -> None:
    """One file: 8 bytes with the header's length, the header, the tensors one after another."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stop = 0
    for name, values in tensors.items():
        start, stop = stop, stop + values.nbytes
        dtype = _SAFETENSORS_NAMES[values.dtype.name]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": [start, stop]}
    data = b"".join(np.ascontiguousarray(values).tobytes() for values in tensors.values())
    write_raw_safetensors(path, header, data)


def write_raw_safetensors(path: Path, header: Any, data: bytes, header_size: int | None = None) -> None:
    """A file with any header and any claimed header size, sound or not."""
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    size = len(text) if header_size is None else header_size
    path.write_bytes(size.to_bytes(8, "little") + text + data)


def read_raw_safetensors(path: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of a sound file, to be changed and written back."""
    content = path.read_bytes()
    data_start = 8 + int.from_bytes(content[:8], "little")
    return json.loads(content[8:data_start]), content[data_start:]


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
