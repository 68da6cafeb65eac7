# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The results: one row per fault and kind, and each failure with the command that reproduces it."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import grpc
from accelerator_simulator.errors import SimulatorError
from hypothesis.errors import HypothesisException

from tests.chaos.errors import Broken
from tests.chaos.node import Node

#: Faults that count their own runs: each run is a request.
COUNTED = ("fuzz-requests", "fuzz-configurations")
COLUMNS = ("leaked", "lost", "crash loops", "other")


@dataclass
class Row:
    """One line of the table. With fewer runs than ``least`` it has failed."""

    fault: str
    kind: str
    runs: int = 0
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    seconds: float = 0.0
    least: int = 0

    @property
    def short(self) -> bool:
        """Return whether there were too few runs for a proof."""
        return self.runs < self.least

    @property
    def failed(self) -> bool:
        return self.short or any(self.wrong.values())


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write rows for the process that combines the table."""
    path.write_text(json.dumps([asdict(row) for row in rows]), encoding="utf-8")


def read_rows(path: Path) -> list[Row]:
    """Read the rows of ``write_rows``. Return an empty list for a missing or incomplete file."""
    try:
        return [Row(**each) for each in json.loads(path.read_text(encoding="utf-8"))]
    except (FileNotFoundError, ValueError):
        return []


def table(rows: Sequence[Row]) -> str:
    """Return the rows with a header, and with the floors if there are any."""
    with_floors = any(row.least for row in rows)
    lines = [("fault", "kind", "runs", *COLUMNS, "seconds", *(["floor"] if with_floors else []))]
    for row in rows:
        floor = f"short of {row.least}" if row.short else str(row.least or "")
        numbers = (str(row.runs), *(str(row.wrong[name]) for name in COLUMNS), f"{row.seconds:.0f}")
        lines.append((row.fault, row.kind, *numbers, *([floor] if with_floors else [])))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths))
        ).rstrip()
        for line in lines
    )


class Results:
    """A collector of rows that prints failures at once. ``again`` returns the command that reproduces one case."""

    def __init__(self, again: Callable[[str, str, int], str]) -> None:
        self.rows: list[Row] = []
        self._again = again

    def row(self, fault: str, kind: str, least: int = 0) -> Row:
        """Return the row of a fault and kind. A new row has the floor ``least``."""
        for row in self.rows:
            if (row.fault, row.kind) == (fault, kind):
                return row
        self.rows.append(Row(fault, kind, least=least))
        return self.rows[-1]

    @contextmanager
    def case(self, node: Node, fault: str, kind: str, number: int, what: str) -> Iterator[None]:
        """Count one case. After a failure report it and restart with a clean node."""
        row, began = self.row(fault, kind), time.monotonic()
        try:
            yield
        except (AssertionError, OSError, grpc.RpcError, sqlite3.Error, SimulatorError, HypothesisException) as error:
            column = error.column if isinstance(error, Broken) else "other"
            row.wrong[column] += 1
            notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))  # the shrunk example
            print(
                f"{column.upper()}: {fault}, {kind}, case {number}: {what}\n{type(error).__name__}: {error}\n{notes}"
                f"the driver's last lines:\n{node.said()}\nTo see it again: {self._again(fault, kind, number)}\n",
                flush=True,
            )
            node.begin_anew()
        finally:
            row.runs += fault not in COUNTED
            row.seconds += time.monotonic() - began

    def tell(self) -> None:
        """Print the last row."""
        print(self.table().splitlines()[-1], flush=True)

    def table(self) -> str:
        """Return all rows as a table."""
        return table(self.rows)
