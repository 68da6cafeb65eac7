# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Hardware failures: one failing library call of a prepare or an unprepare after the other, and devices that report many errors at once."""

from __future__ import annotations

import random
from typing import Any

from tests.chaos.errors import Broken, Leaked, Lost
from tests.chaos.node import Node
from tests.chaos.snapshot import await_snapshot, check_files, difference, snapshot
from tests.chaos.tenants import Tenants
from tests.chaos.vendor import Vendor

TIMES = (1, 2, 3)
BURST = 400


def count_of_steps(vendor: Vendor) -> int:
    """Return the number of combinations of call, error, and occurrence, for prepare and for unprepare."""
    return len(vendor.calls) * len(vendor.codes) * len(TIMES) * 2


def step(node: Node, number: int, chance: random.Random) -> None:
    """Let the n-th call of a function fail: a refused claim leaves nothing behind, and an unprepared one leaves nothing in the end."""
    del chance
    calls, codes = node.vendor.calls, node.vendor.codes
    function, rest = calls[number % len(calls)], number // len(calls)
    code, nth = codes[rest % len(codes)], TIMES[rest // len(codes) % len(TIMES)]
    giving_back = rest // (len(codes) * len(TIMES)) % 2
    before = snapshot(node)
    claims = [node.claim_of(node.kinds[kind]) for kind in node.vendor.called]
    if giving_back:
        for claim in claims:
            node.prepare(*claim)
    with node.faults(f"all call {function} fail {code} nth {nth}"):
        for claim in claims:
            node.ask("NodeUnprepareResources" if giving_back else "NodePrepareResources", *claim)
    for claim in claims:
        if not giving_back:
            node.prepare(*claim)
            check_files(node)
        node.unprepare(*claim)
    await_snapshot(node, "the pending cleanup is done", before, 40)
    await_no_taints(node)


def taints(node: Node) -> dict[str, list[Any]]:
    """Return the taints of published devices, by name."""
    return {name: device["taints"] for name, device in node.devices().items() if device.get("taints")}


def await_no_taints(node: Node) -> None:
    node.until("no device has a taint", lambda: not taints(node), 90)


def errors(node: Node, number: int, chance: random.Random) -> None:
    """Devices report hundreds of errors while claims use other devices. After the repair no taint or other effect is left."""
    del number
    tenants = Tenants(node, ("static", "three"))
    events = len(node.api.model.events)
    for _burst in range(4):
        for _error in range(BURST // 4):
            node.silicon.command(f"fault {chance.choice((0, 1, 2, 6, 7))} {chance.choice(node.vendor.errors)}")
        name, uid = node.claim_of(node.kinds["whole"])
        node.prepare(name, uid)
        node.unprepare(name, uid)
    node.until("the errors are published as taints", lambda: taints(node))
    answer = len(node.api.model.events) - events
    if (
        answer > 150
    ):  # a burst for the node and for each claim with one of the devices, and later Events in the meantime
        raise Broken(f"{BURST} errors of five devices became {answer} Events")
    remembered = (node.state / "health.json").stat().st_size
    if remembered > 64 * 1024:
        raise Broken(f"{BURST} errors of five devices are remembered in {remembered} bytes")
    if chance.random() < 0.5:
        node.kill()
        node.start()
        node.wait_ready()
        if not taints(node):
            raise Lost("the restarted driver has lost the faults of the devices")
    node.silicon.command("clear all")
    node.until("no device has a taint after its repair", lambda: not taints(node) or node.report_repairs(), 90)
    tenants.await_prepared()
    tenants.give_back()


def hang(node: Node, number: int, chance: random.Random) -> None:
    """A device does not answer: its claims are refused or wait, and other claims are served. Afterwards the state is as before."""
    del number
    before = snapshot(node)
    sick, well = node.claim_of(node.kinds["dynamic"]), node.claim_of(node.kinds[node.vendor.another])
    function = chance.choice(node.vendor.hanging)
    killed = chance.random() < 0.5
    with node.faults(f"1 call {function} hang"):
        waiting = node.begin("NodePrepareResources", *sick)
        node.prepare(*well)
        node.unprepare(*well)
        if waiting.done():
            raise Broken(f"the device hangs, and the claim was answered: {waiting.result()}")
        if killed:
            node.kill()
    if killed:
        node.start()
        node.wait_ready()
    node.prepare(*sick)
    node.unprepare(*sick)
    if text := difference(snapshot(node), before):
        raise Leaked(text)
