"""/v1/embeddings: the request, and the vectors as they are sent."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field

from cupyllm.api.protocol.prompts import Prompts, read_prompts
from cupyllm.api.protocol.shared import Ignored, NotYet, StrictModel
from cupyllm.errors import RequestError

MAX_INPUTS = 2048  # OpenAI's


class EmbeddingRequest(StrictModel):
    """Texts, or token ids, to be turned into vectors."""

    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[
        int | None, Field(ge=1, description="keep only the first ones; for models trained to be cut")
    ] = None
    add_special_tokens: Annotated[bool, Field(description="what tokenizer.json puts around a text")] = True
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0

    truncate_prompt_tokens: Annotated[Any, NotYet()] = None

    user: Ignored = None

    def inputs(self) -> list[str | list[int]]:
        """What is to be embedded. Raises RequestError naming the place of what is neither text nor token ids."""
        inputs = read_prompts(self.input, "input")
        if len(inputs) > MAX_INPUTS:
            raise RequestError(f"input may hold at most {MAX_INPUTS}, not {len(inputs)}", param="input")
        return inputs


def encoded(vector: np.ndarray, encoding_format: str) -> list[float] | str:
    """A float32 vector as JSON has it: a list, or the base64 of its little-endian bytes."""
    if encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    numbers: list[float] = vector.tolist()
    return numbers
