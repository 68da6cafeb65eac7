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

from tests.chaos import kill, surroundings
from tests.chaos.campaigns import FUZZING, asked_for, faults
from tests.chaos.results import Row, read_rows, table
from tests.chaos.vendor import Vendor

#: Command line options that each node gets unchanged.
PASSED_ON = (
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
class Part:
    """One row: a fault, and for kills the kind of claim."""

    fault: str
    kind: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.fault, self.kind)))


class Lane:
    """A running node, and its output."""

    def __init__(self, part: Part, options: argparse.Namespace, folder: Path) -> None:
        self.part, self.rows = part, folder / f"{part.name}.json"
        log = options.log.with_name(f"{options.log.stem}-{part.name}{options.log.suffix}")
        words = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in PASSED_ON]
        words += [f"--faults={part.fault}", f"--kinds={part.kind}", f"--rows={self.rows}", f"--log={log}"]
        words += [] if options.case is None else [f"--case={options.case}"]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            preexec_fn=surroundings.end_with_parent,
        )
        self.began = time.monotonic()
        self._rest, self._over = b"", False

    def fileno(self) -> int:
        """Return the descriptor of its output."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def read(self) -> bool:
        """Print the complete lines of its output. Return False at its end."""
        data = os.read(self.fileno(), 65536)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop() if data else b""
        for line in lines:
            text = line.decode(errors="replace")
            self._over = self._over or text.startswith(TABLE)
            if text and not self._over:
                print(f"[{self.part.name}] {text}", flush=True)
        return bool(data)

    def result(self) -> list[Row]:
        """Return its rows after its end. A node without rows has failed."""
        status = self.process.wait(END_SECONDS)
        rows = read_rows(self.rows)
        if rows and (status == 0 or any(row.failed for row in rows)):
            return rows
        print(f"[{self.part.name}] ended with {status} and without a table", flush=True)
        failed = Row(self.part.fault, self.part.kind, seconds=time.monotonic() - self.began)
        failed.wrong["other"] += 1
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


def parts(options: argparse.Namespace, vendor: Vendor) -> list[Part]:
    """Return the requested parts in the order of the table."""
    wanted, kinds = asked_for(options, vendor)
    found = [Part(kill.FAULT, kind.name) for kind in vendor.kinds if kill.FAULT in wanted and kind.name in kinds]
    found += [Part(fault.name) for fault in faults(vendor, options.away) if fault.name in wanted]
    return found + [Part(name) for name in FUZZING if name in wanted]


@contextmanager
def ended(lanes: list[Lane]) -> Iterator[None]:
    """End the running lanes when this process gets a signal to end, or on an error."""
    surroundings.end_by_signal()
    try:
        yield
    finally:
        for lane in lanes:
            lane.end()


def run(options: argparse.Namespace, vendor: Vendor) -> int:
    """Run the requested parts on ``options.parallel`` nodes at a time, print the table, and return the exit status."""
    every = parts(options, vendor)
    # The longest parts begin first, so that they are not alone at the end.
    waiting = sorted(every, key=lambda part: part.fault not in FUZZING)
    running: list[Lane] = []
    rows: dict[Part, list[Row]] = {}
    began = time.monotonic()
    print(f"chaos: {options.parallel} times {vendor.machine}, seed {options.seed}", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="chaos-rows-") as folder,
        ended(running),
        selectors.DefaultSelector() as all_of,
    ):
        while waiting or running:
            while waiting and len(running) < options.parallel:
                running.append(Lane(waiting.pop(0), options, Path(folder)))
                all_of.register(running[-1], selectors.EVENT_READ)
            for key, _events in all_of.select():
                lane = key.fileobj
                assert isinstance(lane, Lane)
                if not lane.read():
                    all_of.unregister(lane)
                    rows[lane.part] = lane.result()
                    running.remove(lane)
                    lane.end()
    found = [row for part in every for row in rows[part]]
    print(f"\n{TABLE} {options.seed} on {vendor.machine}, {time.monotonic() - began:.0f} s\n{table(found)}", flush=True)
    return 1 if any(row.failed for row in found) else 0
