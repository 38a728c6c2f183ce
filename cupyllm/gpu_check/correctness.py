"""Every kernel against its twin, in both types and in every set of constants that is in use.

The examples are those of cupyllm/cuda/examples; here stand the sizes that bring each variant of a kernel about. A
kernel chooses some constants by how many multiprocessors the GPU has, so these sizes depend on it.

    python -m cupyllm.gpu_check.correctness

runs each kernel's first variants on the GPU, each array in memory of its own: what compute-sanitizer watches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from cupyllm.cuda import gemv
from cupyllm.cuda.examples import EXAMPLES, ExampleRun, Output
from cupyllm.cuda.examples.case import Place
from cupyllm.cuda.loader import KernelLoader
from cupyllm.errors import DeviceError
from cupyllm.figures import Row

DTYPES = ("bfloat16", "float16")
VOCABULARY = 151_936  # of Qwen2.5
Variant = dict[str, Any]  # keyword arguments of an example


def variants(num_multiprocessors: int) -> dict[str, list[Variant]]:
    """Keyword arguments of each kernel's example, the small ones first."""
    vocabularies: list[Variant] = [{}, {"R": 3, "N": VOCABULARY}]
    return {
        "adjust_logits": vocabularies,
        "advance_rows": [*_combine(dtype=DTYPES), {"R": 1, "page_size": 32}, {"R": 64, "C": 3584, "counted": False}],
        "argmax": vocabularies,
        "copy_pages": [{}, {"page_size": 32, "D": 128}],
        "count_tokens": [{}, {"N": VOCABULARY, "M": 30_000}],
        "draw": vocabularies,
        "embedding": _combine(dtype=(*DTYPES, "float32")),
        "fill_tokens": [{}, {"T": 1}],
        "gemv": _gemv(num_multiprocessors),
        "group_maxima": _combine(N=(1501, VOCABULARY), penalties=(False, True)),
        "paged_attention_decode": _decode_attention(),
        "paged_attention_prefill": _prefill_attention(),
        "rms_norm": [{}, {"T": 64, "C": 3584}, {"C": 1028, "scale": 1e-3}, {"scale": 1e4}],
        "rope_and_kv_write": [*_combine(dtype=DTYPES, D=(64, 128), norm=(True, False)), {"unused_rows": 1}],
        "round_rows": _combine(dtype=DTYPES),
        "silu_mul": [{}, {"T": 64, "I": 18944}, {"I": 300}],
        "skinny_gemm": _combine(dtype=DTYPES, T=(5, 16, 27, 64), around=("norm bias", "norm gate_up", "residual")),
        "tile_gemm": _tile_gemm(num_multiprocessors),
        "top_logprobs": vocabularies,
        "update_rows": [{}, {"N": 1}],
    }


def check_kernels(
    loader: KernelLoader, place: Place, chosen: Mapping[str, Sequence[Variant]]
) -> Iterator[tuple[Row, bool]]:
    """A row for each variant with the error of its worst output, and whether all outputs agree with the twin.

    Raises DeviceError naming the variant whose launch fails: after that a GPU runs nothing more in this process.
    """
    for kernel, kernel_variants in chosen.items():
        for variant in kernel_variants:
            options = " ".join(f"{key}={_short(value)}" for key, value in variant.items())
            name = f"correct.{kernel}{f'[{options}]' if options else ''}"
            run = _run(name, partial(EXAMPLES[kernel], loader, place, **variant))
            worst = max(run.outputs, key=_excess)
            yield Row(name, "of row", [worst.error], limit=f"<= {worst.tolerance:.3g}"), run.agrees


def first_variants(num_multiprocessors: int, count: int = 2) -> dict[str, list[Variant]]:
    """The first few of each kernel, which are the small ones."""
    return {kernel: found[:count] for kernel, found in variants(num_multiprocessors).items()}


def _run(name: str, example: Callable[[], ExampleRun]) -> ExampleRun:
    try:
        return example()
    except Exception as error:  # of whichever class CuPy has for it
        raise DeviceError(f"{name} cannot be run: {error}") from error


def _excess(output: Output) -> float:
    """How far an output is over its tolerance, so that the largest is the worst; NaN is the worst of all."""
    if output.agrees:
        return output.error / output.tolerance if output.tolerance else 0.0
    return float("inf")


def _combine(**choices: Sequence[Any]) -> list[Variant]:
    """Every combination of the choices."""
    return [dict(zip(choices, values, strict=True)) for values in product(*choices.values())]


def _gemv(num_multiprocessors: int) -> list[Variant]:
    """Rows of weight enough for each layout: gemv.geometry takes the first that fills the GPU."""
    found: list[Variant] = [{"dtype": dtype, "around": "residual"} for dtype in DTYPES]
    for dtype, around, (rows, k_warps) in product(DTYPES, ("norm bias", "norm gate_up"), gemv.LAYOUTS):
        outputs = gemv.WARPS // k_warps * rows // (2 if "gate_up" in around else 1)
        smallest = (rows, k_warps) == gemv.LAYOUTS[-1]
        blocks = num_multiprocessors if smallest else gemv.BLOCKS_WANTED * num_multiprocessors
        # K is just large enough for every warp to have work.
        found.append({"dtype": dtype, "around": around, "N": blocks * outputs, "K": 1832 if k_warps == 8 else 904})
    return found


def _tile_gemm(num_multiprocessors: int) -> list[Variant]:
    """The small tile for small products, the large one where it has a block for every multiprocessor."""
    arounds = ("norm bias", "norm gate_up", "residual")
    large = {"T": 250, "N": 64 * num_multiprocessors, "K": 72}  # two rows of tiles
    return [variant | sizes for sizes in ({}, large) for variant in _combine(dtype=DTYPES, around=arounds)]


def _decode_attention() -> list[Variant]:
    contexts = {"context_lens": (1, 17, 600, 5000)}
    plain = [variant | contexts for variant in _combine(dtype=DTYPES, D=(64, 128))]
    wide = _combine(dtype=DTYPES, D=(64, 128), H=(14,), KH=(1,))
    return [*plain, *wide, *_combine(dtype=DTYPES, H=(14,), KH=(2,)), *_combine(dtype=DTYPES, window=(100,))]


def _prefill_attention() -> list[Variant]:
    chunks = {"query_lens": (1, 40, 300), "context_lens": (33, 40, 700)}
    plain = [variant | chunks for variant in _combine(dtype=DTYPES, D=(64, 128))]
    return [*plain, *_combine(dtype=DTYPES, H=(14,), KH=(2,)), *_combine(dtype=DTYPES, window=(20,))]


def _short(value: Any) -> str:
    return "+".join(map(str, value)) if isinstance(value, tuple) else str(value).replace(" ", "+")


def main() -> int:
    """Run the first variants and print those that differ; returns 1 if some do."""
    from cupyllm.gpu_check.gpu import CupyGpu

    gpu = CupyGpu()
    gpu.give_each_array_its_own_memory()
    chosen = first_variants(gpu.loader.facts.num_multiprocessors)
    differing = [row.line() for row, agrees in check_kernels(gpu.loader, gpu.device, chosen) if not agrees]
    print("\n".join(differing))
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
