"""What the check needs is there: GPU, driver, CuPy and the libraries it compiles and multiplies with.

Each part is tried rather than looked up, since that is what decides. What is missing is said in one line with what to
install.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cupyllm.errors import DeviceError

_DRIVER_FILE = Path("/proc/driver/nvidia/version")
SANITIZER = "compute-sanitizer"


@dataclass(frozen=True)
class Environment:
    """What is there, and a line for each thing that is not."""

    facts: dict[str, str]
    has_cublas: bool
    missing: tuple[str, ...]


def look_around(cupy: Any, compile_probe: Callable[[], object]) -> Environment:
    """Try everything the check uses; `cupy` is the module, and `compile_probe` compiles a kernel.

    Raises DeviceError with what to install when kernels cannot be compiled: then nothing can be checked.
    """
    runtime = cupy.cuda.runtime
    cuda = runtime.runtimeGetVersion()
    wheel = f"pip install 'cupy-cuda{cuda // 1000}x[ctk]' brings it"
    facts = _gpu_facts(cupy) | {
        "driver": f"{driver_version() or 'version unknown'}, for CUDA up to {_version(runtime.driverGetVersion())}",
        "CUDA runtime": _version(cuda),
        "CuPy": cupy.__version__,
    }
    nvrtc, why = _try(lambda: cupy.cuda.nvrtc.getVersion())
    if nvrtc is None:
        raise DeviceError(f"the compiler NVRTC cannot be loaded ({why}); {wheel}")
    facts["NVRTC"] = ".".join(map(str, nvrtc))
    compiled, why = _try(compile_probe)
    if compiled is None:
        raise DeviceError(f"no kernel can be compiled ({why}); if a CUDA header is missing, {wheel}")
    missing = []
    product, why = _try(lambda: _product(cupy))
    if product is None:
        missing.append(f"cuBLAS cannot be used ({why}); the comparison with it is left out; {wheel}")
    if shutil.which(SANITIZER) is None:
        missing.append(f"{SANITIZER} is not on PATH and is left out; it comes with the CUDA toolkit")
    return Environment(facts, product is not None, tuple(missing))


def _gpu_facts(cupy: Any) -> dict[str, str]:
    device = cupy.cuda.Device()
    properties = cupy.cuda.runtime.getDeviceProperties(device.id)
    free, total = device.mem_info
    capability = str(device.compute_capability)
    return {
        "gpu": properties["name"].decode(),
        "compute capability": f"{capability[:-1]}.{capability[-1]}",
        "multiprocessors": str(properties["multiProcessorCount"]),
        "memory": f"{total / 2**30:.1f} GiB, {free / 2**30:.1f} free",
        "L2 cache": f"{properties['l2CacheSize'] / 2**20:.1f} MiB",
    }


def _product(cupy: Any) -> Any:
    """A small product of halves, which goes through cuBLAS."""
    ones = cupy.asarray(np.ones((16, 16), np.float16))
    product = cupy.asnumpy(cupy.matmul(ones, ones))
    if not (product == 16).all():
        raise DeviceError("a product of ones came out wrong")
    return product


def _try(action: Callable[[], Any]) -> tuple[Any, str]:
    """What the action returns, or None and the first line of the reason: a missing library shows as many classes."""
    try:
        return action(), ""
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return None, lines[0].rstrip(".")[:200]


def _version(number: int) -> str:
    """12090 is 12.9."""
    return f"{number // 1000}.{number % 1000 // 10}"


def driver_version() -> str:
    """The driver's own version, which CUDA does not tell; "" where Linux knows of no driver."""
    text = _DRIVER_FILE.read_text(encoding="utf-8") if _DRIVER_FILE.exists() else ""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""
