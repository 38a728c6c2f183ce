"""Figures as they come: each printed at once and kept for the JSON file, so that a run that is killed still tells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cupyllm.figures import HEAD, Row, write_record


@dataclass
class Report:
    """What the check has found so far. `json_file` is written again after every part."""

    json_file: Path | None = None
    machine_facts: Mapping[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # names of the rows that do not hold

    def part(self, title: str) -> None:
        """Begin a part: its title and the table's head; what came before is written."""
        self.write()
        print(f"\n{title}\n{HEAD}", flush=True)

    def add(self, row: Row, holds: bool = True) -> None:
        """A figure; `holds` says whether it is as it must be."""
        self.rows.append(row)
        if not holds:
            self.wrong.append(row.name)
        print(row.line() + ("" if holds else "   WRONG"), flush=True)

    def note(self, text: str) -> None:
        """Something that a reader of the figures must know."""
        self.notes.append(text)
        print(f"note: {text}", flush=True)

    def write(self) -> None:
        """Write the JSON file, if there is one."""
        if self.json_file is not None:
            write_record(self.json_file, self.rows, machine_facts=self.machine_facts, notes=self.notes)
