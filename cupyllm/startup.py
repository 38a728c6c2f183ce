"""From a config to a running engine: find the model, load it, size the cache. All that can be refused is refused
here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from cupyllm.chat_template import ChatTemplate
from cupyllm.checkpoint import Checkpoint
from cupyllm.config import EngineConfig
from cupyllm.engine import Engine
from cupyllm.errors import ConfigError
from cupyllm.hub import resolve_model
from cupyllm.kv_cache import allocate_kv_cache, bytes_per_page
from cupyllm.model import make_model
from cupyllm.model_config import GenerationDefaults, ModelConfig, read_generation_defaults, read_model_config
from cupyllm.ops.select import make_backend
from cupyllm.tokenizer import Tokenizer
from cupyllm.weights import load_weights


@dataclass(frozen=True)
class LoadedModel:
    """An engine with what turns text into its token ids and back, and the facts to show a user."""

    engine: Engine
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    folder: Path
    facts: tuple[tuple[str, str], ...]  # (what, value) lines of the start banner


@dataclass(frozen=True)
class CacheSize:
    """How many pages there are, how long a sequence may become, and why."""

    num_pages: int
    max_model_len: int
    reason: str


def load_engine(config: EngineConfig, *, show_progress: bool = True) -> LoadedModel:
    """Load the model that `config` names and make an engine for it.

    Raises ConfigError, CheckpointError or DeviceError with one line that says what is wrong.
    """
    backend = make_backend(config.device)
    folder = resolve_model(config.model)
    model_config = read_model_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    chat_template = ChatTemplate.from_folder(folder, tokenizer)
    use_defaults = config.generation_config == "auto"
    defaults = read_generation_defaults(folder) if use_defaults else GenerationDefaults()
    dtype = _choose_dtype(config)
    size = size_cache(config, model_config, dtype)

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
            upload=backend.device.upload,
            progress=lambda count: bar.update(count),
        )
    engine = Engine(
        config,
        make_model(model_config, weights, backend.device, num_positions=size.max_model_len),
        allocate_kv_cache(
            backend.device, model_config, num_pages=size.num_pages, page_size=config.page_size, dtype=dtype
        ),
        backend.ops,
        backend.device,
        max_model_len=size.max_model_len,
        vocab_limit=min(model_config.vocab_size, tokenizer.num_tokens),
        defaults=defaults,
    )
    facts = (
        ("model", f"{config.model} ({model_config.model_type}, {model_config.num_layers} layers)"),
        ("device", f"{backend.ops.name} ({backend.reason})"),
        ("dtype", f"{dtype} (checkpoint: {model_config.dtype})"),
        ("cache", f"{size.num_pages} pages of {config.page_size} tokens = {size.num_pages * config.page_size} tokens"),
        ("context", f"{size.max_model_len} tokens ({size.reason})"),
    )
    return LoadedModel(engine, tokenizer, chat_template, folder, facts)


def size_cache(config: EngineConfig, model: ModelConfig, dtype: str) -> CacheSize:
    """Pages that fit in kv_cache_gib, and the longest sequence that model, cache and config allow."""
    page_bytes = bytes_per_page(model, config.page_size, dtype)
    num_pages = int(config.kv_cache_gib * 2**30) // page_bytes
    num_slots = num_pages * config.page_size
    if num_slots < 2:
        raise ConfigError(
            f"kv_cache_gib {config.kv_cache_gib} holds no page: {config.page_size} tokens take {page_bytes} bytes"
        )
    limit = model.max_position_embeddings
    if config.max_model_len == "auto":
        if num_slots < limit:
            return CacheSize(num_pages, num_slots, f"what the cache holds; the model could do {limit}")
        return CacheSize(num_pages, limit, "the model's own limit")
    if config.max_model_len > limit:
        raise ConfigError(f"max_model_len {config.max_model_len} is above the model's own limit of {limit}")
    if config.max_model_len > num_slots:
        needed = config.max_model_len / config.page_size * page_bytes / 2**30
        raise ConfigError(
            f"max_model_len {config.max_model_len} can never fit: kv_cache_gib {config.kv_cache_gib} holds {num_slots} "
            f"tokens; set kv_cache_gib to {needed:.3g} or more, or lower max_model_len"
        )
    return CacheSize(num_pages, config.max_model_len, "max_model_len of the config")


def _choose_dtype(config: EngineConfig) -> str:
    if config.dtype in ("auto", "float32"):
        return "float32"
    raise ConfigError(f'dtype "{config.dtype}" is not supported on device "{config.device}"; use "auto" or "float32"')
