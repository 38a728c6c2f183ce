"""Embeddings: what a checkpoint says about them, against transformers, and checkpoints that were saved for them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cupyllm import LLM, SamplingParams
from cupyllm.embedding import EmbeddingRecipe, read_embedding_recipe
from cupyllm.errors import CheckpointError, RequestError
from tests.qwen_tokenizer import write_tokenizer_folder
from tests.tiny_checkpoint import tiny_tensors, write_json, write_tiny_checkpoint, write_weights

TRANSFORMER = {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = NORMALIZE | {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
INPUTS = ["the weather", "  déjà 你好 \U0001fae0", "a", "What is the weather in Paris today? " * 6]


def write_recipe(folder: Path, modules: Any = (TRANSFORMER, POOLING, NORMALIZE), **pooling: Any) -> Path:
    (folder / "1_Pooling").mkdir(parents=True, exist_ok=True)
    write_json(folder / "modules.json", modules)
    write_json(folder / "1_Pooling" / "config.json", pooling)
    return folder


def mode(name: str) -> dict[str, bool]:
    """The config of a Pooling as sentence-transformers writes it for one mode."""
    names = ["cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken"]
    return {f"pooling_mode_{one}": one == name for one in names} | {"include_prompt": True}


@pytest.mark.parametrize(
    ("modules", "pooling", "expected"),
    [
        ([TRANSFORMER, POOLING, NORMALIZE], mode("lasttoken"), EmbeddingRecipe("last", True)),
        ([TRANSFORMER, POOLING], mode("lasttoken"), EmbeddingRecipe("last", False)),
        ([TRANSFORMER, POOLING, NORMALIZE], mode("mean_tokens"), EmbeddingRecipe("mean", True)),
        ([TRANSFORMER, POOLING], {"word_embedding_dimension": 64}, EmbeddingRecipe("mean", False)),
        ([TRANSFORMER, POOLING], {"pooling_mode": "lasttoken"}, EmbeddingRecipe("last", False)),
    ],
)
def test_the_recipe_is_the_checkpoints(tmp_path: Path, modules: Any, pooling: Any, expected: EmbeddingRecipe) -> None:
    assert read_embedding_recipe(write_recipe(tmp_path, modules, **pooling)) == expected


def test_without_files_it_is_the_last_token_normalised(tmp_path: Path) -> None:
    assert read_embedding_recipe(tmp_path) == EmbeddingRecipe("last", True, "")


@pytest.mark.parametrize(
    ("modules", "pooling", "words"),
    [
        ([TRANSFORMER, POOLING, DENSE], mode("lasttoken"), "Pooling, Dense"),
        ([TRANSFORMER], {}, "none"),
        ([], {}, "none"),
        ([TRANSFORMER, POOLING], mode("cls_token"), "'cls'"),
        ([TRANSFORMER, POOLING], mode("lasttoken") | {"pooling_mode_mean_tokens": True}, r"'mean\+lasttoken'"),
        ([TRANSFORMER, POOLING], {"pooling_mode": "weightedmean"}, "'weightedmean'"),
    ],
)
def test_what_is_not_supported_is_refused_when_asked_for(
    tmp_path: Path, modules: Any, pooling: Any, words: str
) -> None:
    recipe = read_embedding_recipe(write_recipe(tmp_path, modules, **pooling))
    with pytest.raises(RequestError, match=words):
        recipe.check(None, 64)


@pytest.mark.parametrize(
    ("modules", "pooling"),
    [
        *(({}, {}), ([5], {}), ([{"type": "a"}], {}), ([TRANSFORMER, POOLING], {"pooling_mode_lasttoken": "yes"})),
        *(
            ([TRANSFORMER, POOLING | {"path": "2_Pooling"}], {}),
            ([TRANSFORMER, POOLING | {"path": "../1_Pooling"}], {}),
        ),
    ],
)
def test_damaged_files_are_refused_by_name(tmp_path: Path, modules: Any, pooling: Any) -> None:
    folder = write_recipe(tmp_path / "model", modules, **pooling)
    with pytest.raises(CheckpointError, match=str(folder)):
        read_embedding_recipe(folder)


@pytest.mark.parametrize("dimensions", [None, 1, 8, 64])
def test_a_vector_is_cut_and_then_normalised(dimensions: int | None) -> None:
    pooled = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    cut = pooled[:dimensions]
    assert EmbeddingRecipe().finish(pooled, dimensions).dtype == np.float32
    np.testing.assert_allclose(EmbeddingRecipe().finish(pooled, dimensions), cut / np.linalg.norm(cut), rtol=1e-6)
    np.testing.assert_array_equal(EmbeddingRecipe(normalise=False).finish(pooled, dimensions), cut)


def test_nothing_is_normalised_to_nothing() -> None:
    np.testing.assert_array_equal(EmbeddingRecipe().finish(np.zeros(4, np.float32)), np.zeros(4, np.float32))


@pytest.mark.parametrize("dimensions", [0, -1, 65])
def test_dimensions_that_are_not_there_are_refused(dimensions: int) -> None:
    with pytest.raises(RequestError, match="from 1 to 64"):
        EmbeddingRecipe().check(dimensions, 64)


def write_model(folder: Path, model_type: str = "qwen3", **config: Any) -> Path:
    write_tiny_checkpoint(folder, model_type=model_type, **config)
    return write_tokenizer_folder(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("embedding"))


def load(folder: Path, **config: Any) -> LLM:
    return LLM(str(folder), kv_cache_gib=0.02, **config)


@pytest.mark.parametrize("pooling", ["lasttoken", "mean_tokens"])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_embeddings_are_those_of_transformers(tmp_path: Path, model_type: str, pooling: str) -> None:
    torch = pytest.importorskip("torch", reason="install torch and transformers to compare with them")
    transformers = pytest.importorskip("transformers", reason="install torch and transformers to compare with them")
    llm = load(write_recipe(write_model(tmp_path, model_type), **mode(pooling)), max_step_tokens=32)
    found = llm.embed(INPUTS, show_progress=False)
    model = transformers.AutoModel.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert found.shape == (len(INPUTS), 64)
    for text, vector in zip(INPUTS, found, strict=True):
        with torch.no_grad():
            states = model(torch.tensor([llm.tokenizer.encode(text)])).last_hidden_state[0].numpy()
        expected = states[-1] if pooling == "lasttoken" else states.mean(axis=0)
        np.testing.assert_allclose(vector, expected / np.linalg.norm(expected), atol=2e-5)


def test_embeddings_do_not_depend_on_the_batch_or_on_what_is_cached(folder: Path) -> None:
    llm = load(folder, max_step_tokens=32)
    together = llm.embed(INPUTS * 3, show_progress=False)
    llm.generate(INPUTS, SamplingParams(max_tokens=4), show_progress=False)
    for row, text in enumerate(INPUTS * 3):
        (alone,) = llm.embed(text)
        np.testing.assert_allclose(together[row], alone, atol=1e-6)


def test_text_and_its_token_ids_embed_alike_and_dimensions_cut(folder: Path) -> None:
    llm = load(folder)
    ids = [llm.tokenizer.encode(text) for text in INPUTS]
    np.testing.assert_array_equal(llm.embed(ids, show_progress=False), llm.embed(INPUTS, show_progress=False))
    (whole,), (cut,) = llm.embed(ids[0]), llm.embed(ids[0], dimensions=8)
    np.testing.assert_allclose(cut, whole[:8] / np.linalg.norm(whole[:8]), rtol=1e-5)


def test_more_inputs_than_may_wait_are_embedded(folder: Path) -> None:
    llm = load(folder, max_waiting=2, max_prefill_batch_size=2)
    assert llm.embed(INPUTS * 3, show_progress=False).shape == (12, 64)
    assert llm.engine.stats.num_live_pages == 0


def test_what_cannot_be_embedded_is_refused_before_anything_runs(folder: Path) -> None:
    llm = load(folder, max_model_len=64)
    for wrong in ([""], [[]], ["a", "a " * 100], [[5, 10**6]]):
        with pytest.raises(RequestError):
            llm.embed(wrong)
    assert not llm.engine.has_work


def rewrite(folder: Path, *, prefix: str = "", without: str = "") -> None:
    """Write the weights anew, "model." replaced by `prefix`, as Qwen3-Embedding has them, or without one tensor."""
    tensors = tiny_tensors(json.loads((folder / "config.json").read_text(encoding="utf-8")), seed=0)
    named = {re.sub(r"^model\.", prefix, name): values for name, values in tensors.items()}
    write_weights(folder, {name: values for name, values in named.items() if name != without})


@pytest.mark.parametrize("tied", [True, False])
def test_a_checkpoint_whose_names_have_no_prefix_is_loaded(tmp_path: Path, tied: bool) -> None:
    expected = load(write_model(tmp_path / "a", tied=tied)).embed(INPUTS, show_progress=False)
    rewrite(write_model(tmp_path / "b", tied=tied), without="lm_head.weight")
    llm = load(tmp_path / "b")
    np.testing.assert_array_equal(llm.embed(INPUTS, show_progress=False), expected)
    if tied:  # as Qwen3-Embedding-0.6B
        assert llm.generate("a", SamplingParams(max_tokens=2))[0].outputs[0].token_ids
        return
    for params in (SamplingParams(), SamplingParams(max_tokens=0, prompt_logprobs=1)):  # as the 8B
        with pytest.raises(RequestError, match="can only embed"):
            llm.generate("a", params)


@pytest.mark.parametrize(("prefix", "missing"), [("model.", "lm_head.weight"), ("", "norm.weight")])
def test_a_checkpoint_with_a_missing_tensor_is_still_refused(tmp_path: Path, prefix: str, missing: str) -> None:
    rewrite(write_model(tmp_path, tied=False), prefix=prefix, without=missing)
    with pytest.raises(CheckpointError, match=f"no file holds tensor '{missing}'"):
        load(tmp_path)
