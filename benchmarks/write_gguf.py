"""The weights of a Qwen2.5 folder as a GGUF file for llama.cpp: the same numbers for both engines.

    python benchmarks/write_gguf.py FOLDER FILE.gguf [--quantise Q8_0]

Needs `pip install gguf`. Matrices keep the checkpoint's 16 bits (float32 becomes float16) unless they are quantised,
norms and biases are float32, as llama.cpp's own converter does it. Tensor names are those of gguf's table for the
architecture "qwen2".
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from cupyllm.checkpoint import Checkpoint
from cupyllm.model_config import ModelConfig, read_model_config

# What a token is, as llama.cpp wants to know it.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--quantise", choices=("Q8_0",))
    options = parser.parse_args(arguments)
    write_gguf(options.folder, options.file, options.quantise)
    return 0


def write_gguf(folder: Path, file: Path, quantise: str | None = None) -> None:
    """Write the file; `quantise` names the type of its matrices."""
    config = read_model_config(folder)
    if config.model_type != "qwen2" or config.rope.kind != "default":
        sys.exit(f"{folder}: only Qwen2 and Qwen2.5 without RoPE scaling can be written")
    writer = gguf.GGUFWriter(file, "qwen2")
    write_sizes(writer, config, folder.name, quantise)
    write_tokenizer(writer, folder, config)
    write_tensors(writer, folder, config, quantise)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_sizes(writer: gguf.GGUFWriter, config: ModelConfig, name: str, quantise: str | None) -> None:
    stored = "BF16" if config.dtype == "bfloat16" else "F16"
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{quantise or stored}"])
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def write_tokenizer(writer: gguf.GGUFWriter, folder: Path, config: ModelConfig) -> None:
    """Vocabulary and merges of tokenizer.json; rows of the head that no token has are named as unused."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    tokens = [f"[PAD{number}]" for number in range(config.vocab_size)]
    kinds = [UNUSED] * config.vocab_size
    for text, number in tokenizer["model"]["vocab"].items():
        tokens[number], kinds[number] = text, NORMAL
    for added in tokenizer["added_tokens"]:
        tokens[added["id"]], kinds[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    merges = tokenizer["model"]["merges"]
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    writer.add_eos_token_id(max(config.end_token_ids))
    writer.add_add_bos_token(False)
    if "chat_template" in settings:
        writer.add_chat_template(settings["chat_template"])


def write_tensors(writer: gguf.GGUFWriter, folder: Path, config: ModelConfig, quantise: str | None) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config.num_layers)
    checkpoint = Checkpoint.open(folder)
    for name in checkpoint.names:
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            sys.exit(f"{folder}: llama.cpp knows no tensor for {name}")
        shape = checkpoint.shape(name)
        if quantise is not None and len(shape) > 1:
            kind = gguf.GGMLQuantizationType[quantise]
            whole = np.empty(shape, np.float32)
            checkpoint.read_into(name, whole)
            writer.add_tensor(theirs, gguf.quants.quantize(whole, kind), raw_dtype=kind)
            continue
        is_bfloat16 = len(shape) > 1 and checkpoint.dtype(name) == "bfloat16"
        values = np.empty(shape, np.float32 if len(shape) == 1 else np.uint16 if is_bfloat16 else np.float16)
        checkpoint.read_into(name, values)
        if is_bfloat16:
            writer.add_tensor(theirs, values.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
        else:
            writer.add_tensor(theirs, values)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
