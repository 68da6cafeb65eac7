# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the requested faults one after the other on one node, and print the table of results."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.chaos import (
    clock_and_library_faults,
    driver_faults,
    fuzz,
    handover,
    hardware_faults,
    kill,
    outages,
    reboots,
    store_faults,
)
from tests.chaos.node import Node
from tests.chaos.results import Results, write_rows
from tests.chaos.vendor import Vendor


@dataclass(frozen=True)
class Fault:
    """One kind of fault, and the number of its cases."""

    name: str
    #: Runs one case. Arguments: the node, the number of the case, and its random source.
    inject: Callable[[Node, int, random.Random], None]
    cases: int


#: By name: the function that sends requests, and its fraction of the option --requests.
FUZZING = {"fuzz-requests": (fuzz.fuzz_requests, 0.8), "fuzz-configurations": (fuzz.fuzz_opaque_configurations, 0.2)}


def faults(vendor: Vendor, away: float) -> tuple[Fault, ...]:
    """Return all faults except for kills. ``away`` is the duration of an API server outage, in seconds."""
    return (
        Fault("store", partial(store_faults.damaged_store, checkpointed=False), 100),
        Fault("store-at-rest", partial(store_faults.damaged_store, checkpointed=True), 50),
        Fault("older", store_faults.older_store, 20),
        Fault("newer", store_faults.newer_store, 5),
        Fault("disk", store_faults.failing_disk, 24),
        Fault("call", hardware_faults.failing_call, hardware_faults.number_of_failing_calls(vendor)),
        Fault("errors", hardware_faults.many_device_errors, 5),
        Fault("hang", hardware_faults.hanging_device, 6),
        Fault("api-away", partial(outages.api_away, seconds=away), 2),
        Fault("kubelet-storm", outages.kubelet_storm, 10),
        Fault("half-open", driver_faults.silent_connections, 2),
        Fault("readiness", driver_faults.calls_during_start, 10),
        Fault("supervisor-exceptions", driver_faults.supervisor_exceptions, 3),
        Fault("clock-jump", outages.clock_jump, len(outages.CLOCK_JUMPS)),
        Fault("clock-health", clock_and_library_faults.clock_health, len(clock_and_library_faults.CLOCK_STEPS)),
        Fault(
            "exceptions",
            clock_and_library_faults.library_exception,
            clock_and_library_faults.number_of_library_exceptions(vendor),
        ),
        Fault("two-drivers", outages.two_drivers, 10),
        Fault("hand-over", handover.complete_handover, 10),
        Fault("hand-over-killed", handover.killed_handover, 30),
        Fault("leftovers", outages.leftovers, 10),
        Fault("reboot", reboots.reboot, 20),
    )


def requested_faults(options: argparse.Namespace, vendor: Vendor) -> tuple[set[str], set[str]]:
    """Return the requested faults and kinds of kills. Exit on an unknown name."""
    known = ["kill", *(fault.name for fault in faults(vendor, options.away)), *FUZZING]
    wanted = set(filter(None, options.faults.split(","))) or set(known)
    kinds = set(filter(None, options.kinds.split(","))) or set(vendor.by_name)
    unknown = (wanted - set(known)) | (kinds - set(vendor.by_name))
    if unknown:
        names = ", ".join(known)
        print(
            f"chaos: unknown: {', '.join(sorted(unknown))}; faults are {names}; kinds are {', '.join(vendor.by_name)}"
        )
        raise SystemExit(2)
    return wanted, kinds


def minimum_runs(options: argparse.Namespace, fault: str) -> int:
    """Return the minimum number of runs of a fault, or 0. Only each kind of kill and each fuzzer have one."""
    if options.case is not None:
        return 0
    if fault in FUZZING:
        return int(FUZZING[fault][1] * options.least_requests)
    return int(options.least) if fault == kill.FAULT else 0


def run(options: argparse.Namespace, vendor: Vendor, library: Path) -> int:
    """Run the requested cases, print the table, and return the exit status: 1 after failures or too few runs."""
    requested, kinds = requested_faults(options, vendor)

    def repeat_command(fault: str, kind: str, number: int) -> str:
        which = f"--kinds {kind} " if fault == kill.FAULT else ""
        return (
            f"make chaos CHAOS='--vendor {vendor.name} --seed {options.seed} --faults {fault} {which}--case {number}'"
        )

    print(f"chaos: {vendor.machine}, seed {options.seed}; the driver writes to {options.log}", flush=True)
    options.log.unlink(missing_ok=True)
    results, began = Results(repeat_command), time.monotonic()
    node = Node(vendor, library, options.log)
    node.start_ready()
    if kill.FAULT in requested:
        for kind in (kind for kind in vendor.kinds if kind.name in kinds):
            results.row(kill.FAULT, kind.name, minimum_runs(options, kill.FAULT))
            kill.run_kills(
                node, kind, results, seed=options.seed, runs=options.runs, seconds=options.seconds, only=options.case
            )
            results.print_last_row()
    for fault in faults(vendor, options.away):
        if fault.name in requested:
            run_fault(node, fault, results, options)
    if requested & set(FUZZING):
        run_fuzzers(node, requested, results, options)
    node.close()
    if options.rows is not None:
        write_rows(options.rows, results.rows)
    print(
        f"\nChaos of seed {options.seed} on {vendor.machine}, {time.monotonic() - began:.0f} s\n{results.table()}",
        flush=True,
    )
    return 1 if any(row.has_failed for row in results.rows) else 0


def run_fault(node: Node, fault: Fault, results: Results, options: argparse.Namespace) -> None:
    """Run the cases of one fault until the time limit."""
    function = fault.inject.func if isinstance(fault.inject, partial) else fault.inject
    deadline = time.monotonic() + options.seconds
    numbers = range(options.cases or fault.cases) if options.case is None else [options.case]
    for number in numbers:
        if time.monotonic() > deadline:
            break
        chance = random.Random(f"{options.seed}/{fault.name}/{number}")
        with results.case(node, fault.name, "", number, function.__doc__ or ""):
            fault.inject(node, number, chance)
        node.api.clear_records()
    results.print_last_row()


def run_fuzzers(node: Node, requested: set[str], results: Results, options: argparse.Namespace) -> None:
    """Run the requested fuzzers with a driver that logs only errors."""
    node.stop()
    node.configure(log={"level": "error"})  # a log line for each rejected request would fill the disk
    node.start_ready()
    for name, (fuzzer, fraction) in FUZZING.items():
        if name in requested:
            row = results.row(name, "", minimum_runs(options, name))
            with results.case(node, name, "", 0, fuzzer.__doc__ or ""):
                count = int(fraction * options.requests)
                fuzzer(node, row, number=options.seed, count=count, seconds=options.fuzz_seconds)
            results.print_last_row()
