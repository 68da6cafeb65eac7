# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run several nodes in parallel: each kind of kill, each fault, and each kind of fuzzing has its own node.

Each node is this program again for one row of the table. Its output has its name as a prefix, and the rows are combined
at the end.
"""

from __future__ import annotations

import argparse
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.chaos import kill, node_namespaces
from tests.chaos.results import Row, read_rows, table
from tests.chaos.runner import FUZZING, faults, requested_faults
from tests.chaos.vendor import Vendor

#: Command line options that each node gets unchanged.
FORWARDED_OPTIONS = (
    "vendor",
    "seed",
    "runs",
    "least",
    "seconds",
    "cases",
    "away",
    "requests",
    "least_requests",
    "fuzz_seconds",
)
#: The start of each node's own table, which is not printed: all rows are in one table.
TABLE = "Chaos of seed"
END_SECONDS = 30.0


@dataclass(frozen=True)
class TableRow:
    """One row: a fault, and for kills the kind of claim."""

    fault: str
    kind: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.fault, self.kind)))


class RunningNode:
    """A running node, and its output."""

    def __init__(self, table_row: TableRow, options: argparse.Namespace, folder: Path) -> None:
        self.table_row, self.rows = table_row, folder / f"{table_row.name}.json"
        log = options.log.with_name(f"{options.log.stem}-{table_row.name}{options.log.suffix}")
        words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in FORWARDED_OPTIONS]
        words += [f"--faults={table_row.fault}", f"--kinds={table_row.kind}", f"--rows={self.rows}", f"--log={log}"]
        words += [] if options.case is None else [f"--case={options.case}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=node_namespaces.end_with_parent,
        )
        self.began = time.monotonic()
        self._incomplete_line, self._reached_table = b"", False

    def fileno(self) -> int:
        """Return the descriptor of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read(self) -> bool:
        """Print the complete lines of its output. Return False at its end."""
        data = os.read(self.fileno(), 65536)
        lines = (self._incomplete_line + data).split(b"\n")
        self._incomplete_line = lines.pop() if data else b""
        for line in lines:
            text = line.decode(errors="replace")
            self._reached_table = self._reached_table or text.startswith(TABLE)
            if text and not self._reached_table:
                print(f"[{self.table_row.name}] {text}", flush=True)
        return bool(data)

    def result(self) -> list[Row]:
        """Return its rows after its end. A node without rows has failed."""
        status = self.process.wait(END_SECONDS)
        rows = read_rows(self.rows)
        if rows and (status == 0 or any(row.has_failed for row in rows)):
            return rows
        print(f"[{self.table_row.name}] ended with {status} and without a table", flush=True)
        failed = Row(self.table_row.fault, self.table_row.kind, seconds=time.monotonic() - self.began)
        failed.problems["other"] += 1
        return [*rows, failed]

    def end(self) -> None:
        """End it with all its child processes."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def requested_rows(options: argparse.Namespace, vendor: Vendor) -> list[TableRow]:
    """Return the requested parts in the order of the table."""
    wanted, kinds = requested_faults(options, vendor)
    found = [TableRow(kill.FAULT, kind.name) for kind in vendor.kinds if kill.FAULT in wanted and kind.name in kinds]
    found += [TableRow(fault.name) for fault in faults(vendor, options.away) if fault.name in wanted]
    return found + [TableRow(name) for name in FUZZING if name in wanted]


@contextmanager
def ending_nodes(running_nodes: list[RunningNode]) -> Iterator[None]:
    """End the running running_nodes when this process gets a signal to end, or on an error."""
    node_namespaces.exit_on_signals()
    try:
        yield
    finally:
        for running_node in running_nodes:
            running_node.end()


def run(options: argparse.Namespace, vendor: Vendor) -> int:
    """Run the requested parts on ``options.parallel`` nodes at a time, print the table, and return the exit status."""
    requested = requested_rows(options, vendor)
    # The longest parts begin first, so that they are not alone at the end.
    waiting = sorted(requested, key=lambda table_row: table_row.fault not in FUZZING)
    running: list[RunningNode] = []
    rows: dict[TableRow, list[Row]] = {}
    began = time.monotonic()
    print(f"chaos: {options.parallel} times {vendor.machine}, seed {options.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="chaos-rows-") as folder,
        ending_nodes(running),
        selectors.DefaultSelector() as selector,
    ):
        while waiting or running:
            while waiting and len(running) < options.parallel:
                running.append(RunningNode(waiting.pop(0), options, Path(folder)))
                selector.register(running[-1], selectors.EVENT_READ)
            for key, _events in selector.select():
                running_node = key.fileobj
                assert isinstance(running_node, RunningNode)
                if not running_node.read():
                    selector.unregister(running_node)
                    rows[running_node.table_row] = running_node.result()
                    running.remove(running_node)
                    running_node.end()
    found = [row for table_row in requested for row in rows[table_row]]
    print(f"\n{TABLE} {options.seed} on {vendor.machine}, {time.monotonic() - began:.0f} s\n{table(found)}", flush=True)
    return 1 if any(row.has_failed for row in found) else 0
