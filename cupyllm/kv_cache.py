"""The arrays behind the pages: for every layer, the keys and the values of all slots."""

from __future__ import annotations

from dataclasses import dataclass

from cupyllm.device import Array, Device
from cupyllm.model_config import ModelConfig

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class KVCache:
    """keys[layer] and values[layer] are (P, page_size, KH, D); slot = page * page_size + offset is a row of them."""

    keys: tuple[Array, ...]
    values: tuple[Array, ...]
    num_pages: int
    page_size: int


def bytes_per_page(config: ModelConfig, page_size: int, dtype: str) -> int:
    """Bytes that one page takes over all layers, keys and values."""
    return 2 * config.num_layers * page_size * config.num_kv_heads * config.head_size * DTYPE_BYTES[dtype]


def allocate_kv_cache(device: Device, config: ModelConfig, *, num_pages: int, page_size: int, dtype: str) -> KVCache:
    """All pages, zeroed: memory of other programs never enters an answer."""
    shape = (num_pages, page_size, config.num_kv_heads, config.head_size)
    keys = tuple(device.zeros(shape, dtype) for _ in range(config.num_layers))
    values = tuple(device.zeros(shape, dtype) for _ in range(config.num_layers))
    return KVCache(keys, values, num_pages, page_size)
