"""From a checkpoint's tensors to a model's weights: names, stacking, dtypes, and refusals before anything is read."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupyllm.checkpoint import Checkpoint
from cupyllm.errors import CheckpointError
from cupyllm.model_config import ModelConfig, read_model_config
from cupyllm.weights import ModelWeights, load_weights, random_weights
from tests.tiny_checkpoint import Tensors, cast, tiny_tensors, write_tiny_checkpoint, write_weights

NORMS = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "final_norm")


def keep(array: NDArray[Any]) -> NDArray[Any]:
    return array


def load(folder: Path, dtype: str = "float32") -> ModelWeights:
    return load_weights(Checkpoint.open(folder), read_model_config(folder), dtype=dtype, upload=keep)


def tensors_of(folder: Path, seed: int = 0) -> Tensors:
    return tiny_tensors({"tie_word_embeddings": False} | json.loads((folder / "config.json").read_text()), seed)


def arrays_of(weights: ModelWeights) -> dict[str, NDArray[Any]]:
    """Every array under a name such as "1.qkv"."""
    arrays = {"embedding": weights.embedding, "final_norm": weights.final_norm, "lm_head": weights.lm_head}
    for number, layer in enumerate(weights.layers):
        for field in dataclasses.fields(layer):
            if getattr(layer, field.name) is not None:
                arrays[f"{number}.{field.name}"] = getattr(layer, field.name)
    return arrays


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_every_tensor_lands_in_its_place(tmp_path: Path, model_type: str, shards: int, tied: bool) -> None:
    folder = write_tiny_checkpoint(tmp_path, model_type=model_type, head_size=24, shards=shards, tied=tied)
    weights, tensors = load(folder), tensors_of(folder)

    def stack(layer: int, *names: str) -> NDArray[Any]:
        return np.concatenate([tensors[f"model.layers.{layer}.{name}"] for name in names])

    expected = {"embedding": tensors["model.embed_tokens.weight"], "final_norm": tensors["model.norm.weight"]}
    expected["lm_head"] = expected["embedding"] if tied else tensors["lm_head.weight"]
    for layer in range(2):
        expected |= {
            f"{layer}.attention_norm": stack(layer, "input_layernorm.weight"),
            f"{layer}.qkv": stack(layer, *(f"self_attn.{name}_proj.weight" for name in "qkv")),
            f"{layer}.o": stack(layer, "self_attn.o_proj.weight"),
            f"{layer}.mlp_norm": stack(layer, "post_attention_layernorm.weight"),
            f"{layer}.gate_up": stack(layer, "mlp.gate_proj.weight", "mlp.up_proj.weight"),
            f"{layer}.down": stack(layer, "mlp.down_proj.weight"),
        }
        if model_type == "qwen2":
            expected[f"{layer}.qkv_bias"] = stack(layer, *(f"self_attn.{name}_proj.bias" for name in "qkv"))
        else:
            expected[f"{layer}.q_norm"] = stack(layer, "self_attn.q_norm.weight")
            expected[f"{layer}.k_norm"] = stack(layer, "self_attn.k_norm.weight")
    arrays = arrays_of(weights)
    assert arrays.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(arrays[name], values, err_msg=name, strict=True)
    assert (weights.lm_head is weights.embedding) == tied


@pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("wanted", ["float32", "float16", "bfloat16"])
def test_matrices_take_the_dtype_asked_for_and_norms_are_float32(tmp_path: Path, stored: str, wanted: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, dtype=stored)
    arrays = arrays_of(load(folder, wanted))
    host_type = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[wanted]
    for name, array in arrays.items():
        assert array.dtype == (np.float32 if name.endswith(NORMS) else host_type), name
    if stored == wanted:
        original = cast(tensors_of(folder)["model.embed_tokens.weight"], stored)
        np.testing.assert_array_equal(arrays["embedding"], original, strict=True)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_transformers_finds_the_same_tensors_in_the_tiny_checkpoint(tmp_path: Path, model_type: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch and transformers (pip install torch transformers)")
    transformers = pytest.importorskip("transformers", reason="needs transformers (pip install transformers)")
    folder = write_tiny_checkpoint(tmp_path, model_type=model_type, tied=False)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    weights = load(folder)
    q_rows = model.model.layers[1].self_attn.q_proj.weight.detach().numpy()
    np.testing.assert_array_equal(weights.layers[1].qkv[: len(q_rows)], q_rows)
    np.testing.assert_array_equal(weights.lm_head, model.lm_head.weight.detach().numpy())


def test_a_tied_head_that_is_in_the_file_all_the_same_is_not_read(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path, tied=True)
    write_weights(folder, tensors_of(folder) | {"lm_head.weight": np.zeros((512, 64), dtype=np.float32)})
    weights = load(folder)
    assert weights.lm_head is weights.embedding
    assert np.any(weights.lm_head)


def test_left_over_rope_frequencies_are_accepted(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    left_over = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, dtype=np.float32)}
    write_weights(folder, tensors_of(folder) | left_over)
    assert len(load(folder).layers) == 2


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_array_begins_at_a_cache_line(tmp_path: Path, dtype: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, num_layers=3)
    for weights in (
        load(folder, dtype),
        random_weights(read_model_config(folder), dtype=dtype, seed=0, upload=keep),
    ):
        assert {array.ctypes.data % 64 for array in arrays_of(weights).values()} == {0}


def test_each_array_is_handed_over_once_and_complete(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path)
    checkpoint = Checkpoint.open(folder)
    sums: list[float] = []
    counts: list[int] = []

    def upload(array: NDArray[Any]) -> str:
        sums.append(float(array.sum()))
        return f"array {len(sums)}"

    weights = load_weights(
        checkpoint, read_model_config(folder), dtype="float32", upload=upload, progress=counts.append
    )
    assert len(sums) == 2 + 2 * 7
    assert np.all(np.isfinite(sums))
    assert sums[0] == float(load(folder).embedding.sum())
    assert weights.embedding == weights.lm_head == "array 1"
    assert len(counts) == len(checkpoint.names)
    assert sum(counts) == checkpoint.num_bytes


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {key: values for key, values in tensors.items() if key != name}


def replaced(name: str, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: change(tensors[name])}


LAYER = "model.layers.1."
WRONG_TENSORS: dict[str, tuple[Callable[[Tensors], Tensors], tuple[str, ...]]] = {
    "no embedding": (without("model.embed_tokens.weight"), ("'model.embed_tokens.weight'",)),
    "no final norm": (without("model.norm.weight"), ("'model.norm.weight'",)),
    "no lm_head though not tied": (without("lm_head.weight"), ("'lm_head.weight'",)),
    "no bias": (without(LAYER + "self_attn.k_proj.bias"), (f"'{LAYER}self_attn.k_proj.bias'",)),
    "a matrix transposed": (
        replaced(LAYER + "self_attn.k_proj.weight", np.transpose),
        ("model.safetensors", f"'{LAYER}self_attn.k_proj.weight'", "(64, 32)", "(32, 64)"),
    ),
    "a row too few": (
        replaced("model.embed_tokens.weight", lambda values: values[:-1]),
        ("model.safetensors", "'model.embed_tokens.weight'", "(511, 64)", "(512, 64)"),
    ),
    "a norm with an axis too many": (
        replaced("model.norm.weight", lambda values: values[None]),
        ("'model.norm.weight'", "(1, 64)", "(64,)"),
    ),
    "a matrix in float64": (
        replaced(LAYER + "mlp.up_proj.weight", lambda values: values.astype(np.float64)),
        ("model.safetensors", f"'{LAYER}mlp.up_proj.weight'", "F64"),
    ),
    "an extra tensor": (
        lambda tensors: tensors | {"model.layers.1.mlp.gate_proj.lora_A": np.zeros(3, dtype=np.float32)},
        ("model.safetensors", "'model.layers.1.mlp.gate_proj.lora_A'"),
    ),
    "a layer too many": (
        lambda tensors: tensors | {"model.layers.2.input_layernorm.weight": np.zeros(64, dtype=np.float32)},
        ("'model.layers.2.input_layernorm.weight'",),
    ),
    "norms of another architecture": (
        lambda tensors: tensors | {LAYER + "self_attn.q_norm.weight": np.zeros(16, dtype=np.float32)},
        (f"'{LAYER}self_attn.q_norm.weight'", "qwen2"),
    ),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors_are_refused_by_name_before_any_is_read(
    tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_tiny_checkpoint(tmp_path, tied=False)
    change, named = WRONG_TENSORS[case]
    write_weights(folder, change(tensors_of(folder)))

    def must_not_read(self: Checkpoint, name: str, out: NDArray[Any]) -> None:
        pytest.fail(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "read_into", must_not_read)
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    for words in (*named, str(folder)):
        assert words in str(caught.value)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_weights_have_the_shapes_of_loaded_ones(tmp_path: Path, model_type: str, dtype: str) -> None:
    folder = write_tiny_checkpoint(tmp_path, model_type=model_type)
    config: ModelConfig = read_model_config(folder)
    random = arrays_of(random_weights(config, dtype=dtype, seed=1, upload=keep))
    again = arrays_of(random_weights(config, dtype=dtype, seed=1, upload=keep))
    loaded = arrays_of(load(folder, dtype))
    assert random.keys() == loaded.keys()
    for name, array in random.items():
        assert (array.shape, array.dtype) == (loaded[name].shape, loaded[name].dtype)
        np.testing.assert_array_equal(array, again[name])
    assert np.all(random["0.attention_norm"] == 1.0)
    assert len(np.unique(random["0.qkv"])) > 100
