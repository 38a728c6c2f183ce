"""Reads what the emulator must know from a kernel source, and turns the source into one that g++ accepts.

Three things change, none of which moves a line: `extern __shared__ T x[];` becomes a pointer to the launch's dynamic
shared memory, the whole text is put in an unnamed namespace, and one export per kernel is appended. The namespace gives
every name internal linkage; otherwise a `__shared__` variable in a template or inline function would be placed outside
the section that the runtime watches.

This is pattern matching, not a parser: a kernel made by a macro, or a template kernel, is not found.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .errors import KernelBuildError

_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)
_ALIGN = r"(?:(?:__align__|alignas)\s*\(\s*\w+\s*\)\s*)?"
_DYNAMIC_SHARED = re.compile(
    rf"extern\s+{_ALIGN}__shared__\s+{_ALIGN}([\w:]+(?:\s+[\w:]+)*?)\s+{_ALIGN}(\w+)\s*\[\s*\]\s*;"
)
_BOUNDS = r"(?:__launch_bounds__\s*\(((?:[^()]|\([^()]*\))*)\)\s*)?"
_KERNEL = re.compile(rf'extern\s+"C"\s+__global__\s+{_BOUNDS}void\s+{_BOUNDS}(\w+)\s*\(')


@dataclass(frozen=True)
class KernelText:
    """A kernel as written: its parameters' names and its largest block (a C++ expression)."""

    name: str
    parameters: tuple[str, ...]
    bounds: str


def without_comments(source: str) -> str:
    """The same text with comments blanked out, so that positions and line numbers stay."""

    def blank(match: re.Match[str]) -> str:
        text = match[0]
        return text if text.startswith('"') else re.sub(r"[^\n]", " ", text)

    return _COMMENT.sub(blank, source)


def _split_at_commas(text: str) -> list[str]:
    """Splits at commas outside of any brackets."""
    parts, depth, start = [], 0, 0
    for i, character in enumerate(text):
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _parameter_names(text: str, start: int) -> tuple[str, ...]:
    """Names in the parameter list that opens just before `start`."""
    depth, end = 1, start
    while depth and end < len(text):
        depth += (text[end] == "(") - (text[end] == ")")
        end += 1
    names = [re.findall(r"\w+", part) for part in _split_at_commas(text[start : end - 1])]
    return tuple(words[-1] for words in names if words and words != ["void"])


def find_kernels(source: str) -> tuple[KernelText, ...]:
    """All `extern "C" __global__` kernels of a source, in order."""
    text = without_comments(source)
    kernels = []
    for match in _KERNEL.finditer(text):
        bounds = match[1] or match[2] or "1024"
        kernels.append(KernelText(match[3], _parameter_names(text, match.end()), _split_at_commas(bounds)[0].strip()))
    return tuple(kernels)


def host_source(source: str, kernels: tuple[KernelText, ...], name: str) -> str:
    """The text that is given to g++.

    Raises `KernelBuildError` for dynamic shared memory declared outside of a function: as a global pointer it would be
    set once and be wrong in the next launch.
    """
    text = without_comments(source)
    for match in _DYNAMIC_SHARED.finditer(text):
        before = text[: match.start()]
        if before.count("{") == before.count("}"):
            line = before.count("\n") + 1
            raise KernelBuildError(
                f"{name}, text line {line}: declare `extern __shared__ {match[2]}[]` inside the kernel"
            )
    body = _DYNAMIC_SHARED.sub(r"\1* \2 = (\1*)emu_dynamic_shared();", text)
    exports = "".join(f"EMU_EXPORT_KERNEL({kernel.name}, {kernel.bounds})\n" for kernel in kernels)
    return f'namespace {{\n#line 1 "{name}.cu"\n{body}\n}}\n#line 1 "exports"\n{exports}'
