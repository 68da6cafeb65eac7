# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""All test cases, one after the other on one node, and their numbers."""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests.chaos import breaking, defects, fuzz, instances, kill, outages, rebooting, storing, transitions
from tests.chaos.node import Node
from tests.chaos.results import Results, write_rows
from tests.chaos.vendor import Vendor


@dataclass(frozen=True)
class Fault:
    """One kind of fault. ``play`` gets the node, the number of the case, and its own random source. ``cases`` is the number of cases."""

    name: str
    play: Callable[[Node, int, random.Random], None]
    cases: int


#: By name: the function that sends requests, and its part of all requests.
FUZZING = {"fuzz-requests": (fuzz.wire, 0.8), "fuzz-configurations": (fuzz.configurations, 0.2)}


def faults(vendor: Vendor, away: float) -> tuple[Fault, ...]:
    """Return all faults except for kills. ``away`` is the duration of an API server outage, in seconds."""
    return (
        Fault("store", partial(storing.damaged, checkpointed=False), 100),
        Fault("store-at-rest", partial(storing.damaged, checkpointed=True), 50),
        Fault("older", storing.older, 20),
        Fault("newer", storing.newer, 5),
        Fault("disk", storing.disk, 24),
        Fault("call", breaking.step, breaking.count_of_steps(vendor)),
        Fault("errors", breaking.errors, 5),
        Fault("hang", breaking.hang, 6),
        Fault("api-away", partial(outages.api_away, seconds=away), 2),
        Fault("kubelet-storm", outages.kubelet_storm, 10),
        Fault("half-open", defects.half_open, 2),
        Fault("readiness", defects.readiness, 10),
        Fault("supervisor-exceptions", defects.exceptions, 3),
        Fault("clock-jump", outages.clock_jump, len(outages.JUMPS)),
        Fault("clock-health", transitions.clock_health, len(transitions.STEPS)),
        Fault("exceptions", transitions.defect, transitions.count_of_defects(vendor)),
        Fault("two-drivers", outages.two_drivers, 10),
        Fault("hand-over", instances.hand_over, 10),
        Fault("hand-over-killed", instances.interrupted, 30),
        Fault("leftovers", outages.leftovers, 10),
        Fault("reboot", rebooting.reboot, 20),
    )


def asked_for(options: argparse.Namespace, vendor: Vendor) -> tuple[set[str], set[str]]:
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


def floor(options: argparse.Namespace, fault: str) -> int:
    """Return the minimum number of runs of a fault: for each kind of kill, and for each kind of fuzzing by its part of the requests."""
    if options.case is not None:
        return 0
    if fault in FUZZING:
        return int(FUZZING[fault][1] * options.least_requests)
    return int(options.least) if fault == kill.FAULT else 0


def run(options: argparse.Namespace, vendor: Vendor, library: Path) -> int:
    """Run the requested cases, print the table, and return the exit status: 1 after failures or too few runs."""
    wanted, kinds = asked_for(options, vendor)
    every = faults(vendor, options.away)

    def again(fault: str, kind: str, number: int) -> str:
        which = f"--kinds {kind} " if fault == "kill" else ""
        return (
            f"make chaos CHAOS='--vendor {vendor.name} --seed {options.seed} --faults {fault} {which}--case {number}'"
        )

    print(f"chaos: {vendor.machine}, seed {options.seed}; the driver writes to {options.log}", flush=True)
    options.log.unlink(missing_ok=True)
    results, began = Results(again), time.monotonic()
    node = Node(vendor, library, options.log)
    node.start()
    node.wait_ready()
    if "kill" in wanted:
        for kind in (kind for kind in vendor.kinds if kind.name in kinds):
            results.row(kill.FAULT, kind.name, floor(options, kill.FAULT))
            kill.campaign(
                node, kind, results, seed=options.seed, runs=options.runs, seconds=options.seconds, only=options.case
            )
            results.tell()
    for fault in (fault for fault in every if fault.name in wanted):
        deadline = time.monotonic() + options.seconds
        numbers = range(options.cases or fault.cases) if options.case is None else [options.case]
        for number in numbers:
            if time.monotonic() > deadline:
                break
            chance = random.Random(f"{options.seed}/{fault.name}/{number}")
            with results.case(
                node,
                fault.name,
                "",
                number,
                (fault.play.func if isinstance(fault.play, partial) else fault.play).__doc__ or "",
            ):
                fault.play(node, number, chance)
            node.api.forget()
        results.tell()
    if wanted & set(FUZZING):
        node.stop()
        node.configure(log={"level": "error"})  # a log line per refusal would fill the disk
        node.start()
        node.wait_ready()
    for name, (test, part) in FUZZING.items():
        if name in wanted:
            row = results.row(name, "", floor(options, name))
            with results.case(node, name, "", 0, test.__doc__ or ""):
                test(node, row, number=options.seed, count=int(part * options.requests), seconds=options.fuzz_seconds)
            results.tell()
    node.close()
    if options.rows is not None:
        write_rows(options.rows, results.rows)
    print(
        f"\nChaos of seed {options.seed} on {vendor.machine}, {time.monotonic() - began:.0f} s\n{results.table()}",
        flush=True,
    )
    return 1 if any(row.failed for row in results.rows) else 0
