# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The clock changes during a health transition of a device, and calls of the vendor's library raise unexpected exceptions."""

from __future__ import annotations

import random
import time

from tests.chaos.errors import CrashLoop
from tests.chaos.hardware_faults import await_no_taints, taints
from tests.chaos.library_exceptions import AFTER, BEFORE, REQUEST_FILE
from tests.chaos.node import Node
from tests.chaos.outages import CLOCK, CLOCK_LIBRARY, HOUR, compile_clock
from tests.chaos.prepared_claims import PreparedClaims
from tests.chaos.snapshot import await_snapshot, check_files, snapshot
from tests.chaos.vendor import Vendor

CLOCK_STEPS = (-2 * HOUR, 120, 2 * HOUR, -120, 30 * 86400, -30 * 86400)
FAILED_DEVICE = 6
#: The maximum duration of a transition in seconds: two scans, and a margin for a busy machine.
TRANSITION_SECONDS = 30.0


def effects(node: Node) -> set[str]:
    """Return the effects of all taints."""
    return {str(each["effect"]) for found in taints(node).values() for each in found}


def clock_health(node: Node, number: int, chance: random.Random) -> None:
    """Change the clock between two scans: the start and the end of a fault are confirmed as fast as without the change."""
    step = CLOCK_STEPS[number % len(CLOCK_STEPS)]
    node.stop()
    CLOCK.write_text(str(-step))
    if not CLOCK_LIBRARY.exists():
        compile_clock()
    node.start_ready(clock=CLOCK, library=CLOCK_LIBRARY)
    held_claims = PreparedClaims(node, ("static",))
    node.silicon.command(f"fault {FAILED_DEVICE} {node.vendor.failed_state}")
    node.wait_until("the fault is seen", lambda: taints(node))
    time.sleep(chance.uniform(0, 1))
    CLOCK.write_text("0")
    node.wait_until("the fault is confirmed", lambda: "NoExecute" in effects(node), TRANSITION_SECONDS)
    node.silicon.command("clear all")
    last_scan = node.status()["looked_at"]
    node.wait_until("a scan has missed the fault", lambda: node.status()["looked_at"] != last_scan)
    CLOCK.write_text(str(step))
    node.wait_until("its end is confirmed", lambda: not taints(node), TRANSITION_SECONDS)
    held_claims.verify_and_release()
    node.stop()
    node.start_ready()


def number_of_library_exceptions(vendor: Vendor) -> int:
    """Return the number of cases: each function before and after its effect, for prepare and for unprepare."""
    return 4 * len(functions(vendor))


def functions(vendor: Vendor) -> tuple[str, ...]:
    """Return the library functions of prepare, unprepare, and scans."""
    return tuple(dict.fromkeys((*vendor.library_calls, *vendor.scan_calls)))


def library_exception(node: Node, number: int, chance: random.Random) -> None:
    """Raise an unexpected exception in a library call: the driver keeps running, and nothing is left afterwards."""
    names = functions(node.vendor)
    name, rest = names[number % len(names)], number // len(names)
    when, unprepares = (BEFORE, AFTER)[rest % 2], rest // 2 % 2
    node.kill()
    node.start_ready(library_raises=True)
    before = snapshot(node)
    held_claims = PreparedClaims(node, ("static",))
    claims = [node.claim_of(node.kinds[kind]) for kind in node.vendor.kinds_with_calls]
    if unprepares:
        for claim in claims:
            node.prepare(*claim)
    REQUEST_FILE.write_text(f"{name} {when}\n", encoding="ascii")
    try:
        for claim in claims:
            node.call_once("NodeUnprepareResources" if unprepares else "NodePrepareResources", *claim)
        time.sleep(chance.uniform(0, 5))  # with or without a scan in between
        if node.has_ended():
            raise CrashLoop(f"the driver ended, as {name} raised\n{node.log_tail()}")
    finally:
        REQUEST_FILE.unlink(missing_ok=True)
    for claim in claims:
        if not unprepares:
            node.prepare(*claim)
            check_files(node)
        node.unprepare(*claim)
    held_claims.verify_and_release()
    await_snapshot(node, "pending cleanup is complete", before, 40)
    await_no_taints(node)
    node.kill()
    node.start_ready()
