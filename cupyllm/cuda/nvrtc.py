"""NVIDIA's real compiler on a machine without a GPU: a kernel's text to a binary, its resources and its machine code.

NVRTC and ptxas come as the wheel nvidia-cuda-nvrtc, the headers as nvidia-cuda-runtime, the disassembler as
nvidia-cuda-nvdisasm; none of them needs a driver. What a kernel takes (registers, spills, shared memory) is in ptxas'
own log.

    python -m cupyllm.cuda.nvrtc --table benchmarks/KERNELS.md

compiles every kernel in all its constant sets for every architecture, writes the table of what they take, and ends
with an error when a kernel spills, takes more registers than it may, or lacks an instruction it should have.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import importlib.util
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from types import ModuleType

from cupyllm.cuda.loader import compile_error, define_options, source_of
from cupyllm.errors import DeviceError

ARCHS = (70, 75, 80, 86, 89, 90, 100, 120)
# nvdisasm of CUDA 13 no longer reads sm_70.
DISASSEMBLED_ARCHS = ARCHS[1:]
_INSTALL = "install nvidia-cuda-nvrtc-cu12, nvidia-cuda-runtime-cu12 and nvidia-cuda-nvdisasm"


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel for one architecture: the binary, and what ptxas says it needs of a multiprocessor."""

    name: str
    arch: int
    cubin: bytes
    registers: int
    spill_bytes: int
    stack_bytes: int
    static_shared: int


def kernel_names() -> list[str]:
    """Every kernel in the folder, by name."""
    return sorted(
        Path(str(file)).stem for file in resources.files("cupyllm.cuda").iterdir() if file.name.endswith(".cu")
    )


def launch_module(name: str) -> ModuleType:
    """The launch module beside <name>.cu, with the parts that README.md lists."""
    return importlib.import_module(f"cupyllm.cuda.{name}")


def compile_options(constants: Mapping[str, int], arch: int) -> tuple[str, ...]:
    """What decides a kernel's binary, beside its text."""
    return (f"-arch=sm_{arch}", "-std=c++17", "-ftz=true", *define_options(constants))  # CuPy always adds -ftz=true


class Nvrtc:
    """The compiler library. Raises DeviceError when its wheels are not installed."""

    @cached_property
    def library(self) -> ctypes.CDLL:
        files = sorted(_wheel_folder("cuda_nvrtc/lib").glob("libnvrtc.so.*"))
        if not files:
            raise DeviceError(f"the NVRTC wheel holds no libnvrtc.so; {_INSTALL}")
        return ctypes.CDLL(str(files[-1]))

    @cached_property
    def version(self) -> tuple[int, int]:
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self.library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        return major.value, minor.value

    def compile(
        self, name: str, constants: Mapping[str, int], arch: int, *, source: str | None = None
    ) -> CompiledKernel:
        """One kernel with its constants for one architecture. Raises DeviceError with file, line and message.

        `source` is the whole text of a kernel that does not live here.
        """
        include = f"-I{_wheel_folder('cuda_runtime/include')}"
        options = (*compile_options(constants, arch), include, "--ptxas-options=-v")
        cubin, log = self._compile_text(name, source or source_of(name), options)
        return CompiledKernel(
            name=name,
            arch=arch,
            cubin=cubin,
            registers=_number(r"Used (\d+) registers", log),
            spill_bytes=_number(r"(\d+) bytes spill stores", log) + _number(r"(\d+) bytes spill loads", log),
            stack_bytes=_number(r"(\d+) bytes stack frame", log),
            static_shared=_number(r"(\d+) bytes smem", log),
        )

    def _compile_text(self, name: str, source: str, options: tuple[str, ...]) -> tuple[bytes, str]:
        """Source text -> (cubin, log)."""
        program = ctypes.c_void_p()
        create = self.library.nvrtcCreateProgram
        self._check(create(ctypes.byref(program), source.encode(), f"{name}.cu".encode(), 0, None, None))
        try:
            array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            failed = self.library.nvrtcCompileProgram(program, len(options), array)
            log = self._text(program, "nvrtcGetProgramLog").decode().rstrip("\0")
            if failed:
                raise compile_error(name, log)
            return self._text(program, "nvrtcGetCUBIN"), log
        finally:
            self.library.nvrtcDestroyProgram(ctypes.byref(program))

    def _text(self, program: ctypes.c_void_p, getter: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self.library, f"{getter}Size")(program, ctypes.byref(size)))
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self.library, getter)(program, buffer))
        return buffer.raw

    def _check(self, status: int) -> None:
        if status:
            self.library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise DeviceError(f"NVRTC: {self.library.nvrtcGetErrorString(status).decode()}")


def disassemble(kernel: CompiledKernel) -> str:
    """The kernel's machine code as text (SASS). Raises DeviceError without the nvdisasm wheel."""
    program = next(iter(_wheel_folder("").glob("cu*/bin/nvdisasm")), None)
    if program is None:
        raise DeviceError(f"nvdisasm is not installed; {_INSTALL}")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.cubin)
        file.flush()
        result = subprocess.run([program, "-c", file.name], capture_output=True, text=True, check=False)
    if result.returncode:
        raise DeviceError(f"nvdisasm cannot read {kernel.name} for sm_{kernel.arch}: {result.stderr.strip()[:200]}")
    return result.stdout


def _wheel_folder(part: str) -> Path:
    """A folder of NVIDIA's wheels, which all share the namespace package `nvidia`."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        if (Path(root) / part).is_dir():
            return Path(root) / part
    raise DeviceError(f"no wheel of NVIDIA's provides nvidia/{part}; {_INSTALL}")


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0


def main() -> None:
    from cupyllm.cuda.kernel_table import write_table

    parser = argparse.ArgumentParser(prog="python -m cupyllm.cuda.nvrtc", description="Compile every kernel.")
    parser.add_argument("--table", type=Path, required=True, help="the Markdown file to write")
    problems = write_table(parser.parse_args().table)
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
