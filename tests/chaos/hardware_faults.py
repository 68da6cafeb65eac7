# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Hardware failures: one failing library call of a prepare or an unprepare after the other, and devices that report many errors at once."""

from __future__ import annotations

import random
from typing import Any

from tests.chaos.errors import Broken, Leaked, Lost
from tests.chaos.node import Node
from tests.chaos.prepared_claims import PreparedClaims
from tests.chaos.snapshot import await_snapshot, check_files, difference, snapshot
from tests.chaos.vendor import Vendor

OCCURRENCES = (1, 2, 3)
ERRORS_IN_BURST = 400


def number_of_failing_calls(vendor: Vendor) -> int:
    """Return the number of combinations of call, error, and occurrence, for prepare and for unprepare."""
    return len(vendor.library_calls) * len(vendor.error_codes) * len(OCCURRENCES) * 2


def failing_call(node: Node, number: int, chance: random.Random) -> None:
    """Let the n-th call of a function fail: a refused claim leaves nothing behind, and an unprepared one leaves nothing in the end."""
    del chance
    calls, codes = node.vendor.library_calls, node.vendor.error_codes
    function, rest = calls[number % len(calls)], number // len(calls)
    code, nth = codes[rest % len(codes)], OCCURRENCES[rest // len(codes) % len(OCCURRENCES)]
    unprepares = rest // (len(codes) * len(OCCURRENCES)) % 2
    before = snapshot(node)
    claims = [node.claim_of(node.kinds[kind]) for kind in node.vendor.kinds_with_calls]
    if unprepares:
        for claim in claims:
            node.prepare(*claim)
    with node.faults(f"all call {function} fail {code} nth {nth}"):
        for claim in claims:
            node.call_once("NodeUnprepareResources" if unprepares else "NodePrepareResources", *claim)
    for claim in claims:
        if not unprepares:
            node.prepare(*claim)
            check_files(node)
        node.unprepare(*claim)
    await_snapshot(node, "the pending cleanup is done", before, 40)
    await_no_taints(node)


def taints(node: Node) -> dict[str, list[Any]]:
    """Return the taints of published devices, by name."""
    return {name: device["taints"] for name, device in node.devices().items() if device.get("taints")}


def await_no_taints(node: Node) -> None:
    node.wait_until("no device has a taint", lambda: not taints(node), 90)


def many_device_errors(node: Node, number: int, chance: random.Random) -> None:
    """Devices report hundreds of errors while claims use other devices. After the repair no taint or other effect is left."""
    del number
    held_claims = PreparedClaims(node, ("static", "three"))
    events = len(node.api.model.events)
    for _burst in range(4):
        for _error in range(ERRORS_IN_BURST // 4):
            node.silicon.command(f"fault {chance.choice((0, 1, 2, 6, 7))} {chance.choice(node.vendor.device_errors)}")
        name, uid = node.claim_of(node.kinds["whole"])
        node.prepare(name, uid)
        node.unprepare(name, uid)
    node.wait_until("the errors are published as taints", lambda: taints(node))
    answer = len(node.api.model.events) - events
    if (
        answer > 150
    ):  # a burst for the node and for each claim with one of the devices, and later Events in the meantime
        raise Broken(f"{ERRORS_IN_BURST} errors of five devices became {answer} Events")
    remembered = (node.state / "health.json").stat().st_size
    if remembered > 64 * 1024:
        raise Broken(f"{ERRORS_IN_BURST} errors of five devices are remembered in {remembered} bytes")
    if chance.random() < 0.5:
        node.kill()
        node.start_ready()
        if not taints(node):
            raise Lost("the restarted driver has lost the faults of the devices")
    node.silicon.command("clear all")
    node.wait_until("no device has a taint after its repair", lambda: not taints(node) or node.report_repairs(), 90)
    held_claims.verify_and_release()


def hanging_device(node: Node, number: int, chance: random.Random) -> None:
    """A device does not answer: its claims are refused or wait, and other claims are served. Afterwards the state is as before."""
    del number
    before = snapshot(node)
    sick, well = node.claim_of(node.kinds["dynamic"]), node.claim_of(node.kinds[node.vendor.other_kind])
    function = chance.choice(node.vendor.hanging_calls)
    killed = chance.random() < 0.5
    with node.faults(f"1 call {function} hang"):
        waiting = node.start_call("NodePrepareResources", *sick)
        node.prepare(*well)
        node.unprepare(*well)
        if waiting.done():
            raise Broken(f"the device hangs, and the claim was answered: {waiting.result()}")
        if killed:
            node.kill()
    if killed:
        node.start_ready()
    node.prepare(*sick)
    node.unprepare(*sick)
    if text := difference(snapshot(node), before):
        raise Leaked(text)
