# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The clock changes during a health transition of a device, and calls of the vendor's library raise unexpected exceptions."""

from __future__ import annotations

import random
import time

from tests.chaos.breaking import await_no_taints, taints
from tests.chaos.errors import CrashLoop
from tests.chaos.node import Node
from tests.chaos.outages import CLOCK, CLOCK_LIBRARY, HOUR, compile_clock
from tests.chaos.raising import AFTER, BEFORE, ORDER
from tests.chaos.snapshot import await_snapshot, check_files, snapshot
from tests.chaos.tenants import Tenants
from tests.chaos.vendor import Vendor

STEPS = (-2 * HOUR, 120, 2 * HOUR, -120, 30 * 86400, -30 * 86400)
SICK = 6
#: The maximum duration of a transition in seconds: two scans, and a margin for a busy machine.
TRANSITION_SECONDS = 30.0


def effects(node: Node) -> set[str]:
    """Return the effects of all taints."""
    return {str(each["effect"]) for found in taints(node).values() for each in found}


def clock_health(node: Node, number: int, chance: random.Random) -> None:
    """Change the clock between two scans: the start and the end of a fault are confirmed as fast as without the change."""
    step = STEPS[number % len(STEPS)]
    node.stop()
    CLOCK.write_text(str(-step))
    if not CLOCK_LIBRARY.exists():
        compile_clock()
    node.start(clock=CLOCK, library=CLOCK_LIBRARY)
    node.wait_ready()
    tenants = Tenants(node, ("static",))
    node.silicon.command(f"fault {SICK} {node.vendor.failing}")
    node.until("the fault is seen", lambda: taints(node))
    time.sleep(chance.uniform(0, 1))
    CLOCK.write_text("0")
    node.until("the fault is confirmed", lambda: "NoExecute" in effects(node), TRANSITION_SECONDS)
    node.silicon.command("clear all")
    looked = node.status()["looked_at"]
    node.until("a scan has missed the fault", lambda: node.status()["looked_at"] != looked)
    CLOCK.write_text(str(step))
    node.until("its end is confirmed", lambda: not taints(node), TRANSITION_SECONDS)
    tenants.await_prepared()
    tenants.give_back()
    node.stop()
    node.start()
    node.wait_ready()


def count_of_defects(vendor: Vendor) -> int:
    """Return the number of cases: each function before and after its effect, for prepare and for unprepare."""
    return 4 * len(functions(vendor))


def functions(vendor: Vendor) -> tuple[str, ...]:
    """Return the library functions of prepare, unprepare, and scans."""
    return tuple(dict.fromkeys((*vendor.calls, *vendor.scanned)))


def defect(node: Node, number: int, chance: random.Random) -> None:
    """Raise an unexpected exception in a library call: the driver keeps running, and nothing is left afterwards."""
    names = functions(node.vendor)
    name, rest = names[number % len(names)], number // len(names)
    when, giving_back = (BEFORE, AFTER)[rest % 2], rest // 2 % 2
    node.kill()
    node.start(raises=True)
    node.wait_ready()
    before = snapshot(node)
    tenants = Tenants(node, ("static",))
    claims = [node.claim_of(node.kinds[kind]) for kind in node.vendor.called]
    if giving_back:
        for claim in claims:
            node.prepare(*claim)
    ORDER.write_text(f"{name} {when}\n", encoding="ascii")
    try:
        for claim in claims:
            node.ask("NodeUnprepareResources" if giving_back else "NodePrepareResources", *claim)
        time.sleep(chance.uniform(0, 5))  # with or without a scan in between
        if node.ended():
            raise CrashLoop(f"the driver ended, as {name} raised\n{node.said()}")
    finally:
        ORDER.unlink(missing_ok=True)
    for claim in claims:
        if not giving_back:
            node.prepare(*claim)
            check_files(node)
        node.unprepare(*claim)
    tenants.await_prepared()
    tenants.give_back()
    await_snapshot(node, "pending cleanup is complete", before, 40)
    await_no_taints(node)
    node.kill()
    node.start()
    node.wait_ready()
