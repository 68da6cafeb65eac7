# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Connections that become silent, calls that overlap with changes of readiness, and exceptions that no code expects."""

from __future__ import annotations

import random
import time

from tests.chaos.errors import Broken, Leaked, Lost
from tests.chaos.node import CDI, Node
from tests.chaos.outages import Load, are_whole, offered
from tests.chaos.snapshot import await_snapshot, snapshot
from tests.chaos.tenants import Tenants

#: The driver notices a silent API server within this time, in seconds.
NOTICED_SECONDS = 60.0
#: The supervisors that get an exception must have got one at least so often in one case.
EXCEPTIONS = 10
#: Between two calls. gRPC hands calls over in any order that arrive while the driver is busy with its start.
GAP_SECONDS = 0.3
SILENT = "has not answered on open connections"


def half_open(node: Node, number: int, chance: random.Random) -> None:
    """All connections to the API server become silent; they stay so when the server answers on new ones."""
    del number
    before, published = snapshot(node), offered(node)
    tenants = Tenants(node, ("static", "three"))
    reported = node.log.read_text().count(SILENT)
    node.api.call(_set_silent(node, True))
    try:
        node.api.model.delete_slice(chance.choice(sorted(node.api.model.slices)))  # the driver does not hear of it
        node.until(
            "the driver notices that the API server is silent",
            lambda: node.log.read_text().count(SILENT) > reported,
            NOTICED_SECONDS,
        )
        for claim in tenants.claims:
            if error := node.ask("NodePrepareResources", *claim).error:
                raise Lost(f"a prepared claim is refused while the API server is silent: {error}")
    finally:
        node.api.call(_set_silent(node, False))
    node.until("all devices are published as they were", lambda: are_whole(node) and offered(node) == published, 60)
    node.wait_ready(60)
    tenants.await_prepared()
    tenants.give_back()
    await_snapshot(node, "nothing is left", before)


async def _set_silent(node: Node, is_silent: bool) -> None:
    node.api.model.is_silent = is_silent


def readiness(node: Node, number: int, chance: random.Random) -> None:
    """Prepare and Unprepare are called while the driver starts; after the last call the claim is as that call has answered."""
    del number
    before = snapshot(node)
    claims = [node.claim_of(node.kinds[kind]) for kind in ("static", "whole", node.vendor.another)]
    for _round in range(6):
        node.kill()
        node.start()  # it serves before the hardware has answered
        calls: dict[str, list[tuple[str, object]]] = {uid: [] for _name, uid in claims}
        for _call in range(chance.randint(2, 9)):
            claim = chance.choice(claims)
            method = chance.choice(("NodePrepareResources", "NodeUnprepareResources"))
            calls[claim[1]].append((method, node.begin(method, *claim)))
            time.sleep(GAP_SECONDS)
        for uid, made in calls.items():
            errors = [call.result().claims[uid].error for _method, call in made]  # type: ignore[attr-defined]
            if not made or errors[-1]:
                continue
            has_file = any(uid in path.name for path in CDI.glob("*"))
            if made[-1][0] == "NodeUnprepareResources" and has_file:
                raise Leaked(
                    f"claim {uid} is prepared after an Unprepare that succeeded: {[each[0] for each in made]}, {errors}"
                )
            if made[-1][0] == "NodePrepareResources" and not has_file:
                raise Lost(
                    f"claim {uid} is not prepared after a Prepare that succeeded: {[each[0] for each in made]}, {errors}"
                )
    node.wait_ready()
    for claim in claims:
        node.unprepare(*claim)
    await_snapshot(node, "nothing is left", before)


def exceptions(node: Node, number: int, chance: random.Random) -> None:
    """Each supervisor ends again and again with an exception that no code expects, while claims come and go."""
    del number, chance
    before = snapshot(node)
    tenants = Tenants(node, ("static", "three"))
    node.kill()
    said = node.log.read_text().count("failed and begins anew")
    node.start(has_defects=True)
    node.wait_ready(90)
    load = Load(node, (node.vendor.another, "admin"))
    with load.running():
        node.until(
            "supervisors have ended with exceptions",
            lambda: node.log.read_text().count("failed and begins anew") - said >= EXCEPTIONS,
            90,
        )
        done = dict(load.prepared)
        node.until("claims are prepared", lambda: all(load.prepared[kind] > done[kind] for kind in done), 60)
    if node.ended():
        raise Broken(f"the driver ended\n{node.said()}")
    tenants.await_prepared()
    node.kill()
    node.start()
    node.wait_ready(90)
    tenants.await_prepared()
    tenants.give_back()
    await_snapshot(node, "nothing is left", before)
