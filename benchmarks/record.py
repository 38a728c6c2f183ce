"""How a benchmark ends: its rows (cupyllm/figures.py) as a table on the screen and as a JSON file."""

from __future__ import annotations

from pathlib import Path

from cupyllm.figures import HEAD, Row, write_record

__all__ = ["Row", "finish"]


def finish(rows: list[Row], json_path: Path | None) -> None:
    """Print the rows as a table and, where a path is given, write them as JSON."""
    print("\n".join([HEAD, *(row.line() for row in rows)]))
    if json_path is not None:
        write_record(json_path, rows)
