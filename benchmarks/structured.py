"""What structured output costs: the vocabulary once, compiling a form, and the mask before every token.

    python benchmarks/structured.py --model FOLDER --json benchmarks/results/structured.json

Only the tokenizer and the config of the model are read. Figures, each over several rounds:

    structured.vocabulary_s       giving the library the vocabulary, once in a process, with its first form
    structured.compile_ms.*       a form that was not compiled before, trial steps included
    structured.start_us           a guide for one more answer
    structured.mask_us.*          mask and advance along a valid answer, mean of its tokens
    structured.mask_us.*.p99      99 in 100 of its tokens cost less

All of it is processor time, so that what else runs on the machine counts little. xgrammar does the same in turn, over
the same answers, where it is installed; it needs transformers and torch.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from record import Row, finish

from cupyllm.hub import resolve_model
from cupyllm.model_config import read_model_config
from cupyllm.structured.compiler import GuideCompiler
from cupyllm.structured.grammar import json_schema_grammar
from cupyllm.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ITEM = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 50}},
        "state": {"enum": [f"value number {number}" for number in range(100)]},
    },
    "required": ["tags", "state"],
    "additionalProperties": False,
}
KINDS = [ITEM, {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"}]
VALUES = [{"tags": ["red", "größer"], "state": "value number 42"}, "Some text, which goes on.", 4711, -2.5, True]
KEYS = {f"field_{number}": number % len(KINDS) for number in range(100)}
LARGE = {
    "type": "object",
    "properties": {key: KINDS[kind] for key, kind in KEYS.items()},
    "required": list(KEYS),
    "additionalProperties": False,
}
LARGE_ANSWER = {key: VALUES[kind] for key, kind in KEYS.items()}
# name -> (schema, an answer that is valid by it)
FORMS: dict[str, tuple[dict[str, Any], Any]] = {
    "small": (PERSON, {"name": "Grace Hopper", "age": 85}),
    "large": (LARGE, LARGE_ANSWER),
    "object": ({"type": "object"}, {"answer": LARGE_ANSWER}),
}


class Library(Protocol):
    """One way to do it."""

    def compile(self, schema: dict[str, Any]) -> Any: ...

    def start(self, compiled: Any) -> tuple[Callable[[], object], Callable[[int], object]]:
        """(make the mask, advance by a token) of a new answer."""


class Own:
    def __init__(self, folder: Path) -> None:
        tokenizer, config = Tokenizer.from_folder(folder), read_model_config(folder)
        limit = min(tokenizer.num_tokens, config.vocab_size)
        self._guides = GuideCompiler(tokenizer, config.end_token_ids, vocab_limit=limit)
        self._words = np.zeros(-(-limit // 32), np.uint32)
        self.clock = time.process_time()
        self._guides.prepare()

    def compile(self, schema: dict[str, Any]) -> Any:
        return self._guides.compile(json_schema_grammar(schema))

    def start(self, compiled: Any) -> tuple[Callable[[], object], Callable[[int], object]]:
        guide = compiled.start()
        return lambda: guide.allow(self._words), guide.advance


class XGrammar:
    def __init__(self, folder: Path) -> None:
        import xgrammar
        from transformers import AutoTokenizer

        config = read_model_config(folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self._library = xgrammar
        self.clock = time.process_time()
        info = xgrammar.TokenizerInfo.from_huggingface(
            tokenizer, vocab_size=config.vocab_size, stop_token_ids=list(config.end_token_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(info, cache_enabled=False)
        self._words = xgrammar.allocate_token_bitmask(1, config.vocab_size)

    def compile(self, schema: dict[str, Any]) -> Any:
        return self._compiler.compile_json_schema(json.dumps(schema))

    def start(self, compiled: Any) -> tuple[Callable[[], object], Callable[[int], object]]:
        matcher = self._library.GrammarMatcher(compiled)
        return lambda: matcher.fill_next_token_bitmask(self._words), matcher.accept_token


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="checkpoint folder or hub name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the figures here")
    arguments = parser.parse_args(words)
    folder = resolve_model(arguments.model)
    kinds = [Own, XGrammar] if has_xgrammar() else [Own]
    measured: list[dict[str, list[float]]] = [{} for _ in kinds]
    for number in range(arguments.rounds):
        for kind, figures in zip(kinds, measured, strict=True):
            for name, value in one_round(kind, folder, number).items():
                figures.setdefault(name, []).append(value)
    own, *peers = measured
    finish([row(name, runs, peers) for name, runs in own.items()], arguments.json)
    return 0


def has_xgrammar() -> bool:
    try:
        import transformers  # noqa: F401
        import xgrammar  # noqa: F401
    except ImportError:
        return False
    return True


def one_round(kind: type[Own] | type[XGrammar], folder: Path, number: int) -> dict[str, float]:
    """Every figure once, by name."""
    library = kind(folder)
    figures = {"structured.vocabulary_s": time.process_time() - library.clock}
    tokenizer = Tokenizer.from_folder(folder)
    for name, (schema, answer) in FORMS.items():
        compiled, seconds = timed(lambda s=schema: library.compile(s | {"description": f"round {number}"}))
        figures[f"structured.compile_ms.{name}"] = seconds * 1e3
        if name == "small":
            figures["structured.start_us"] = timed(lambda c=compiled: library.start(c))[1] * 1e6
        microseconds = walk(library, compiled, tokenizer.encode(json.dumps(answer, ensure_ascii=False)))
        figures[f"structured.mask_us.{name}"] = statistics.fmean(microseconds)
        figures[f"structured.mask_us.{name}.p99"] = float(np.percentile(microseconds, 99))
    return figures


def walk(library: Library, compiled: Any, token_ids: list[int]) -> list[float]:
    """Microseconds for mask and advance, of every token of an answer."""
    mask, advance = library.start(compiled)
    microseconds = []
    for token_id in token_ids:
        start = time.process_time()
        mask()
        accepted = advance(token_id)
        microseconds.append((time.process_time() - start) * 1e6)
        assert accepted is not False, "the answer is not valid"
    return microseconds


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = work()
    return result, time.process_time() - start


def row(name: str, runs: list[float], peers: list[dict[str, list[float]]]) -> Row:
    unit = {"vocabulary_s": "s", "compile_ms": "ms", "start_us": "us", "mask_us": "us"}[name.split(".")[1]]
    return Row(name, unit, runs, "xgrammar" if peers else None, peers[0][name] if peers else [])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
