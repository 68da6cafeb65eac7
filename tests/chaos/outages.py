# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Outages around the driver: the API server, the kubelet, the clock, a second driver, and leftovers of other programs."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import grpc

from tests.chaos.errors import Broken, CrashLoop, Leaked, Lost
from tests.chaos.node import CDI, Node
from tests.chaos.snapshot import await_snapshot, difference, snapshot
from tests.chaos.tenants import Tenants

HOUR, YEAR = 3600, 365 * 86400
JUMPS = (HOUR, -HOUR, 86400, -30 * 86400, YEAR, -YEAR, 20 * YEAR, -30 * YEAR)
CLOCK = Path("/run/chaos-clock")
CLOCK_LIBRARY = Path("/run/chaos-clock.so")


class Load:
    """Load of claims that are prepared and unprepared all the time, one thread per kind.

    ``rounds`` and ``prepared``: the number of calls, and of prepares among them, that were answered without an error,
    by kind. ``refusals`` are the errors of prepares, ``kept`` those of unprepares, and ``unanswered`` the calls without
    an answer.
    """

    def __init__(self, node: Node, kinds: tuple[str, ...]) -> None:
        self.node = node
        self.claims = {kind: node.claim_of(node.kinds[kind], f"load-{kind}") for kind in kinds}
        self.rounds, self.prepared = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
        self.refusals: list[str] = []
        self.kept: list[str] = []
        self.unanswered: list[str] = []
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._cycle, args=(kind,)) for kind in kinds]

    def _cycle(self, kind: str) -> None:
        claim = self.claims[kind]
        while not self._over.is_set():
            for method in ("NodePrepareResources", "NodeUnprepareResources"):
                try:
                    answer = self.node.ask(method, *claim)
                # ValueError: grpcio raises it for a channel that was just closed because the driver was killed.
                except (grpc.RpcError, AssertionError, ValueError) as error:
                    self.unanswered.append(str(error))
                    self._over.wait(0.05)
                    continue
                prepares = method == "NodePrepareResources"
                if answer.error:
                    (self.refusals if prepares else self.kept).append(answer.error)
                    self._over.wait(0.05)
                else:
                    self.rounds[kind] += 1
                    self.prepared[kind] += prepares

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()
        for claim in self.claims.values():
            self.node.unprepare(*claim)


def offered(node: Node) -> dict[str, Any]:
    """Return the published devices by name, without the attributes about claims, which follow the claims with a delay."""
    reported = node.vendor.told_of_claims
    return {
        name: {
            **device,
            "attributes": {key: value for key, value in device["attributes"].items() if key not in reported},
        }
        for name, device in node.devices().items()
    }


def are_whole(node: Node) -> bool:
    """Return whether each pool is complete: all its slices have one generation, and their number is the stated one."""
    pools: dict[str, list[tuple[int, int]]] = {}
    for item in list(node.api.model.slices.values()):
        pool = item["spec"]["pool"]
        pools.setdefault(pool["name"], []).append((pool["generation"], pool["resourceSliceCount"]))
    return bool(pools) and all(set(found) == {(found[0][0], len(found))} for found in pools.values())


def without_api(node: Node, held: Tenants, seconds: float, *, restarts: bool) -> None:
    """Assert for a while that the driver runs and prepared claims stay prepared. Optionally restart it halfway."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if restarts and passed > seconds / 2:
            restarts = False
            node.kill()
            node.start()
        if node.ended():
            raise CrashLoop(f"the driver ended without an API server\n{node.said()}")
        for claim in held.claims:
            if error := node.ask("NodePrepareResources", *claim).error:
                raise Lost(f"a claim that is prepared is refused without an API server: {error}")
        time.sleep(0.1)


def api_away(node: Node, number: int, chance: random.Random, *, seconds: float) -> None:
    """Stop the API server under load: prepared claims stay and can be unprepared. Everything continues after its return."""
    before, published = snapshot(node), offered(node)
    tenants = Tenants(node, ("static", "three"))
    leaving = node.claim_of(node.kinds["whole"])
    node.prepare(*leaving)
    load = Load(node, (node.vendor.another, "admin"))
    restarts = number % 2 == 1
    node.api.away()
    try:
        node.api.call(_delete(node, chance.choice(sorted(node.api.model.slices))))  # the driver cannot get the event
        with load.running():
            node.unprepare(*leaving)
            without_api(node, tenants, seconds, restarts=restarts)
            # For an unknown claim the driver needs the API server: the kubelet gets an error, and retries.
            node.until("new claims are refused", lambda: load.refusals)
            done, refusals = dict(load.prepared), list(load.refusals)
            node.api.back()
            node.until("claims are prepared again", lambda: all(load.prepared[kind] > done[kind] for kind in done), 90)
    finally:
        if not node.api.answers:
            node.api.back()
    if others := [each for each in refusals if "API server" not in each]:
        raise Broken(f"a claim was refused for another reason than that there is no API server: {others[:3]}")
    if load.kept:
        raise Leaked(f"{len(load.kept)} claims could not be unprepared without an API server: {load.kept[:3]}")
    if load.unanswered and not restarts:
        raise Broken(f"{len(load.unanswered)} calls had no answer without an API server: {load.unanswered[:3]}")
    node.wait_ready(90)
    tenants.await_prepared()
    tenants.give_back()
    await_snapshot(node, "nothing is left", before)
    node.until("all devices are published as before", lambda: are_whole(node) and offered(node) == published, 90)


def kubelet_storm(node: Node, number: int, chance: random.Random) -> None:
    """Restart the kubelet repeatedly: calls are aborted, the same claims are requested at once, and the driver's slices are deleted."""
    del number
    before = snapshot(node)
    claims = [node.claim_of(node.kinds[kind]) for kind in ("static", "three", node.vendor.another)]
    for _start in range(15):
        for name in list(node.api.model.slices):
            node.api.call(_delete(node, name))
        node.wait_serving()  # another registration, other connections
        calls = []
        for claim in claims * 3:
            calls.append(node.begin("NodePrepareResources", *claim))
            if chance.random() < 0.4:
                calls.append(node.begin("NodeUnprepareResources", *claim))
        time.sleep(chance.uniform(0, 0.05))
        for call in calls:
            if chance.random() < 0.7:
                call.cancel()
        node.hang_up()
        if chance.random() < 0.2:
            node.kill()
            node.start()
    node.wait_serving()
    node.wait_ready()
    for claim in claims:
        node.prepare(*claim)
    for claim in claims:
        node.unprepare(*claim)
    await_snapshot(node, "nothing is left", before)
    node.until("all devices are published again", lambda: len(node.devices()) > 100)


async def _delete(node: Node, name: str) -> None:
    if name in node.api.model.slices:
        node.api.model.delete_slice(name)


def compile_clock() -> None:
    """Build the library that replaces the driver's clock."""
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", CLOCK_LIBRARY, source], check=True)


def clock_jump(node: Node, number: int, chance: random.Random) -> None:
    """Change the time of day while claims are prepared, also during a restart: the driver keeps running, and no claim is lost."""
    jump = JUMPS[number % len(JUMPS)]
    node.stop()
    CLOCK.write_text("0")
    if not CLOCK_LIBRARY.exists():
        compile_clock()
    node.start(clock=CLOCK, library=CLOCK_LIBRARY)
    node.wait_ready()
    tenants = Tenants(node)
    CLOCK.write_text(str(jump))
    other = node.claim_of(node.kinds["admin"])
    node.prepare(*other)
    looked = node.status()["looked_at"]
    if abs(looked - time.time() - jump) > 600:
        node.until(
            "the driver looks after the jump", lambda: abs(node.status()["looked_at"] - time.time() - jump) < 600
        )
    node.unprepare(*other)
    if chance.random() < 0.5:
        node.kill()
        node.start(clock=CLOCK, library=CLOCK_LIBRARY)
    node.wait_ready()
    tenants.await_prepared()
    CLOCK.write_text(str(-jump // 2))
    node.wait_ready()
    tenants.give_back()
    node.stop()
    node.start()
    node.wait_ready()


def two_drivers(node: Node, number: int, chance: random.Random) -> None:
    """Start a second driver next to the first, or two at the same time: one serves, and the other ends without any change."""
    tenants = Tenants(node, ("static", "three"))
    if number % 2:
        second = node.launch()
        status = node.wait_ended(pid=second)
        if status != 1:
            raise Broken(f"the second driver ended with {status}; expected 1")
    else:
        node.kill()
        pids = [node.launch() for _time in range(chance.randint(2, 4))]
        node.until("all but one have ended", lambda: sum(node.ended(pid) for pid in pids) == len(pids) - 1)
        (node.pid,) = [pid for pid in pids if not node.ended(pid)]
        node.wait_serving()
    node.wait_ready()
    if node.status()["pid"] not in (node.pid, 0):
        raise Broken("another process than the one that lives says how the driver is")
    tenants.await_prepared()
    tenants.give_back()


def leftovers(node: Node, number: int, chance: random.Random) -> None:
    """Create files, directories, and programs of an unknown claim: the driver removes them at its start, or at its next timer run."""
    before = snapshot(node)
    running = number % 2 == 1
    kept = Tenants(node, ("static",))
    node.kill()
    if running:
        node.start(timer=1.0)  # 1 s instead of the usual interval of 10 min
        node.wait_ready()
    with at_rest(node) if running else nullcontext():
        leave_behind(node, str(uuid.UUID(int=chance.getrandbits(128))), chance)
        if node.vendor.leave_program is not None and snapshot(node)["programs"] != before["programs"] + 1:
            raise Broken("no program runs that the driver could end")
    if not running:
        node.start()
        node.wait_ready()
    kept.await_prepared()
    kept.give_back()
    if text := difference(snapshot(node), before):
        raise Leaked(text)
    if running:
        node.kill()
        node.start()
        node.wait_ready()


@contextmanager
def at_rest(node: Node) -> Iterator[None]:
    """Suspend the driver for a while, so that it sees all leftovers at once."""
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def leave_behind(node: Node, claim: str, chance: random.Random) -> None:
    """Create the files of a claim on the node: an unusable CDI file, files for containers, and a vendor program if there is one."""
    for folder in (node.metadata, node.state / "metadata"):  # the current place, and that of earlier releases
        (folder / claim).mkdir(parents=True)
        (folder / claim / "r0.json").write_text("{}")
    (CDI / f"k8s.{node.driver}-claim_{claim}.json").write_text(chance.choice(("{}", "", "no JSON", "[1, 2")))
    if node.vendor.leave_program is not None:
        node.vendor.leave_program(claim)
