"""How much of each part the check does: all of it in under eight minutes, or quickly."""

from __future__ import annotations

from dataclasses import dataclass

SMALL_MODEL, LARGE_MODEL = "qwen2.5-0.5b", "qwen2.5-7b"


@dataclass(frozen=True)
class CheckPlan:
    """The sizes of a check. Times are limits: what does not fit is left out and said."""

    models: tuple[str, ...]  # whose shapes are timed
    variants: int | None  # of each kernel that are compared with the twin; None: all
    sanitizer_s: float  # for each tool of compute-sanitizer; 0: left out
    repeats: int  # runs of each figure
    matrix_size: int
    prompt_rows: int
    decode_attention: tuple[tuple[int, int], ...]  # (sequences, context)
    prefill_attention: tuple[tuple[int, int], ...]  # (queries, context)
    batch_sizes: tuple[int, ...]
    prompt_tokens: int
    steps: int  # of a run of decoding
    total_s: float  # nothing new is begun after this


FULL = CheckPlan(
    models=(SMALL_MODEL, LARGE_MODEL),
    variants=None,
    sanitizer_s=60.0,
    repeats=7,
    matrix_size=8192,
    prompt_rows=2048,
    decode_attention=((1, 4096), (1, 32768), (8, 4096), (64, 1024)),
    prefill_attention=((2048, 2048), (512, 8192)),
    batch_sizes=(1, 8, 64),
    prompt_tokens=512,
    steps=32,
    total_s=420.0,
)
QUICK = CheckPlan(
    models=(SMALL_MODEL,),
    variants=3,
    sanitizer_s=0.0,
    repeats=3,
    matrix_size=4096,
    prompt_rows=512,
    decode_attention=((1, 4096), (64, 1024)),
    prefill_attention=((512, 512),),
    batch_sizes=(1, 8, 64),
    prompt_tokens=128,
    steps=16,
    total_s=120.0,
)
