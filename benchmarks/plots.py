"""The plots of report.py, one a record: NAME.svg of results/NAME.json, small and the same for the same figures."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Rows = list[dict[str, Any]]

matplotlib.rcParams.update({"svg.hashsalt": "cupyllm", "svg.fonttype": "none", "font.size": 9})


def draw_plots(records: dict[str, dict[str, Any]], folder: Path) -> None:
    """Draw every record that there is a plot for."""
    folder.mkdir(exist_ok=True)
    for name, record in records.items():
        draw = PLOTS.get(name.split(".")[0])
        if draw is None:
            continue
        figure = Figure(figsize=(7, 3.2), layout="constrained")
        draw(figure.subplots(), record["rows"])
        figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})


def draw_decode(axes: Axes, rows: Rows) -> None:
    """Share of the memory's rate over the context, a line for each batch size."""
    lines: dict[int, list[tuple[int, float]]] = {}
    for row in rows:
        if found := re.fullmatch(r"decode\.batch(\d+)\.context(\d+)", row["name"]):
            lines.setdefault(int(found[1]), []).append((int(found[2]), row["ratio"]))
    for batch, points in sorted(lines.items()):
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=f"batch {batch}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="context, tokens", ylabel="share of the memory's read rate", ylim=(0, None))
    axes.axhline(1.0, color="grey", linewidth=0.8)
    _finish(axes)


def draw_prefill(axes: Axes, rows: Rows) -> None:
    """Tokens a second over the length of a prompt, beside transformers."""
    own = _points(rows, r"prefill\.(\d+)", "value")
    together = _points(rows, r"prefill\.batch8\.(\d+)", "value")
    peer = _points(rows, r"peer\.transformers\.bfloat16\.prefill\.(\d+)", "peer_value")
    for label, points in (("one prompt", own), ("8 prompts", together), ("transformers, bfloat16", peer)):
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="prompt, tokens", ylabel="tokens/s", ylim=(0, None))
    _finish(axes)


def draw_peers(axes: Axes, rows: Rows) -> None:
    """Output tokens a second of each load: ours, then each peer's in turns with it."""
    bars: dict[str, dict[str, float]] = {}
    for row in rows:
        if found := re.fullmatch(r"peers\.\w+\.(\w+)\.output_tokens_per_s", row["name"]):
            bars.setdefault("cupyllm", {})[found[1]] = row["value"]
            bars.setdefault(row["peer"], {})[found[1]] = row["peer_value"]
    _bars(axes, bars)


def draw_serve(axes: Axes, rows: Rows) -> None:
    """Output tokens a second of each run."""
    values = {
        found[1]: row["value"]
        for row in rows
        if (found := re.fullmatch(r"serve\.(.+)\.output_tokens_per_s", row["name"]))
    }
    _bars(axes, {"cupyllm": values})


def draw_startup(axes: Axes, rows: Rows) -> None:
    """Seconds of each kind of start."""
    rows = [row for row in rows if row["unit"] == "s"]
    names = [row["name"].removeprefix("startup.") for row in rows]
    bars = axes.barh(names, [row["value"] for row in rows])
    axes.bar_label(bars, fmt="%.2f s", padding=2)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.invert_yaxis()


PLOTS: dict[str, Callable[[Axes, Rows], None]] = {
    "decode": draw_decode,
    "peers": draw_peers,
    "prefill": draw_prefill,
    "serve": draw_serve,
    "startup": draw_startup,
}


def _points(rows: Rows, pattern: str, key: str) -> list[tuple[int, float]]:
    found = ((re.fullmatch(pattern, row["name"]), row[key]) for row in rows)
    return sorted((int(match[1]), value) for match, value in found if match)


def _bars(axes: Axes, bars: dict[str, dict[str, float]]) -> None:
    """Groups of bars: engine -> load -> value."""
    loads = list(dict.fromkeys(load for values in bars.values() for load in values))
    width = 0.8 / max(1, len(bars))
    for place, (engine, values) in enumerate(bars.items()):
        positions = [number + (place + 0.5) * width - 0.4 for number in range(len(loads))]
        drawn = axes.bar(positions, [values.get(load, 0.0) for load in loads], width, label=engine)
        axes.bar_label(drawn, fmt="%.0f", padding=1)
    axes.set_xticks(range(len(loads)), loads)
    axes.set(ylabel="output tokens/s")
    _finish(axes)


def _finish(axes: Axes) -> None:
    axes.grid(axis="y", linewidth=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False)
