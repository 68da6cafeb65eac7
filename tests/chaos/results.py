# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What came of all of it: one row for each fault and kind, and what went wrong with the command that shows it again."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import grpc
from accelerator_simulator.errors import SimulatorError
from hypothesis.errors import HypothesisException

from tests.chaos.errors import Broken
from tests.chaos.node import Node

#: Faults whose runs count themselves: each is a request.
COUNTED = ("fuzz-requests", "fuzz-configurations")
COLUMNS = ("leaked", "lost", "crash loops", "other")


@dataclass
class Row:
    """One line of the table."""

    fault: str
    kind: str
    runs: int = 0
    wrong: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COLUMNS, 0))
    seconds: float = 0.0

    @property
    def failed(self) -> int:
        return sum(self.wrong.values())


class Results:
    """Collects rows, and tells at once what went wrong. ``again`` makes the command that shows one case again."""

    def __init__(self, again: Callable[[str, str, int], str]) -> None:
        self.rows: list[Row] = []
        self._again = again

    def row(self, fault: str, kind: str) -> Row:
        for row in self.rows:
            if (row.fault, row.kind) == (fault, kind):
                return row
        self.rows.append(Row(fault, kind))
        return self.rows[-1]

    @contextmanager
    def case(self, node: Node, fault: str, kind: str, number: int, what: str) -> Iterator[None]:
        """Count one case; where it goes wrong, tell of it and begin anew with a clean node."""
        row, began = self.row(fault, kind), time.monotonic()
        try:
            yield
        except (AssertionError, OSError, grpc.RpcError, sqlite3.Error, SimulatorError, HypothesisException) as error:
            column = error.column if isinstance(error, Broken) else "other"
            row.wrong[column] += 1
            notes = "".join(f"{note}\n" for note in getattr(error, "__notes__", ()))  # what Hypothesis has shrunk it to
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
        """All rows."""
        lines = [("fault", "kind", "runs", *COLUMNS, "seconds")]
        lines += [
            (row.fault, row.kind, str(row.runs), *(str(row.wrong[name]) for name in COLUMNS), f"{row.seconds:.0f}")
            for row in self.rows
        ]
        widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column < 2 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(line, widths))
            ).rstrip()
            for line in lines
        )
