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
from tests.chaos.tenants import Tenants

#: The latest moment of a takeover at which a process is killed, in seconds after the start of the new one.
LATEST = 1.5
#: Parts of a snapshot in which another instance has its own sockets, and a killed one has left some.
SOCKETS = ("state directory", "registry")


def published(node: Node) -> str:
    """Return the slices in the API server with their versions, to detect writes, without the attributes about claims."""
    slices: dict[str, Any] = node.api.model.slices
    answer = node.vendor.told_of_claims
    if answer:
        devices = [device for each in slices.values() for device in each["spec"].get("devices", ())]
        return json.dumps(
            [{**each, "attributes": _without(each["attributes"], answer)} for each in devices], sort_keys=True
        )
    return json.dumps(slices, sort_keys=True)


def _without(attributes: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if name not in names}


def end(node: Node, pid: int, number: int, channel: grpc.Channel | None = None) -> int:
    """End a process that gets no more calls. Return its exit status."""
    os.kill(pid, number)
    status = node.wait_ended(pid=pid)
    if channel is not None:
        channel.close()
    return status


def succeed(node: Node, pid: int, instance: str) -> grpc.Channel | None:
    """Register a process, send all further calls to it, and wait until it serves. Return the previous channel."""
    node.register(pid, instance)
    previous = node.turn_to(pid, instance)
    node.until("the new instance serves", lambda: node.status()["role"] == "serving", 60)
    node.wait_ready()
    return previous


def hand_over(node: Node, number: int, chance: random.Random) -> None:
    """Another instance takes over while claims are held and calls arrive, and then the first one again: no call fails."""
    turns = node.vendor.turns
    held, comes_and_goes = turns[number % len(turns)]
    tenants = Tenants(node, held)
    load, before = Load(node, (comes_and_goes, "admin")), published(node)
    name = str(uuid.UUID(int=chance.getrandbits(128)))
    with load.running():
        for instance in (name, ""):
            done = dict(load.rounds)
            previous = node.pid
            channel = succeed(node, node.launch(instance=instance), instance)
            status = end(node, previous, signal.SIGTERM, channel)
            if status:
                raise Broken(f"the previous instance ended with {status} after SIGTERM\n{node.said()}")
            node.until(
                "calls of each kind are answered",
                lambda done=done: all(load.rounds[kind] > done[kind] for kind in done),
            )
    if failed := load.refusals + load.unanswered:
        raise Broken(f"{len(failed)} calls failed during a hand-over: {failed[:3]}\n{node.said()}")
    if (now := published(node)) != before:
        raise Broken(f"slices were written during a hand-over: before {before[:3000]}\nand now {now[:3000]}")
    tenants.await_prepared()
    tenants.give_back()


def interrupted(node: Node, number: int, chance: random.Random) -> None:
    """Kill one of the two at any instant of a takeover, or after it: the other one serves, and no claim is lost."""
    turns = node.vendor.turns
    tenants = Tenants(node, turns[number // 3 % len(turns)][0])
    before, name = published(node), str(uuid.UUID(int=chance.getrandbits(128)))
    previous, pid = node.pid, node.launch(instance=name)
    if number % 3 == 0:  # the new one, which has taken over
        channel = succeed(node, pid, name)
        end(node, pid, signal.SIGKILL, channel)
    else:
        time.sleep(chance.uniform(0, LATEST))
        if number % 3 == 1:  # the old one
            end(node, previous, signal.SIGKILL)
        else:  # the new one, at any point
            end(node, pid, signal.SIGKILL)
    node.pid, node.instance = (pid, name) if number % 3 == 1 else (previous, "")
    node.wait_serving()
    node.until("the other one serves", lambda: node.status()["role"] == "serving", 60)
    node.wait_ready()
    tenants.await_prepared(SOCKETS)
    if published(node) != before:
        raise Broken("slices were written")
    node.stop()
    node.instance = ""
    node.start()
    node.wait_ready()
    tenants.await_prepared()
    tenants.give_back()
