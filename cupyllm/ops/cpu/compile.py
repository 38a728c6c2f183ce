"""Compiling: one decorator for kernels, and where the machine code is kept from one start to the next.

numba keeps a kernel's code on disk until the file of that kernel changes, but does not see a change in a function that
the kernel calls. So all code lies in a folder named by what all of it depends on: every source file of this package,
and the versions of numba and llvmlite. (numba itself adds the processor's kind.)
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import llvmlite
import numba
from numba.extending import intrinsic, overload

F = TypeVar("F", bound=Callable[..., Any])


@cache
def cache_folder() -> Path:
    """Where compiled kernels are kept: below NUMBA_CACHE_DIR where it is set, else in the user's cache folder.

    Where that cannot be written, a folder of this process alone.
    """
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = os.environ.get("NUMBA_CACHE_DIR") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "cupyllm" / digest.hexdigest()[:16]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:  # nobody else may write where code is read from, so no fixed place in a shared folder will do
        return Path(tempfile.mkdtemp(prefix="cupyllm-"))


def kernel() -> Callable[[F], F]:
    """Compile the function on its first call and keep the code on disk. It runs without Python's lock.

    Where it is made by a factory, it may only use numbers of the factory's: functions would have another identity in
    every process, and the code on disk would never be found again. No fast-math: sums have the order that is written.
    """

    def compile_lazily(function: F) -> F:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(cache_folder())  # read when the decorator runs, and only then
        try:
            compiled: F = numba.njit(nogil=True, cache=True, error_model="numpy")(function)
        finally:
            numba.config.CACHE_DIR = before
        return compiled

    return compile_lazily


def part(function: F) -> F:
    """A function that kernels call and that is compiled into them, for the types and the constants of each call.

    A whole number that is constant where it is called (`LANES`) is so inside too.
    """
    return _overloaded(function, fastmath=False)


def part_in_any_order(function: F) -> F:
    """A part whose sum or maximum may be taken in an order of the compiler's. Only for loops of a constant length, so
    that it is the same order for all data.
    """
    return _overloaded(function, fastmath={"reassoc", "nnan", "nsz"})


def part_by_type(choose: Callable[..., Callable[..., Any]]) -> Callable[[F], F]:
    """A part that is one of several functions: the one that `choose` names for the types of the arguments."""

    def decorate(function: F) -> F:
        overload(function, strict=False, prefer_literal=True, jit_options={"error_model": "numpy"})(choose)
        return function

    return decorate


def _overloaded(function: F, **options: Any) -> F:
    jit_options = {"error_model": "numpy", **options}
    overload(function, strict=False, prefer_literal=True, jit_options=jit_options)(lambda *arguments: function)
    return function


def instruction(function: Callable[..., Any]) -> Any:
    """A function that kernels call and that writes LLVM IR; whole numbers written in the call are its constants."""
    return intrinsic(prefer_literal=True)(function)
