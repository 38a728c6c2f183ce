"""From a config to a running engine: find the model, load it, size the cache. All that can be refused is refused
here."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from cupyllm.chat_template import ChatTemplate
from cupyllm.checkpoint import Checkpoint
from cupyllm.config import EngineConfig
from cupyllm.decode_graphs import DecodeGraphs
from cupyllm.device import Capture, Device
from cupyllm.embedding import EmbeddingRecipe, read_embedding_recipe
from cupyllm.engine import Engine
from cupyllm.errors import ConfigError
from cupyllm.hub import resolve_model
from cupyllm.kv_cache import KVCache, allocate_kv_cache, bytes_per_page
from cupyllm.model import make_model
from cupyllm.model_config import GenerationDefaults, ModelConfig, read_generation_defaults, read_model_config
from cupyllm.ops.select import Backend, make_backend
from cupyllm.structured.compiler import GuideCompiler
from cupyllm.tokenizer import Tokenizer
from cupyllm.weights import Upload, load_weights, weight_bytes


@dataclass(frozen=True)
class LoadedModel:
    """An engine with what turns text into its token ids and back, and the facts to show a user."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    embedding: EmbeddingRecipe
    folder: Path
    facts: tuple[tuple[str, str], ...]  # (what, value) lines of the start banner
    guides: GuideCompiler


@dataclass(frozen=True)
class CacheSize:
    """How many pages there are, how long a sequence may become, and why."""

    num_pages: int
    max_model_len: int
    reason: str
    cache_reason: str = ""  # how "auto" came to the size of the cache


def load_engine(config: EngineConfig, *, show_progress: bool = True) -> LoadedModel:
    """Load the model that `config` names and make an engine for it.

    Raises ConfigError, CheckpointError or DeviceError with one line that says what is wrong.
    """
    backend = make_backend(
        config.device,
        emulator_mode=config.emulator_mode,
        cpu_isa=config.cpu_isa,
        threads=config.threads,
        deterministic=config.deterministic,
    )
    folder = resolve_model(config.model)
    model_config = read_model_config(folder)
    backend.check_model(model_config, config.page_size)
    tokenizer = Tokenizer.from_folder(folder)
    chat_template = ChatTemplate.from_folder(folder, tokenizer)
    embedding = read_embedding_recipe(folder)
    use_defaults = config.generation_config == "auto"
    defaults = read_generation_defaults(folder) if use_defaults else GenerationDefaults()
    dtype = choose_dtype(config, model_config, backend)
    cache_dtype = choose_cache_dtype(config, dtype, backend)
    capture = choose_capture(config, backend)
    upload = choose_upload(config, model_config, backend)
    size = size_cache(config, model_config, dtype, cache_dtype, backend.device)

    vocab_limit = min(model_config.vocab_size, tokenizer.num_tokens)
    checkpoint = Checkpoint.open(folder)
    with tqdm(
        total=checkpoint.num_bytes,
        unit="B",
        unit_scale=True,
        desc="loading weights",
        leave=False,
        disable=not show_progress,
    ) as bar:
        weights = load_weights(
            checkpoint,
            model_config,
            dtype=dtype,
            upload=upload,
            progress=bar.update,
        )
    warm_ups = backend.warm_ups(model_config, dtype, cache_dtype, upload)
    for warm_up in tqdm(warm_ups, desc="preparing kernels", leave=False, disable=not (show_progress and warm_ups)):
        warm_up.run()
    engine = Engine(
        config,
        make_model(model_config, weights, backend.device, num_positions=size.max_model_len),
        make_cache(config, model_config, size, cache_dtype, backend.device),
        backend.ops,
        backend.device,
        max_model_len=size.max_model_len,
        vocab_limit=vocab_limit,
        defaults=defaults,
        capture=capture,
    )
    graphs = engine.runner.graphs
    captured = None if graphs is None else capture_at_start(graphs, config, backend.device, show_progress=show_progress)
    facts = _facts(config, model_config, backend, dtype, cache_dtype, size, graphs=captured)
    guides = GuideCompiler(tokenizer, model_config.end_token_ids, vocab_limit=vocab_limit)
    return LoadedModel(engine, tokenizer, chat_template, embedding, folder, facts, guides)


def _facts(
    config: EngineConfig,
    model: ModelConfig,
    backend: Backend,
    dtype: str,
    cache_dtype: str,
    size: CacheSize,
    *,
    graphs: str | None,
) -> tuple[tuple[str, str], ...]:
    pages, num_tokens = size.num_pages, size.num_pages * config.page_size
    gib = pages * bytes_per_page(model, config.page_size, cache_dtype) / 2**30
    return (
        ("model", f"{config.model} ({model.model_type}, {model.num_layers} layers)"),
        ("device", f"{backend.ops.name} ({backend.reason})"),
        ("dtype", f"{'int8, from ' if config.weights == 'int8' else ''}{dtype} (checkpoint: {model.dtype})"),
        (
            "cache",
            f"{pages} pages of {config.page_size} tokens = {num_tokens} tokens in {cache_dtype}, {gib:.3g} GiB"
            f"{size.cache_reason}",
        ),
        ("context", f"{size.max_model_len} tokens ({size.reason})"),
        *((("graphs", graphs),) if graphs else ()),
    )


def size_cache(config: EngineConfig, model: ModelConfig, dtype: str, cache_dtype: str, device: Device) -> CacheSize:
    """Pages that fit in kv_cache_gib, and the longest sequence that model, cache and config allow.

    Raises ConfigError when not even a short sequence fits, or max_model_len asks for more than there can be.
    """
    page_bytes = bytes_per_page(model, config.page_size, cache_dtype)
    gib, sum_shown = _cache_gib(config, model, dtype, device)
    num_pages = int(gib * 2**30) // page_bytes
    num_slots = num_pages * config.page_size
    if num_slots < 2:
        raise ConfigError(
            f"kv_cache_gib {gib:.3g}{sum_shown} holds no page: {config.page_size} tokens take {page_bytes} bytes"
        )
    limit = model.max_position_embeddings
    if config.max_model_len == "auto":
        longest = min(limit, num_slots)
        reason = "the model's own limit" if longest == limit else f"what the cache holds; the model could do {limit}"
        return CacheSize(num_pages, longest, reason, sum_shown)
    if config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is above the model's own limit of {limit}")
    if config.max_model_len > num_slots:
        needed = config.max_model_len / config.page_size * page_bytes / 2**30
        raise ConfigError(
            f"max_model_len {config.max_model_len} can never fit: kv_cache_gib {gib:.3g} holds {num_slots} tokens; "
            f"set kv_cache_gib to {needed:.3g} or more, or lower max_model_len"
        )
    return CacheSize(num_pages, config.max_model_len, "max_model_len of the config", sum_shown)


def make_cache(config: EngineConfig, model: ModelConfig, size: CacheSize, dtype: str, device: Device) -> KVCache:
    """The cache's arrays. Raises ConfigError where the memory has no room for them."""
    try:
        return allocate_kv_cache(device, model, num_pages=size.num_pages, page_size=config.page_size, dtype=dtype)
    except MemoryError:  # CuPy's own error is one, too
        gib = size.num_pages * bytes_per_page(model, config.page_size, dtype) / 2**30
        raise ConfigError(f"the memory has no room for a cache of {gib:.0f} GiB; lower kv_cache_gib") from None


def choose_dtype(config: EngineConfig, model: ModelConfig, backend: Backend) -> str:
    """The dtype of weights: what the config asks for, else the checkpoint's, else the backend's widest."""
    if config.dtype == "auto":
        return model.dtype if model.dtype in backend.dtypes else backend.dtypes[-1]
    if config.dtype not in backend.dtypes:
        supported = " or ".join(f'"{dtype}"' for dtype in ("auto", *backend.dtypes))
        raise ConfigError(f'dtype "{config.dtype}" is not supported on device "{config.device}"; use {supported}')
    return config.dtype


def choose_cache_dtype(config: EngineConfig, dtype: str, backend: Backend) -> str:
    """The dtype of keys and values, for weights of `dtype`."""
    supported = backend.cache_dtypes or (dtype,)
    if config.kv_cache_dtype == "auto":
        return supported[-1]
    if config.kv_cache_dtype not in supported:
        names = " or ".join(f'"{name}"' for name in ("auto", *supported))
        problem = f'is not supported on device "{config.device}" with weights in {dtype}'
        raise ConfigError(f'kv_cache_dtype "{config.kv_cache_dtype}" {problem}; use {names}')
    return config.kv_cache_dtype


def choose_capture(config: EngineConfig, backend: Backend) -> Capture | None:
    """What captures decode steps, or None when they are not to be captured."""
    if config.graphs is True and backend.capture is None:
        problem = "with deterministic true" if config.deterministic else f'on device "{config.device}"'
        raise ConfigError(
            f"graphs true is not supported {problem}; it needs device cuda or emulated, not deterministic"
        )
    wanted = backend.device.is_async if config.graphs == "auto" else config.graphs
    if config.graph_capture == "start" and not (wanted and backend.capture):
        raise ConfigError('graph_capture "start" needs graphs, which are off; set graphs to true')
    return backend.capture if wanted else None


def capture_at_start(graphs: DecodeGraphs, config: EngineConfig, device: Device, *, show_progress: bool) -> str:
    """Capture all decode steps now, if the config says so; returns what to say of them in the start banner."""
    if config.graph_capture == "lazy" or (config.graph_capture == "auto" and not device.is_async):
        return "decode steps are captured when they first occur"
    start = time.perf_counter()
    keys = tqdm(graphs.keys, desc="capturing decode steps", leave=False, disable=not show_progress)
    mib = sum(graphs.capture(key).num_bytes for key in keys) / 2**20
    return f"{len(graphs.keys)} kinds of decode step captured in {time.perf_counter() - start:.1f} s, {mib:.1f} MiB"


def choose_upload(config: EngineConfig, model: ModelConfig, backend: Backend) -> Upload:
    """How weights get from the host's arrays to what the ops take."""
    if config.weights != "int8":
        return backend.device.upload
    if backend.int8_upload is None:
        problem = f"is not supported on {backend.ops.name} ({backend.reason})"
        raise ConfigError(f'weights "int8" {problem}; use device "cpu" with numba installed')
    return backend.int8_upload(model)


def _cache_gib(config: EngineConfig, model: ModelConfig, dtype: str, device: Device) -> tuple[float, str]:
    """The cache's size in GiB; for "auto" what the weights leave of the free memory, but for a tenth."""
    if config.kv_cache_gib != "auto":
        return config.kv_cache_gib, ""
    free = device.free_bytes() / 2**30
    weights = weight_bytes(model, dtype, int8=config.weights == "int8") / 2**30
    left = 0.9 * free - weights
    sum_shown = f" (auto: 90% of {free:.3g} GiB free - {weights:.3g} GiB of weights)"
    if left <= 0:
        raise ConfigError(f"no memory is left for the cache{sum_shown}; set kv_cache_gib or choose a smaller model")
    return left, sum_shown
