"""A checkpoint as a GGUF file for llama.cpp, so that a peer runs on the same weights: needs the package `gguf`.

python benchmarks/gguf_file.py --model FOLDER --type BF16 out.gguf
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np

from cupyllm.checkpoint import Checkpoint
from cupyllm.model_config import ModelConfig, read_model_config

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Qwen2 checkpoint")
    parser.add_argument("--type", default="BF16", choices=("F16", "BF16", "Q8_0"))
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write_gguf(arguments.model, arguments.out, arguments.type)


def write_gguf(folder: Path, out: Path, type_name: str) -> None:
    """Matrices in the type named, norms and biases in float32."""
    config, checkpoint = read_model_config(folder), Checkpoint.open(folder)
    assert config.model_type == "qwen2", config.model_type
    writer = gguf.GGUFWriter(out, "qwen2")
    add_sizes(writer, config)
    add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")), config)
    for name in checkpoint.names:
        values = np.empty(checkpoint.shape(name), np.float32)
        checkpoint.read_into(name, values)
        kind = gguf.GGMLQuantizationType[type_name if values.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_sizes(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict, config: ModelConfig) -> None:  # type: ignore[type-arg]
    """Every id gets a token; those that the tokenizer does not name are padding."""
    tokens = [f"[PAD{place}]" for place in range(config.vocab_size)]
    kinds = [gguf.TokenType.UNUSED] * config.vocab_size
    for token, place in tokenizer["model"]["vocab"].items():
        tokens[place], kinds[place] = token, gguf.TokenType.NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]] = added["content"]
        kinds[added["id"]] = gguf.TokenType.CONTROL if added["special"] else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(config.end_token_ids[0])


def gguf_name(name: str) -> str:
    """The name that llama.cpp gives a tensor of a Qwen2 checkpoint."""
    stem, _, suffix = name.rpartition(".")
    if stem in OTHER_NAMES:
        return f"{OTHER_NAMES[stem]}.{suffix}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}.{suffix}"


if __name__ == "__main__":
    main()
