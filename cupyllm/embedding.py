"""What a checkpoint's embeddings are: how the hidden states of a text become one vector, and whether of length 1.

The folder of an embedding model says so in the files of sentence-transformers: modules.json lists what follows the
model, a Pooling with a config.json of its own and perhaps Normalize. Where there are no such files, the last token is
taken, as is usual for causal models, and the vector normalised, as OpenAI's are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cupyllm.errors import CheckpointError, RequestError
from cupyllm.json_object import read_json_object
from cupyllm.prompt_readout import Pooling

MODULES_FILE = "modules.json"
_POOLINGS: dict[str, Pooling] = {"lasttoken": "last", "mean": "mean"}
# The keys of a Pooling's config.json that switch a mode on, each with the name of the mode in newer files.
_MODE_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class EmbeddingRecipe:
    """How embeddings are made.

    pooling    how the last hidden states become one vector
    normalise  whether that is scaled to length 1
    problem    "", or what the checkpoint asks for that is not supported: then it embeds nothing
    """

    pooling: Pooling = "last"
    normalise: bool = True
    problem: str = ""

    def check(self, dimensions: int | None, hidden_size: int) -> None:
        """Raise RequestError where the checkpoint's embeddings, or so many dimensions of them, cannot be had."""
        if self.problem:
            raise RequestError(f"this model's embeddings need {self.problem}, which is not supported", param="model")
        if dimensions is not None and not 1 <= dimensions <= hidden_size:
            raise RequestError(f"dimensions must be from 1 to {hidden_size}, not {dimensions}", param="dimensions")

    def finish(self, pooled: np.ndarray, dimensions: int | None = None) -> np.ndarray:
        """The embedding of a pooled hidden state, (C,) float32: its first `dimensions`, normalised.

        Only models trained for it (Matryoshka Representation Learning, Kusupati et al., 2022) keep their meaning when
        they are cut, as Qwen3-Embedding does.
        """
        vector = pooled[:dimensions].astype(np.float64)
        if self.normalise:
            vector /= max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype(np.float32)


def read_embedding_recipe(folder: Path) -> EmbeddingRecipe:
    """The recipe that a model folder has. Raises CheckpointError for files that are damaged."""
    path = folder / MODULES_FILE
    if not path.exists():
        return EmbeddingRecipe()
    try:
        modules = [(str(module["type"]).rpartition(".")[2], str(module["path"])) for module in _read_list(path)]
    except (TypeError, KeyError):
        raise CheckpointError(f"{path} is not a list of modules with type and path") from None
    (_, *kinds), paths = zip(*modules, strict=True) if modules else ((None,), ())
    if kinds not in (["Pooling"], ["Pooling", "Normalize"]):
        return EmbeddingRecipe(problem=f"the modules {', '.join(kinds) or '(none)'} after the model")
    if Path(paths[1]).name != paths[1]:
        raise CheckpointError(f"{path}: {paths[1]!r} is not the name of a folder beside it")
    mode = _pooling_mode(folder / paths[1])
    if mode not in _POOLINGS:
        return EmbeddingRecipe(problem=f"the pooling {mode!r}")
    return EmbeddingRecipe(_POOLINGS[mode], normalise="Normalize" in kinds)


def _pooling_mode(folder: Path) -> str:
    """The name of the mode, or several joined with "+"; without any it is the mean, as in sentence-transformers."""
    config = read_json_object(folder / "config.json")
    if config.has("pooling_mode"):
        return str(config.get("pooling_mode")).lower()
    given = {key: config.flag(key, default=key == "pooling_mode_mean_tokens") for key in _MODE_KEYS}
    return "+".join(_MODE_KEYS[key] for key, is_on in given.items() if is_on)


def _read_list(path: Path) -> list[dict[str, object]]:
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(modules, list):
        raise CheckpointError(f"{path} is not a list")
    return modules
