# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Connections that become silent, calls that overlap with changes of readiness, and exceptions that no code expects."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.errors import Broken, Leaked, Lost
from tests.chaos.node import CDI, Node
from tests.chaos.outages import Load, are_pools_complete, published_devices
from tests.chaos.prepared_claims import PreparedClaims
from tests.chaos.snapshot import await_snapshot, snapshot

#: The driver notices a silent API server within this time, in seconds.
DETECTION_SECONDS = 150.0
#: The minimum number of exceptions for each selected supervisor in one case.
MINIMUM_EXCEPTIONS = 10
#: Pauses between two calls, in seconds.
PAUSES = (0.02, 0.02, 0.2)
SILENT_MESSAGE = "slices cannot be watched"


def silent_connections(node: Node, number: int, chance: random.Random) -> None:
    """All connections to the API server become silent, and stay silent when the server answers on new ones: the driver reconnects."""
    del number
    before, published = snapshot(node), published_devices(node)
    held_claims = PreparedClaims(node, ("static", "three"))
    reported = node.log.read_text().count(SILENT_MESSAGE)
    node.api.call(_set_silent(node, True))
    try:
        node.api.model.delete_slice(chance.choice(sorted(node.api.model.slices)))  # the driver gets no event
        node.wait_until(
            "the driver notices that the API server is silent",
            lambda: node.log.read_text().count(SILENT_MESSAGE) > reported,
            DETECTION_SECONDS,
        )
        for claim in held_claims.claims:
            if error := node.call_once("NodePrepareResources", *claim).error:
                raise Lost(f"a prepared claim is refused while the API server is silent: {error}")
    finally:
        node.api.call(_set_silent(node, False))
    node.wait_until(
        "all devices are published as before",
        lambda: are_pools_complete(node) and published_devices(node) == published,
        60,
    )
    node.wait_ready(60)
    held_claims.verify_and_release()
    await_snapshot(node, "nothing is left", before)


async def _set_silent(node: Node, is_silent: bool) -> None:
    node.api.model.is_silent = is_silent


@dataclass(frozen=True)
class Call:
    """A call for one claim. ``earlier`` are the calls for that claim that were answered before this one was sent."""

    method: str
    future: Any
    earlier: tuple[Call, ...]

    def error(self, uid: str) -> str:
        return str(self.future.result().claims[uid].error)


def possible_last_calls(calls: Sequence[Call], uid: str) -> list[Call]:
    """Return the successful calls for a claim that the driver can have handled last. Waits for all answers.

    gRPC keeps the order of messages within a call, but not of calls. Seen with grpcio 1.85.1, with the frames on the socket and
    the driver's interceptor logged: an Unprepare arrived, while the driver's event loop was busy, 21 ms before a Prepare of the
    same claim, and the interceptor got the Prepare first. So only a call that was sent after an answer is handled after that
    answered call. A call that fails changes nothing.
    """
    successful = [call for call in calls if not call.error(uid)]
    return [call for call in successful if not any(call in later.earlier for later in successful)]


def calls_during_start(node: Node, number: int, chance: random.Random) -> None:
    """Call Prepare and Unprepare while the driver starts: each claim is then in the state after a call that can be the last one."""
    del number
    before = snapshot(node)
    claims = [node.claim_of(node.kinds[kind]) for kind in ("static", "whole", node.vendor.other_kind)]
    for _round in range(6):
        node.kill()
        node.start()  # it serves before the hardware has answered
        calls: dict[str, list[Call]] = {uid: [] for _name, uid in claims}
        for _call in range(chance.randint(2, 12)):
            claim = chance.choice(claims)
            method = chance.choice(("NodePrepareResources", "NodeUnprepareResources"))
            made = calls[claim[1]]
            earlier = tuple(call for call in made if call.future.done())
            made.append(Call(method, node.start_call(method, *claim), earlier))
            time.sleep(chance.choice(PAUSES))
        for uid, made in calls.items():
            methods = {call.method for call in possible_last_calls(made, uid)}
            if len(methods) != 1:
                continue
            answers = [(call.method, call.error(uid), f"after {len(call.earlier)} answers") for call in made]
            has_file = any(uid in path.name for path in CDI.glob("*"))
            if methods == {"NodeUnprepareResources"} and has_file:
                raise Leaked(f"claim {uid} is prepared after an Unprepare that succeeded: {answers}")
            if methods == {"NodePrepareResources"} and not has_file:
                raise Lost(f"claim {uid} is not prepared after a Prepare that succeeded: {answers}")
    node.wait_ready()
    for claim in claims:
        node.unprepare(*claim)
    await_snapshot(node, "nothing is left", before)


def supervisor_exceptions(node: Node, number: int, chance: random.Random) -> None:
    """End each supervisor repeatedly with an unexpected exception under load: claims are served, and nothing is left."""
    del number, chance
    before = snapshot(node)
    held_claims = PreparedClaims(node, ("static", "three"))
    node.kill()
    said = node.log.read_text().count("failed and restarts")
    node.start_ready(supervisor_exceptions=True, ready_seconds=90)
    load = Load(node, (node.vendor.other_kind, "admin"))
    with load.running():
        node.wait_until(
            "supervisors have ended with exceptions",
            lambda: node.log.read_text().count("failed and restarts") - said >= MINIMUM_EXCEPTIONS,
            90,
        )
        done = dict(load.prepared)
        node.wait_until("claims are prepared", lambda: all(load.prepared[kind] > done[kind] for kind in done), 60)
    if node.has_ended():
        raise Broken(f"the driver ended\n{node.log_tail()}")
    held_claims.await_prepared()
    node.kill()
    node.start_ready(ready_seconds=90)
    held_claims.verify_and_release()
    await_snapshot(node, "nothing is left", before)
