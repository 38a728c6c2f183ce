"""Reading config.json and generation_config.json: both layouts, the traps of real files, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cupyllm.errors import CheckpointError
from cupyllm.model_config import GenerationDefaults, read_generation_defaults, read_model_config
from cupyllm.rope import RopeConfig
from tests.tiny_checkpoint import write_tiny_checkpoint


def test_a_qwen2_config_is_read(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_checkpoint(tmp_path, dtype="bfloat16", num_layers=3))
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (512, 64, 96)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_size) == (3, 4, 2, 16)
    assert (config.max_position_embeddings, config.rms_norm_eps) == (1024, 1e-6)
    assert (config.tied_head, config.qkv_bias, config.qk_norm) == (True, True, False)
    assert (config.dtype, config.rope) == ("bfloat16", RopeConfig(10_000.0))


def test_a_qwen3_config_is_read_and_head_dim_wins_over_hidden_size_per_head(tmp_path: Path) -> None:
    config = read_model_config(write_tiny_checkpoint(tmp_path, model_type="qwen3", head_size=24, tied=False))
    assert (config.head_size, config.tied_head, config.qkv_bias, config.qk_norm) == (24, False, False, True)


def test_version_5_layout_reads_as_version_4_does(tmp_path: Path) -> None:
    old = read_model_config(write_tiny_checkpoint(tmp_path / "old"))
    new = write_tiny_checkpoint(
        tmp_path / "new",
        rope_theta=None,
        torch_dtype=None,
        max_window_layers=None,
        sliding_window=None,
        rope_parameters={"rope_theta": 10_000.0, "rope_type": "default"},
        layer_types=["full_attention"] * 2,
    )
    values = json.loads((new / "config.json").read_text()) | {"dtype": "float32"}
    (new / "config.json").write_text(json.dumps(values))
    assert "torch_dtype" not in values
    assert read_model_config(new) == old


def test_a_config_saved_by_transformers_reads_as_ours_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")
    ours = write_tiny_checkpoint(tmp_path / "ours", use_sliding_window=True, sliding_window=8, max_window_layers=1)
    saved = tmp_path / "saved"
    transformers.AutoConfig.from_pretrained(ours).save_pretrained(saved)
    (saved / "generation_config.json").write_bytes((ours / "generation_config.json").read_bytes())
    assert read_model_config(saved) == read_model_config(ours)


@pytest.mark.parametrize(
    ("in_config", "in_generation_config", "expected"),
    [
        (511, [511, 510], (511, 510)),
        ([511, 509], 510, (511, 509, 510)),
        (None, [3], (3,)),
        (7, None, (7,)),
        (None, None, ()),
    ],
)
def test_end_tokens_are_the_union_of_both_files(
    tmp_path: Path, in_config: Any, in_generation_config: Any, expected: tuple[int, ...]
) -> None:
    generation = {"eos_token_id": in_generation_config}
    folder = write_tiny_checkpoint(tmp_path, eos_token_id=in_config, generation_config=generation)
    assert read_model_config(folder).end_token_ids == expected


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 1}, (None, None, None)),
        ({"use_sliding_window": None, "sliding_window": 8, "max_window_layers": 1}, (None, None, None)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}, (None, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, (8, 8, 8)),
        ({"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None)),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            (8, None, 8),
        ),
    ],
)
def test_windows_apply_only_with_the_flag_and_from_max_window_layers_on(
    tmp_path: Path, values: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert read_model_config(write_tiny_checkpoint(tmp_path, num_layers=3, **values)).sliding_windows == expected


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"model_type": None}, "model_type is missing"),
        ({"model_type": "llama"}, "model_type is 'llama'"),
        ({"model_type": ["qwen2"]}, "model_type"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "architectures"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"vocab_size": True}, "vocab_size"),
        ({"hidden_size": -64}, "hidden_size"),
        ({"hidden_size": 64.0}, "hidden_size"),
        ({"hidden_size": 66}, "hidden_size"),
        ({"hidden_size": 20}, "hidden_size"),
        ({"intermediate_size": "96"}, "intermediate_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**30}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_attention_heads": 2, "num_key_value_heads": 4}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"max_position_embeddings": 0}, "max_position_embeddings"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"torch_dtype": None}, "torch_dtype is missing"),
        ({"torch_dtype": "float64"}, "torch_dtype is 'float64'"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type"),
        ({"use_sliding_window": True, "sliding_window": None}, "sliding_window is missing"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"layer_types": 0}, "layer_types"),
        ({"eos_token_id": 512}, "eos_token_id"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id"),
    ],
)
def test_a_bad_config_is_refused_by_file_and_key(tmp_path: Path, values: dict[str, Any], named: str) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    config = json.loads((folder / "config.json").read_text()) | values
    config = {key: value for key, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "config.json", named)


@pytest.mark.parametrize(
    ("values", "named"), [({"head_dim": None}, "head_dim is missing"), ({"attention_bias": True}, "attention_bias")]
)
def test_a_bad_qwen3_config_is_refused(tmp_path: Path, values: dict[str, Any], named: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, model_type="qwen3")
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps(config))
    refused(folder, "config.json", named.replace("missing", "null"))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"vocab_size": ' + b"9" * 5000 + b"}"]
)
def test_a_file_that_is_not_a_json_object_is_refused(tmp_path: Path, content: bytes) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    for name in ("config.json", "generation_config.json"):
        (folder / name).write_bytes(content)
    refused(folder, "config.json", "JSON")
    with pytest.raises(CheckpointError, match=r"generation_config\.json"):
        read_generation_defaults(folder)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    refused(tmp_path, "config.json", "does not exist")


def refused(folder: Path, *named: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_model_config(folder)
    for words in named:
        assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, GenerationDefaults()),
        (
            {
                "do_sample": True,
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
                "min_p": 0.05,
                "repetition_penalty": 1.1,
                "max_length": 20,
            },
            GenerationDefaults(temperature=0.7, top_p=0.8, top_k=20, min_p=0.05, repetition_penalty=1.1),
        ),
        ({"do_sample": False, "temperature": 0.7}, GenerationDefaults(temperature=0.0)),
        ({"temperature": None, "top_k": None}, GenerationDefaults()),
        ({"temperature": 0}, GenerationDefaults(temperature=0.0)),
    ],
)
def test_generation_defaults_are_read(tmp_path: Path, values: dict[str, Any], expected: GenerationDefaults) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    assert read_generation_defaults(tmp_path) == expected


def test_without_a_generation_config_the_defaults_are_neutral(tmp_path: Path) -> None:
    assert read_generation_defaults(tmp_path) == GenerationDefaults(1.0, 0, 1.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("inf")),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", "1.1"),
        ("do_sample", 1),
    ],
)
def test_bad_generation_defaults_are_refused_by_file_and_key(tmp_path: Path, key: str, value: Any) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(CheckpointError) as caught:
        read_generation_defaults(tmp_path)
    assert "generation_config.json" in str(caught.value)
    assert key in str(caught.value)
