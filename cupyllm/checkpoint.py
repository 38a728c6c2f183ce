"""The tensors of a model folder: strict reading of safetensors files, converting while reading.

`Checkpoint` knows names, shapes, dtypes and bytes; which tensors a model needs is weights.py's subject. Nothing is
memory-mapped: reading goes through a buffer of a few hundred KB, so the process grows by the arrays it asked for only.
Pickle files (pytorch_model.bin) can run code when opened and are refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from cupyllm.errors import CheckpointError
from cupyllm.json_object import JsonObject, read_json_object
from cupyllm.number_formats import convert, numpy_type

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_MAX_HEADER_BYTES = 100_000_000
_CHUNK = 1 << 17  # elements converted at once: small enough to stay in the processor's cache
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}  # safetensors' names -> ours


@dataclass(frozen=True)
class _Tensor:
    """Where one tensor lies."""

    file: Path
    dtype: str  # safetensors' name
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


class Checkpoint:
    """The safetensors files of one folder. Every error names the file and, where there is one, the tensor."""

    def __init__(self, folder: Path, tensors: dict[str, _Tensor]) -> None:
        self.folder = folder
        self._tensors = tensors

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Check the files' headers without reading any weight.

        Raises CheckpointError for files that are missing, cut, damaged, of another format, or at odds with the index.
        """
        if (folder / SINGLE_FILE).exists():
            return cls(folder, _read_header(folder / SINGLE_FILE))
        if (folder / INDEX_FILE).exists():
            return cls(folder, _read_shards(read_json_object(folder / INDEX_FILE)))
        raise CheckpointError(_describe_missing_weights(folder))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._tensors))

    def file(self, name: str) -> Path:
        return self._tensors[name].file

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    @property
    def num_bytes(self) -> int:
        """Of all tensors together."""
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def tensor_bytes(self, name: str) -> int:
        return self._tensors[name].num_bytes

    def dtype(self, name: str) -> str:
        """The name "bfloat16", "float16" or "float32"; raises CheckpointError for any other type."""
        tensor = self._tensors[name]
        if tensor.dtype not in _DTYPES:
            supported = ", ".join(_DTYPES)
            raise CheckpointError(f"{tensor.file}: tensor {name!r} is {tensor.dtype}; supported are {supported}")
        return _DTYPES[tensor.dtype]

    def read_into(self, name: str, out: NDArray[Any]) -> None:
        """Fill `out`, which is contiguous and has the tensor's shape, converting to its dtype.

        `out` is float32, float16, or uint16 meaning bfloat16. Widening is exact; narrowing rounds to nearest even.
        Raises CheckpointError when the file has become shorter, or when a value does not fit into float16.
        """
        tensor = self._tensors[name]
        assert out.shape == tensor.shape, (name, out.shape, tensor.shape)
        assert out.flags.c_contiguous, name
        try:
            with tensor.file.open("rb", buffering=0) as stream:
                stream.seek(tensor.start)
                _copy(stream, self.dtype(name), out.reshape(-1))
        except EOFError:
            raise CheckpointError(f"{tensor.file}: the file ends inside tensor {name!r}") from None
        except FloatingPointError:
            raise CheckpointError(
                f"{tensor.file}: tensor {name!r} has values beyond float16's range; use dtype bfloat16 or float32"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{tensor.file}: tensor {name!r} cannot be read: {error.strerror}") from None


def _read_shards(index: JsonObject) -> dict[str, _Tensor]:
    """All tensors of a checkpoint in several files, which must hold exactly what the index says."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        index.fail("weight_map", "is not an object of tensor names and file names")
    for name, file_name in weight_map.items():
        if not isinstance(file_name, str) or not _is_plain_file_name(file_name):
            index.fail("weight_map", f"puts tensor {name!r} into {file_name!r}, not a .safetensors file in this folder")
    tensors: dict[str, _Tensor] = {}
    for file_name in sorted(set(weight_map.values())):
        path = index.file.parent / file_name
        for name, tensor in _read_header(path).items():
            if weight_map.get(name) != file_name:
                raise CheckpointError(f"{path}: holds tensor {name!r}, which {index.file.name} does not put there")
            tensors[name] = tensor
    for name in weight_map:
        if name not in tensors:
            raise CheckpointError(f"{index.file}: tensor {name!r} is not in its file {weight_map[name]}")
    return tensors


def _is_plain_file_name(name: str) -> bool:
    """No folder, no drive, no way up: only the name of a safetensors file."""
    return name.endswith(".safetensors") and not set(name) & set("/\\:\0") and not name.startswith(".")


def _describe_missing_weights(folder: Path) -> str:
    if not folder.is_dir():
        return f"{folder} is not a folder"
    others = sorted(
        path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors")
    )
    found = f"; {', '.join(others)} cannot be used, save the model as safetensors" if others else ""
    return f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}{found}"


def _read_header(path: Path) -> dict[str, _Tensor]:
    """Where each tensor of a file lies.

    Our own checks come first since they can name the tensor at fault; the safetensors library then checks the rest of
    the format: no gaps, no overlaps, nothing after the last tensor, known types, sizes that agree with the shapes.
    """
    try:
        with path.open("rb") as stream:
            file_size = stream.seek(0, 2)
            header_size = _header_size(path, stream, file_size)
            entries = json.loads(stream.read(header_size))
            tensors = _parse_entries(path, entries, data_start=8 + header_size)
        _check_sizes(tensors, file_size)
        with safe_open(path, framework="numpy"):
            return tensors
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist, but {INDEX_FILE} names it; download it again") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON: {error}") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path}: not a sound safetensors file: {error}; download it again") from None


def _header_size(path: Path, stream: BinaryIO, file_size: int) -> int:
    """The format begins with the header's length: 8 bytes, little endian."""
    stream.seek(0)
    header_size = int.from_bytes(stream.read(8), "little")
    if file_size < 8 or header_size > file_size - 8:
        raise CheckpointError(f"{path}: the header is {header_size} bytes long but the file only {file_size}")
    if header_size > _MAX_HEADER_BYTES:
        raise CheckpointError(
            f"{path}: the header is {header_size} bytes long; at most {_MAX_HEADER_BYTES} are allowed"
        )
    return header_size


def _parse_entries(path: Path, entries: Any, data_start: int) -> dict[str, _Tensor]:
    if not isinstance(entries, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    tensors = {}
    for name, entry in entries.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, stop) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            sound = all(type(number) is int and number >= 0 for number in (*shape, start, stop))
        except (TypeError, KeyError, ValueError):
            sound = False
        if not sound:
            raise CheckpointError(f"{path}: the header entry of tensor {name!r} is malformed")
        tensors[name] = _Tensor(path, dtype, shape, data_start + start, data_start + stop)
    return tensors


def _check_sizes(tensors: dict[str, _Tensor], file_size: int) -> None:
    """Each tensor lies inside the file and is as long as its shape and dtype say."""
    for name, tensor in tensors.items():
        if tensor.stop > file_size:
            problem = f"ends at byte {tensor.stop}, the file at byte {file_size}; download it again"
            raise CheckpointError(f"{tensor.file}: tensor {name!r} {problem}")
        if tensor.dtype in _DTYPES:
            expected = math.prod(tensor.shape) * numpy_type(_DTYPES[tensor.dtype]).itemsize
            if tensor.num_bytes != expected:
                problem = f"has {tensor.num_bytes} bytes, but its shape {tensor.shape} needs {expected}"
                raise CheckpointError(f"{tensor.file}: tensor {name!r} {problem}")


def _copy(stream: FileIO, dtype: str, out: NDArray[Any]) -> None:
    """Read `len(out)` elements of `dtype` and convert them to out's type, a chunk at a time."""
    if numpy_type(dtype) == out.dtype:
        _fill(stream, out)
        return
    chunk = np.empty(min(_CHUNK, len(out)), dtype=numpy_type(dtype))
    for start in range(0, len(out), _CHUNK):
        part = out[start : start + _CHUNK]
        elements = chunk[: len(part)]
        _fill(stream, elements)
        convert(elements, part)


def _fill(stream: FileIO, out: NDArray[Any]) -> None:
    """Fill an array's memory from an unbuffered stream, which may return less than asked for."""
    memory = out.view(np.uint8).data
    while memory:
        count = stream.readinto(memory)
        if not count:
            raise EOFError
        memory = memory[count:]
