"""Settings: one flat JSON object, read into a frozen dataclass.

Every key can stand in the file and on the command line (`--key value`). An unknown key is an error that names the
nearest known one, a value of the wrong kind is an error that names the key: nothing is dropped. What "auto" means
is resolved where the facts are known (engine.py) and printed at start with the reason.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import types
import typing
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin

from cupyllm.errors import ConfigError

DEVICES = ("auto", "reference", "cpu", "emulated", "cuda")
DTYPES = ("auto", "float32", "float16", "bfloat16")
CPU_ISAS = ("auto", "avx512_bf16", "avx512", "avx2", "portable")


@dataclass(frozen=True)
class EngineConfig:
    """What the engine needs: the model, where it runs, and the limits of cache and batch.

    model                  a folder, "demo" (bundled), or a hub name such as "Qwen/Qwen2.5-0.5B-Instruct"
    device                 "auto", "reference" (NumPy), "cpu", "emulated" (CUDA kernels on the CPU) or "cuda"
    dtype                  "auto" (the checkpoint's where the device can, float32 in NumPy), "float32", "float16" or
                           "bfloat16"
    kv_cache_dtype         of keys and values: "auto" (that of the weights; float32 on the CPU), "float32", "float16" or
                           "bfloat16"
    threads                on device "cpu": how many threads compute; "auto" is one for each physical core
    cpu_isa                on device "cpu": the instruction set of its kernels, "avx512_bf16", "avx512", "avx2",
                           "portable", or "auto" for the first of these that the processor has
    weights                "as stored", or "int8" to quantise the matrices while loading (device "cpu"): half the memory
                           of bf16 and up to twice the speed, at some cost in quality (docs/cpu.md)
    emulator_mode          on device "emulated": "fast", or "check" to report every wrong access (much slower)
    kv_cache_gib           size of the KV cache in GiB (2**30 bytes); "auto": what the weights leave of the free memory
    page_size              token positions in a page
    max_model_len          longest prompt + output in tokens; "auto" is the model's own limit, or the cache's if smaller
    max_decode_batch_size  sequences that run at the same time
    max_prefill_batch_size sequences whose prompt is worked on in one step
    max_step_tokens        tokens in one step: decode rows first, then prompt chunks
    max_waiting            sequences that may wait; a request that would make it more is refused
    prefix_cache           keep pages of finished sequences and reuse them for prompts that begin the same way
    overlap                plan the next step while the device computes this one, and read its tokens a step late;
                           "auto" does where the device computes by itself
    deterministic          give a prompt the same logits to the last bit alone, in any batch, in chunks and after
                           preemption; slower, except on device "cpu", whose kernels do so anyway
    graphs                 capture each kind of decode step once and replay it with one call, on device "cuda" or
                           "emulated"; "auto" does on "cuda"
    graph_capture          when that is done: "start", before the first request, "lazy", when a kind of step first
                           occurs, or "auto": at the start on "cuda", else lazily
    generation_config      "auto": generation_config.json gives the defaults of sampling; "none": it is not read for
                           that
    seed                   makes requests without a seed reproducible; null draws fresh randomness
    """

    model: str = "demo"
    device: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    threads: int | Literal["auto"] = "auto"
    cpu_isa: str = "auto"
    weights: Literal["as stored", "int8"] = "as stored"
    emulator_mode: Literal["fast", "check"] = "fast"
    kv_cache_gib: float | Literal["auto"] = 2.0
    page_size: int = 16
    max_model_len: int | Literal["auto"] = "auto"
    max_decode_batch_size: int = 32
    max_prefill_batch_size: int = 8
    max_step_tokens: int = 512
    max_waiting: int = 256
    prefix_cache: bool = True
    overlap: bool | Literal["auto"] = "auto"
    deterministic: bool = False
    graphs: bool | Literal["auto"] = "auto"
    graph_capture: Literal["auto", "start", "lazy"] = "auto"
    generation_config: str = "auto"
    seed: int | None = None

    def __post_init__(self) -> None:
        _check_kinds(self)
        _require(self.model != "", "model", self.model, "a folder, 'demo' or a hub name")
        _require(self.device in DEVICES, "device", self.device, f"one of {', '.join(DEVICES)}")
        _require(self.dtype in DTYPES, "dtype", self.dtype, f"one of {', '.join(DTYPES)}")
        _require(self.kv_cache_dtype in DTYPES, "kv_cache_dtype", self.kv_cache_dtype, f"one of {', '.join(DTYPES)}")
        _require(
            self.threads == "auto" or self.threads >= 1,
            "threads",
            self.threads,
            '"auto" or a whole number of 1 or more',
        )
        _require(self.cpu_isa in CPU_ISAS, "cpu_isa", self.cpu_isa, f"one of {', '.join(CPU_ISAS)}")
        _require(
            self.kv_cache_gib == "auto" or self.kv_cache_gib > 0,
            "kv_cache_gib",
            self.kv_cache_gib,
            '"auto" or a number above 0',
        )
        _require(1 <= self.page_size <= 1024, "page_size", self.page_size, "a whole number from 1 to 1024")
        _require(
            self.max_model_len == "auto" or self.max_model_len >= 2,
            "max_model_len",
            self.max_model_len,
            '"auto" or a whole number of 2 or more',
        )
        for key in ("max_decode_batch_size", "max_prefill_batch_size", "max_step_tokens", "max_waiting"):
            _require(getattr(self, key) >= 1, key, getattr(self, key), "a whole number of 1 or more")
        _require(
            self.max_step_tokens >= self.max_decode_batch_size,
            "max_step_tokens",
            self.max_step_tokens,
            f"at least max_decode_batch_size ({self.max_decode_batch_size}), so that every decode fits in a step",
        )
        _require(
            self.generation_config in ("auto", "none"), "generation_config", self.generation_config, '"auto" or "none"'
        )
        _require(
            self.seed is None or 0 <= self.seed < 2**63, "seed", self.seed, "null or a whole number from 0 to 2**63-1"
        )


@dataclass(frozen=True)
class ServerConfig(EngineConfig):
    """The engine's settings and those of the HTTP server around it.

    served_model_name  the name clients use; null is the last part of `model`
    host, port         where to listen
    api_key_env        name of the environment variable that holds the API key(s), comma separated; keys are required
                       only when that variable is set
    cors_origins       origins a browser may call from; an empty list turns CORS off
    strict_parameters  true: an unknown request field is refused; false: it is ignored and logged
    drain_seconds      how long a stopping server lets running requests finish
    watchdog_seconds   a step that takes longer makes /health say 503
    max_body_bytes     largest request body; a larger one is refused with 413
    live_view          serve the live page at / and the engine's steps at /live/steps
    log_level          "debug", "info", "warning" or "error"
    log_format         of the log on stderr: "text", or "json" for one JSON object a line
    trace              a file to write steps and sequences to while they run, for ui.perfetto.dev; null writes none
    """

    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_env: str = "CUPYLLM_API_KEY"
    cors_origins: tuple[str, ...] = ()
    strict_parameters: bool = True
    drain_seconds: float = 30.0
    watchdog_seconds: float = 60.0
    max_body_bytes: int = 8 * 2**20
    live_view: bool = True
    log_level: str = "info"
    log_format: Literal["text", "json"] = "text"
    trace: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _require(self.served_model_name != "", "served_model_name", self.served_model_name, "null or a name")
        _require(0 <= self.port <= 65535, "port", self.port, "a whole number from 0 to 65535 (0: any free port)")
        _require(self.drain_seconds >= 0, "drain_seconds", self.drain_seconds, "a number of 0 or more")
        _require(self.watchdog_seconds > 0, "watchdog_seconds", self.watchdog_seconds, "a number above 0")
        _require(self.max_body_bytes >= 1024, "max_body_bytes", self.max_body_bytes, "a whole number of 1024 or more")
        _require(self.trace != "", "trace", self.trace, "null or a file")
        levels = ("debug", "info", "warning", "error")
        _require(self.log_level in levels, "log_level", self.log_level, f"one of {', '.join(levels)}")


ConfigT = TypeVar("ConfigT", bound=EngineConfig)


def load_config(kind: type[ConfigT], path: Path | None = None, overrides: dict[str, Any] | None = None) -> ConfigT:
    """Read a JSON config file, lay `overrides` over it and check the result. Raises ConfigError."""
    values: dict[str, Any] = {}
    if path is not None:
        values.update(_read_json_object(path))
    values.update(overrides or {})
    known = [field.name for field in dataclasses.fields(kind)]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(known)}"
            raise ConfigError(f"unknown config key {key!r}{hint}")
    if isinstance(values.get("cors_origins"), list):
        values["cors_origins"] = tuple(values["cors_origins"])
    return kind(**values)


def parse_overrides(kind: type[EngineConfig], arguments: Sequence[str]) -> dict[str, Any]:
    """Turn ["--port", "8001", "--device=cpu"] into {"port": 8001, "device": "cpu"}, typed as the key is.

    A value is read as JSON where the key is not a string (numbers, true, null, lists), else taken as it stands.
    """
    overrides: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"expected --key value, found {word!r}")
        key, equals, value = word[2:].partition("=")
        if not equals:
            if not rest:
                raise ConfigError(f"--{key} needs a value")
            value = rest.pop(0)
        key = key.replace("-", "_")
        overrides[key] = _parse_value(kind, key, value)
    return overrides


def _parse_value(kind: type[EngineConfig], key: str, value: str) -> Any:
    annotation = typing.get_type_hints(kind).get(key)
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    # "--served_model_name 7" is a name, "--max_model_len auto" did not parse above and stays text.
    wants_text = annotation is not None and _fits("", annotation) and not _fits(parsed, annotation)
    return value if wants_text or annotation is str else parsed


def _read_json_object(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"config file {path} cannot be read: {error.strerror}") from None
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"config file {path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"config file {path} must hold one JSON object of keys and values")
    return values


def _check_kinds(config: EngineConfig) -> None:
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if not _fits(value, hints[field.name]):
            raise ConfigError(
                f"config key {field.name!r} cannot be {value!r}: expected {spell_kind(hints[field.name])}"
            )


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a JSON value is of the annotated kind; a bool is no number, a whole number is a float."""
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in get_args(annotation))
    if origin is Literal:
        return value in get_args(annotation)
    if origin is tuple:
        return isinstance(value, tuple) and all(isinstance(part, str) for part in value)
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, annotation)


def spell_kind(annotation: Any) -> str:
    """What a value of this type is called in messages: "a whole number or null"."""
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(spell_kind(part) for part in get_args(annotation))
    if origin is Literal:
        return " or ".join(json.dumps(part) for part in get_args(annotation))
    if origin is tuple:
        return "a list of strings"
    names = {int: "a whole number", float: "a number", str: "a string", bool: "true or false", type(None): "null"}
    return names[annotation]


def _require(holds: bool, key: str, value: Any, expected: str) -> None:
    if not holds:
        raise ConfigError(f"config key {key!r} cannot be {value!r}: expected {expected}")
