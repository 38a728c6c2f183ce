"""The check from beginning to end: each part in turn, its figures to the report as they come."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from cupyllm.cuda.examples.case import Place
from cupyllm.errors import DeviceError
from cupyllm.gpu_check.correctness import check_kernels, variants
from cupyllm.gpu_check.decode import decode_context, decode_engine, decode_rows, needed_bytes
from cupyllm.gpu_check.environment import SANITIZER
from cupyllm.gpu_check.gpu import Gpu
from cupyllm.gpu_check.kernels import KernelCase, kernel_rows, pool_sizes
from cupyllm.gpu_check.limits import Limits, measure_limits
from cupyllm.gpu_check.linear_cases import linear_cases
from cupyllm.gpu_check.measure import Arrays
from cupyllm.gpu_check.other_cases import attention_cases, row_cases, sampling_cases
from cupyllm.gpu_check.plan import CheckPlan
from cupyllm.gpu_check.report import Report
from cupyllm.gpu_check.sanitizer import TOOLS, sanitize
from cupyllm.gpu_check.small_models import check_models
from cupyllm.model_config import ModelConfig

# Of the free memory; the rest is for what the launches allocate.
_POOL_SHARE = 0.5


@dataclass
class Check:
    """One run of the check. `clock` gives seconds; `start` is its reading at the beginning."""

    gpu: Gpu
    plan: CheckPlan
    report: Report
    clock: Callable[[], float]
    start: float
    models: Mapping[str, ModelConfig]  # name -> the shapes that are timed, smallest first

    def run(self, place: Place) -> bool:
        """All parts; returns whether everything that was compared agrees. `place` is where the examples live."""
        try:
            self._compare(place)
            self._sanitize()
            limits = self._time_kernels()
            for name, config in self.models.items():
                self._decode(name, config, limits)
            self.report.note(f"took {self.clock() - self.start:.0f} s")
        finally:
            self.report.write()
        return not self.report.wrong

    def _compare(self, place: Place) -> None:
        self.report.part("Kernels and small models against the reference: the largest error")
        chosen = variants(self.gpu.loader.facts.num_multiprocessors)
        chosen = {kernel: found[: self.plan.variants] for kernel, found in chosen.items()}
        for row, agrees in check_kernels(self.gpu.loader, place, chosen):
            self.report.add(row, agrees)
            if self._out_of_time("other variants of kernels"):
                return
        for row, agrees in check_models(self.gpu.loader, self.gpu.device):
            self.report.add(row, agrees)

    def _sanitize(self) -> None:
        if self.plan.sanitizer_s == 0 or shutil.which(SANITIZER) is None:
            return
        self.report.part(f"The examples under {SANITIZER}")
        for tool in TOOLS:
            found = sanitize(tool, limit_s=self.plan.sanitizer_s)
            if found.count is None:
                self.report.note(f"{SANITIZER} {tool}: {found.text}")
                continue
            self.report.add(found.row(), found.count == 0)
            if found.count:
                self.report.note(f"{SANITIZER} {tool}:\n{found.text}")

    def _time_kernels(self) -> Limits:
        cases = {name: list(self._cases(name, config)) for name, config in self.models.items()}
        num_elements, num_floats = self._pool_sizes(cases)
        arrays = Arrays.make(self.gpu, num_elements, num_floats)
        self.report.part("What this GPU can do at most, measured")
        limits = measure_limits(arrays, matrix_size=self.plan.matrix_size, repeats=self.plan.repeats)
        for row in limits.rows:
            self.report.add(row)
        self.report.part("Kernels in float16: time beside cuBLAS, and rate beside the measured limit")
        for case in [case for model_cases in cases.values() for case in model_cases]:
            if self._out_of_time("the other kernels"):
                break
            rows, host_bound = kernel_rows(arrays, limits, case, repeats=self.plan.repeats)
            for row in rows:
                self.report.add(row)
            if host_bound:
                self.report.note(f"{case.kernel}.{case.shape}: the host's launches are slower than the GPU")
        del arrays
        self.gpu.release()
        return limits

    def _cases(self, name: str, config: ModelConfig) -> Iterator[KernelCase]:
        yield from linear_cases(name, config, prompt_rows=self.plan.prompt_rows)
        yield from attention_cases(
            name, config, decodes=self.plan.decode_attention, prefills=self.plan.prefill_attention
        )
        yield from row_cases(name, config)
        yield from sampling_cases(name, config)

    def _pool_sizes(self, cases: dict[str, list[KernelCase]]) -> tuple[int, int]:
        """The sizes of the pools; models whose shapes take more than half of the memory are left out."""
        while True:
            sizes = pool_sizes([case for found in cases.values() for case in found], self.gpu.cache_bytes)
            num_elements = max(sizes[0], 2 * self.plan.matrix_size**2)
            needed = 2 * num_elements + 4 * sizes[1]
            free = self.gpu.device.free_bytes()
            if needed <= _POOL_SHARE * free:
                return num_elements, sizes[1]
            largest = list(cases)[-1]
            if len(cases) == 1:
                raise DeviceError(f"the GPU has {free / 2**30:.1f} GiB free; the shapes of {largest} need twice "
                                  f"{needed / 2**30:.1f} GiB")  # fmt: skip
            del cases[largest]
            self.report.note(f"kernels on the shapes of {largest} are left out: {free / 2**30:.1f} GiB are free")

    def _decode(self, name: str, config: ModelConfig, limits: Limits) -> None:
        plan, most = self.plan, max(self.plan.batch_sizes)
        context = decode_context(plan.prompt_tokens, plan.steps, plan.repeats)
        needed, free = needed_bytes(config, most, context), self.gpu.device.free_bytes()
        if needed > free:
            self.report.note(
                f"decoding with {name} is left out: it needs {needed / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free"
            )
            return
        if self._out_of_time(f"decoding with {name}"):
            return
        self.report.part(f"Decoding with {name}, {config.dtype}, random weights, after {plan.prompt_tokens} tokens")
        engine = decode_engine(self.gpu, config, batch_size=most, context=context)
        for row in decode_rows(
            engine,
            name,
            limits,
            batch_sizes=plan.batch_sizes,
            prompt_tokens=plan.prompt_tokens,
            steps=plan.steps,
            runs=plan.repeats,
            clock=self.clock,
        ):
            self.report.add(row)
        del engine
        self.gpu.release()

    def _out_of_time(self, left_out: str) -> bool:
        """Whether the time is over; then says what is left out."""
        over = self.clock() - self.start > self.plan.total_s
        if over:
            self.report.note(f"{left_out} are left out: {self.plan.total_s:.0f} s have passed")
        return over
