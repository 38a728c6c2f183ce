"""cupyllm serves Qwen models over the OpenAI API; LLM is the same engine without a server."""

from __future__ import annotations

from cupyllm.answer_batch import CompletionOutput, RequestOutput
from cupyllm.beam_search import BeamParams
from cupyllm.config import EngineConfig
from cupyllm.llm import LLM
from cupyllm.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "BeamParams", "CompletionOutput", "EngineConfig", "RequestOutput", "SamplingParams"]
