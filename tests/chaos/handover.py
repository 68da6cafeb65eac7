# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Start a second instance of the driver next to the serving one, as a new pod does in an update, or end it again."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import uuid
from collections.abc import Collection, Mapping
from typing import Any

import grpc

from tests.chaos.errors import Broken
from tests.chaos.node import Node
from tests.chaos.outages import Load
from tests.chaos.prepared_claims import PreparedClaims

#: The latest moment of a takeover at which a process is killed, in seconds after the start of the new one.
LATEST_KILL_SECONDS = 1.5
#: Parts of a snapshot in which another instance has its own sockets, and a killed one has left some.
PARTS_WITH_SOCKETS = ("state directory", "registry")


def published(node: Node) -> str:
    """Return the slices in the API server with their versions, to detect writes, without the attributes about claims."""
    slices: dict[str, Any] = node.api.model.slices
    claim_attributes = node.vendor.claim_attributes
    if claim_attributes:
        devices = [device for each in slices.values() for device in each["spec"].get("devices", ())]
        return json.dumps(
            [{**each, "attributes": _without(each["attributes"], claim_attributes)} for each in devices], sort_keys=True
        )
    return json.dumps(slices, sort_keys=True)


def _without(attributes: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in names}


def end_instance(node: Node, pid: int, number: int, channel: grpc.Channel | None = None) -> int:
    """End a process that gets no more calls. Return its exit status."""
    os.kill(pid, number)
    status = node.wait_ended(pid=pid)
    if channel is not None:
        channel.close()
    return status


def take_over(node: Node, pid: int, instance: str) -> grpc.Channel | None:
    """Register a process, send all further calls to it, and wait until it serves. Return the previous channel."""
    node.register(pid, instance)
    previous = node.switch_to(pid, instance)
    node.wait_until("the new instance serves", lambda: node.status()["role"] == "serving", 60)
    node.wait_ready()
    return previous


def complete_handover(node: Node, number: int, chance: random.Random) -> None:
    """Another instance takes over while claims are held and calls arrive, and then the first one again: no call fails."""
    handovers = node.vendor.handovers
    held_kinds, load_kind = handovers[number % len(handovers)]
    held_claims = PreparedClaims(node, held_kinds)
    load, before = Load(node, (load_kind, "admin")), published(node)
    name = str(uuid.UUID(int=chance.getrandbits(128)))
    with load.running():
        for instance in (name, ""):
            done = dict(load.answered_calls)
            previous = node.pid
            channel = take_over(node, node.launch(instance=instance), instance)
            status = end_instance(node, previous, signal.SIGTERM, channel)
            if status:
                raise Broken(f"the previous instance ended with {status} after SIGTERM\n{node.log_tail()}")
            node.wait_until(
                "calls of each kind are answered",
                lambda done=done: all(load.answered_calls[kind] > done[kind] for kind in done),
            )
    if failed := load.prepare_errors + load.unanswered:
        raise Broken(f"{len(failed)} calls failed during a hand-over: {failed[:3]}\n{node.log_tail()}")
    if (now := published(node)) != before:
        raise Broken(f"slices were written during a hand-over: before {before[:3000]}\nand now {now[:3000]}")
    held_claims.verify_and_release()


def killed_handover(node: Node, number: int, chance: random.Random) -> None:
    """Kill one of the two at any instant of a takeover, or after it: the other one serves, and no claim is lost."""
    handovers = node.vendor.handovers
    held_claims = PreparedClaims(node, handovers[number // 3 % len(handovers)][0])
    before, name = published(node), str(uuid.UUID(int=chance.getrandbits(128)))
    previous, pid = node.pid, node.launch(instance=name)
    if number % 3 == 0:  # the new one, which has taken over
        channel = take_over(node, pid, name)
        end_instance(node, pid, signal.SIGKILL, channel)
    else:
        time.sleep(chance.uniform(0, LATEST_KILL_SECONDS))
        if number % 3 == 1:  # the old one
            end_instance(node, previous, signal.SIGKILL)
        else:  # the new one, at any point
            end_instance(node, pid, signal.SIGKILL)
    node.pid, node.instance = (pid, name) if number % 3 == 1 else (previous, "")
    node.wait_serving()
    node.wait_until("the other one serves", lambda: node.status()["role"] == "serving", 60)
    node.wait_ready()
    held_claims.await_prepared(PARTS_WITH_SOCKETS)
    if published(node) != before:
        raise Broken("slices were written")
    node.stop()
    node.instance = ""
    node.start_ready()
    held_claims.verify_and_release()
