"""What many times come to: three percentiles, and tables of such figures with one column a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Percentiles:
    """The 50th, 95th and 99th percentile of times in seconds, between neighbours linear."""

    p50: float
    p95: float
    p99: float


def percentiles(values: Sequence[float]) -> Percentiles | None:
    """The percentiles of `values`, None if there are none."""
    return Percentiles(*np.percentile(values, (50, 95, 99)).tolist()) if values else None


def milliseconds(times: Percentiles | None) -> str:
    """The three figures as text, "-" where there are none."""
    if times is None:
        return "-"
    values = [1e3 * seconds for seconds in (times.p50, times.p95, times.p99)]
    return " / ".join(f"{value:.1f}" if value < 99.95 else f"{value:.0f}" for value in values)


def side_by_side(columns: Sequence[Mapping[str, str]], heads: Sequence[str] = ()) -> str:
    """Every label of any column once, and beside it what each column says of it, "-" where it says nothing.

    Stands under `heads` where there are some: one for the labels, one for each column.
    """
    labels = list(dict.fromkeys(label for column in columns for label in column))
    lines = [list(heads)] if heads else []
    lines += [[label, *(column.get(label, "-") for column in columns)] for label in labels]
    widths = [max(len(cell) for cell in cells) for cells in zip(*lines, strict=True)]
    texts = ["  ".join([label.ljust(widths[0]), *map(str.rjust, cells, widths[1:])]) for label, *cells in lines]
    return "\n".join([*texts, "three values: p50 / p95 / p99"])
