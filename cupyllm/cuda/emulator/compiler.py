"""Compiles a kernel source with g++ into a shared library, and keeps the result in the user's cache folder.

The library holds the kernel and the emulator's runtime. It is loaded once per OS thread, each time from its own copy of
the file, because a copy is the simplest way to give every OS thread its own static variables (see README.md).

Files appear under their final name only when they are complete (written beside it, then renamed), so several processes
can share the folder. The name is a hash of everything that decides the contents, the CPU model included: the code is
compiled for the very machine.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from cupyllm.errors import DeviceError

from .errors import KernelBuildError

Mode = Literal["fast", "check"]

_HERE = Path(__file__).parent
_HEADER = _HERE / "kernel_side" / "cuda_on_cpu.h"
_RUNTIME = _HERE / "runtime" / "runtime.h"
_COMMON_FLAGS = (
    *("-std=c++20", "-march=native", "-fPIC", "-fvisibility=hidden", "-w", f"-I{_HERE / 'stub'}"),
    "-fno-strict-aliasing",  # kernels read arrays through other types
    "-fno-threadsafe-statics",  # __shared__ variables are statics; guards would be data races
    "-fno-optimize-sibling-calls",  # a tail call would hide the line that made it
    *("-fno-crossjumping", "-fno-tree-tail-merge"),  # would merge calls of two lines into one
    "-fstack-clash-protection",  # touches every page of a large frame, so that it cannot jump over the guard page
    "-fno-exceptions",
    "-U_FORTIFY_SOURCE",
)
_LINES = ("-g1", "-gdwarf-4")  # older addr2line mixes up file names in version 5
_KERNEL_FLAGS: dict[Mode, tuple[str, ...]] = {
    "fast": ("-O2", *_LINES),
    "check": (
        *("-O1", *_LINES, "-fsanitize=thread"),
        "-fno-tree-sra",  # would split a 16-byte load and hide its alignment
        "-fsanitize=bounds,alignment,shift,integer-divide-by-zero,signed-integer-overflow,float-cast-overflow",
    ),
}
_RUNTIME_FLAGS: dict[Mode, tuple[str, ...]] = {"fast": ("-O2", "-DEMU_CHECK=0"), "check": ("-O2", "-DEMU_CHECK=1")}
_WORKING_FOLDER = "/kernel"  # stands in the debug information instead of the cache folder

_KEPT_OPTIONS = ("-D", "-U", "-I")
_OPTIONS_FOR_GPUS = (  # they choose GPU code and mean nothing here
    *("-std=", "--std=", "-arch=", "--gpu-architecture=", "-use_fast_math", "--use_fast_math", "--fmad=", "-lineinfo"),
    *("--generate-line-info", "--ptxas-options=", "--maxrregcount=", "-default-device", "--extra-device-vectorization"),
    *("--device-as-default-execution-space", "--restrict"),
)


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/cupyllm/emulator, by default under ~/.cache; created if missing."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "cupyllm" / "emulator"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DeviceError(f"cannot create the emulator's cache folder {folder}: {error.strerror}") from None
    return folder


@functools.cache
def compiler() -> tuple[str, str]:
    """Path of g++ and its version; raises `DeviceError` if there is none or it is too old."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        message = (
            f"the CUDA emulator runs on Linux on x86-64 and aarch64, not on {sys.platform} on {platform.machine()}"
        )
        raise DeviceError(message)
    path = shutil.which("g++")
    install = "install g++ 12 or later (Debian, Ubuntu: apt-get install g++)"
    if path is None:
        raise DeviceError(f"the CUDA emulator compiles kernels with g++, which was not found; {install}")
    answer = subprocess.run([path, "-dumpfullversion", "-dumpmachine"], capture_output=True, text=True)
    version = " ".join(answer.stdout.split())
    major = re.match(r"\d+", version)
    if major is None or int(major[0]) < 12:
        raise DeviceError(f"the CUDA emulator cannot use {path}, version {version or 'unknown'!r}; {install}")
    return path, version


@functools.cache
def _machine() -> str:
    """What -march=native depends on."""
    text = Path("/proc/cpuinfo").read_text()
    return "\n".join(sorted(set(re.findall(r"^(?:model name|CPU part|flags|Features)\s*:.*$", text, re.MULTILINE))))


@functools.cache
def _emulator_text() -> str:
    return "\0".join(path.read_text() for path in sorted(_HERE.rglob("*.h")))


def _hash(*parts: str) -> str:
    whole = "\0".join([*parts, compiler()[1], _machine(), _emulator_text(), _WORKING_FOLDER, *_COMMON_FLAGS])
    return hashlib.sha256(whole.encode()).hexdigest()[:24]


def host_options(options: tuple[str, ...]) -> tuple[str, ...]:
    """The options that matter on the CPU; raises `KernelBuildError` for one that is not known to be harmless."""
    for option in options:
        if not option.startswith(_KEPT_OPTIONS + _OPTIONS_FOR_GPUS):
            raise KernelBuildError(
                f"option {option!r} is not known to the emulator; known are -D, -U, -I and GPU code options"
            )
    return tuple(option for option in options if option.startswith(_KEPT_OPTIONS))


def _create(path: Path, produce: Callable[[Path], None]) -> Path:
    """Has `produce` write a temporary file beside `path` and moves it there, unless `path` exists."""
    if path.exists():
        return path
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=path.suffix)
    except OSError as error:
        message = f"cannot write to the emulator's cache folder {path.parent}: {error.strerror}; set XDG_CACHE_HOME"
        raise DeviceError(message) from None
    os.close(handle)
    try:
        produce(Path(temporary))
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _run_compiler(what: str, arguments: list[str], text: str | None = None) -> None:
    folder = cache_folder()
    command = [compiler()[0], *_COMMON_FLAGS, f"-fdebug-prefix-map={folder}={_WORKING_FOLDER}", *arguments]
    result = subprocess.run(command, input=text, capture_output=True, text=True, cwd=folder)
    if result.returncode:
        first = next((line for line in result.stderr.splitlines() if "error:" in line), result.stderr.strip()[-300:])
        raise KernelBuildError(f"{what} does not compile for the CPU: {first}", log=result.stderr)


def _build_runtime(mode: Mode) -> Path:
    path = cache_folder() / f"runtime-{_hash(*_RUNTIME_FLAGS[mode])}.o"
    arguments = [*_RUNTIME_FLAGS[mode], "-c", "-x", "c++", str(_RUNTIME), "-o"]
    return _create(path, lambda out: _run_compiler("the emulator's runtime", [*arguments, str(out)]))


def build(text: str, options: tuple[str, ...], mode: Mode, name: str) -> Path:
    """Compiles a prepared source (source.py); returns the library, from the cache if it is there.

    Raises `KernelBuildError` with the compiler's first error, `DeviceError` if there is no g++ or no cache folder.
    """
    flags = [*_KERNEL_FLAGS[mode], *host_options(options)]

    def produce(out: Path) -> None:
        obj = out.with_suffix(".o")
        try:
            _run_compiler(name, [*flags, "-include", str(_HEADER), "-c", "-x", "c++", "-", "-o", str(obj)], text)
            # Linked without -fsanitize: the hooks are the runtime's own.
            _run_compiler(name, ["-shared", "-o", str(out), str(obj), str(_build_runtime(mode))])
        finally:
            obj.unlink(missing_ok=True)

    return _create(cache_folder() / f"{_hash(text, *flags)}.so", produce)


def copy_for_thread(library: Path, number: int) -> Path:
    """The copy of a library that the OS thread `number` loads."""
    if number == 0:
        return library

    def produce(out: Path) -> None:
        shutil.copyfile(library, out)

    return _create(library.with_name(f"{library.stem}-{number}.so"), produce)


def source_frames(library: Path, offset: int) -> tuple[str, ...]:
    """Source positions "file:line" of an instruction, innermost first; empty if binutils' addr2line is missing."""
    tool = shutil.which("addr2line")
    if tool is None or offset == 0:
        return ()
    command = [tool, "-i", "-e", str(library), hex(offset)]
    lines = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    frames = [
        line.split(" ")[0].removeprefix(f"{_WORKING_FOLDER}/") for line in lines if not line.startswith(str(_HERE))
    ]
    return tuple(frame for frame in frames if not frame.startswith("?") and not frame.startswith("exports:"))
