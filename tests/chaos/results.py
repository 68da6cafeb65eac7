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
FUZZ_FAULTS = ("fuzz-requests", "fuzz-configurations")
COLUMNS = ("leaked", "lost", "crash loops", "other")


@dataclass
class Row:
    """One line of the table. With fewer runs than ``minimum`` it has failed."""

    fault: str
    kind: str
    runs: int = 0
    problems: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    seconds: float = 0.0
    minimum: int = 0

    @property
    def is_below_minimum(self) -> bool:
        """Return whether there were fewer runs than the minimum."""
        return self.runs < self.minimum

    @property
    def has_failed(self) -> bool:
        return self.is_below_minimum or any(self.problems.values())


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
    """Return the rows with a header, and with the minimums if rows have them."""
    has_minimums = any(row.minimum for row in rows)
    lines = [("fault", "kind", "runs", *COLUMNS, "seconds", *(["minimum"] if has_minimums else []))]
    for row in rows:
        minimum_text = f"short of {row.minimum}" if row.is_below_minimum else str(row.minimum or "")
        numbers = (str(row.runs), *(str(row.problems[name]) for name in COLUMNS), f"{row.seconds:.0f}")
        lines.append((row.fault, row.kind, *numbers, *([minimum_text] if has_minimums else [])))
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

    def __init__(self, repeat_command: Callable[[str, str, int], str]) -> None:
        self.rows: list[Row] = []
        self._repeat_command = repeat_command

    def row(self, fault: str, kind: str, minimum: int = 0) -> Row:
        """Return the row of a fault and kind. A new row has the minimum ``minimum``."""
        for row in self.rows:
            if (row.fault, row.kind) == (fault, kind):
                return row
        self.rows.append(Row(fault, kind, minimum=minimum))
        return self.rows[-1]

    @contextmanager
    def case(self, node: Node, fault: str, kind: str, number: int, what: str) -> Iterator[None]:
        """Count one case. After a failure report it and restart with a clean node."""
        row, began = self.row(fault, kind), time.monotonic()
        try:
            yield
        except (AssertionError, OSError, grpc.RpcError, sqlite3.Error, SimulatorError, HypothesisException) as error:
            column = error.column if isinstance(error, Broken) else "other"
            row.problems[column] += 1
            notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))  # the shrunk example
            print(
                f"{column.upper()}: {fault}, {kind}, case {number}: {what}\n{type(error).__name__}: {error}\n{notes}"
                f"the driver's last lines:\n{node.log_tail()}\nTo repeat it: {self._repeat_command(fault, kind, number)}\n",
                flush=True,
            )
            node.reset_after_failure()
        finally:
            row.runs += fault not in FUZZ_FAULTS
            row.seconds += time.monotonic() - began

    def print_last_row(self) -> None:
        """Print the last row."""
        print(self.table().splitlines()[-1], flush=True)

    def table(self) -> str:
        """Return all rows as a table."""
        return table(self.rows)
