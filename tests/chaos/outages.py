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
from tests.chaos.prepared_claims import PreparedClaims
from tests.chaos.snapshot import await_snapshot, difference, snapshot

HOUR, YEAR = 3600, 365 * 86400
CLOCK_JUMPS = (HOUR, -HOUR, 86400, -30 * 86400, YEAR, -YEAR, 20 * YEAR, -30 * YEAR)
CLOCK = Path("/run/chaos-clock")
CLOCK_LIBRARY = Path("/run/chaos-clock.so")


class Load:
    """Prepare and unprepare one claim of each kind repeatedly, in one thread per kind."""

    def __init__(self, node: Node, kinds: tuple[str, ...]) -> None:
        self.node = node
        self.claims = {kind: node.claim_of(node.kinds[kind], f"load-{kind}") for kind in kinds}
        # By kind: the number of calls, and of prepares among them, that were answered without an error.
        self.answered_calls, self.prepared = dict.fromkeys(kinds, 0), dict.fromkeys(kinds, 0)
        self.prepare_errors: list[str] = []
        self.unprepare_errors: list[str] = []
        #: The errors of calls without an answer.
        self.unanswered: list[str] = []
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._cycle, args=(kind,)) for kind in kinds]

    def _cycle(self, kind: str) -> None:
        claim = self.claims[kind]
        while not self._stopping.is_set():
            for method in ("NodePrepareResources", "NodeUnprepareResources"):
                try:
                    answer = self.node.call_once(method, *claim)
                # ValueError: grpcio raises it for a channel that was just closed because the driver was killed.
                except (grpc.RpcError, AssertionError, ValueError) as error:
                    self.unanswered.append(str(error))
                    self._stopping.wait(0.05)
                    continue
                is_prepare = method == "NodePrepareResources"
                if answer.error:
                    (self.prepare_errors if is_prepare else self.unprepare_errors).append(answer.error)
                    self._stopping.wait(0.05)
                else:
                    self.answered_calls[kind] += 1
                    self.prepared[kind] += is_prepare

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stopping.set()
            for thread in self._threads:
                thread.join()
        for claim in self.claims.values():
            self.node.unprepare(*claim)


def published_devices(node: Node) -> dict[str, Any]:
    """Return the published devices by name, without the attributes about claims, which follow the claims with a delay."""
    reported = node.vendor.claim_attributes
    return {
        name: {
            **device,
            "attributes": {key: value for key, value in device["attributes"].items() if key not in reported},
        }
        for name, device in node.devices().items()
    }


def are_pools_complete(node: Node) -> bool:
    """Return whether each pool is complete: all its slices have one generation, and their number is the stated one."""
    pools: dict[str, list[tuple[int, int]]] = {}
    for item in list(node.api.model.slices.values()):
        pool = item["spec"]["pool"]
        pools.setdefault(pool["name"], []).append((pool["generation"], pool["resourceSliceCount"]))
    return bool(pools) and all(set(found) == {(found[0][0], len(found))} for found in pools.values())


def hold_without_api(node: Node, held: PreparedClaims, seconds: float, *, restarts: bool) -> None:
    """Assert for a while that the driver runs and prepared claims stay prepared. Optionally restart it halfway."""
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        if restarts and passed > seconds / 2:
            restarts = False
            node.kill()
            node.start()
        if node.has_ended():
            raise CrashLoop(f"the driver ended without an API server\n{node.log_tail()}")
        for claim in held.claims:
            if error := node.call_once("NodePrepareResources", *claim).error:
                raise Lost(f"a claim that is prepared is refused without an API server: {error}")
        time.sleep(0.1)


def api_away(node: Node, number: int, chance: random.Random, *, seconds: float) -> None:
    """Stop the API server under load: prepared claims stay and can be unprepared. Everything continues after its return."""
    before, published = snapshot(node), published_devices(node)
    held_claims = PreparedClaims(node, ("static", "three"))
    leaving = node.claim_of(node.kinds["whole"])
    node.prepare(*leaving)
    load = Load(node, (node.vendor.other_kind, "admin"))
    restarts = number % 2 == 1
    node.api.stop_serving()
    try:
        node.api.call(_delete(node, chance.choice(sorted(node.api.model.slices))))  # the driver cannot get the event
        with load.running():
            node.unprepare(*leaving)
            hold_without_api(node, held_claims, seconds, restarts=restarts)
            # For an unknown claim the driver needs the API server: the kubelet gets an error, and retries.
            node.wait_until("new claims are refused", lambda: load.prepare_errors)
            done, refusals = dict(load.prepared), list(load.prepare_errors)
            node.api.resume_serving()
            node.wait_until(
                "claims are prepared again", lambda: all(load.prepared[kind] > done[kind] for kind in done), 90
            )
    finally:
        if not node.api.is_serving:
            node.api.resume_serving()
    if others := [each for each in refusals if "API server" not in each]:
        raise Broken(f"a claim was rejected for a reason other than the missing API server: {others[:3]}")
    if load.unprepare_errors:
        raise Leaked(
            f"{len(load.unprepare_errors)} claims could not be unprepared without an API server: {load.unprepare_errors[:3]}"
        )
    if load.unanswered and not restarts:
        raise Broken(f"{len(load.unanswered)} calls had no answer without an API server: {load.unanswered[:3]}")
    node.wait_ready(90)
    held_claims.verify_and_release()
    await_snapshot(node, "nothing is left", before)
    node.wait_until(
        "all devices are published as before",
        lambda: are_pools_complete(node) and published_devices(node) == published,
        90,
    )


def kubelet_storm(node: Node, number: int, chance: random.Random) -> None:
    """Restart the kubelet repeatedly: calls are aborted, the same claims are requested at once, and the driver's slices are deleted."""
    del number
    before = snapshot(node)
    claims = [node.claim_of(node.kinds[kind]) for kind in ("static", "three", node.vendor.other_kind)]
    for _start in range(15):
        for name in list(node.api.model.slices):
            node.api.call(_delete(node, name))
        node.wait_serving()  # another registration, other connections
        calls = []
        for claim in claims * 3:
            calls.append(node.start_call("NodePrepareResources", *claim))
            if chance.random() < 0.4:
                calls.append(node.start_call("NodeUnprepareResources", *claim))
        time.sleep(chance.uniform(0, 0.05))
        for call in calls:
            if chance.random() < 0.7:
                call.cancel()
        node.disconnect()
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
    node.wait_until("all devices are published again", lambda: len(node.devices()) > 100)


async def _delete(node: Node, name: str) -> None:
    if name in node.api.model.slices:
        node.api.model.delete_slice(name)


def compile_clock() -> None:
    """Build the library that replaces the driver's clock."""
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", CLOCK_LIBRARY, source], check=True)


def clock_jump(node: Node, number: int, chance: random.Random) -> None:
    """Change the time of day while claims are prepared, also during a restart: the driver keeps running, and no claim is lost."""
    jump = CLOCK_JUMPS[number % len(CLOCK_JUMPS)]
    node.stop()
    CLOCK.write_text("0")
    if not CLOCK_LIBRARY.exists():
        compile_clock()
    node.start_ready(clock=CLOCK, library=CLOCK_LIBRARY)
    held_claims = PreparedClaims(node)
    CLOCK.write_text(str(jump))
    other = node.claim_of(node.kinds["admin"])
    node.prepare(*other)
    last_scan = node.status()["looked_at"]
    if abs(last_scan - time.time() - jump) > 600:
        node.wait_until(
            "the driver scans after the jump", lambda: abs(node.status()["looked_at"] - time.time() - jump) < 600
        )
    node.unprepare(*other)
    if chance.random() < 0.5:
        node.kill()
        node.start(clock=CLOCK, library=CLOCK_LIBRARY)
    node.wait_ready()
    held_claims.await_prepared()
    CLOCK.write_text(str(-jump // 2))
    node.wait_ready()
    held_claims.release()
    node.stop()
    node.start_ready()


def two_drivers(node: Node, number: int, chance: random.Random) -> None:
    """Start a second driver next to the first, or two at the same time: one serves, and the other ends without any change."""
    held_claims = PreparedClaims(node, ("static", "three"))
    if number % 2:
        second = node.launch()
        status = node.wait_ended(pid=second)
        if status != 1:
            raise Broken(f"the second driver ended with {status}; expected 1")
    else:
        node.kill()
        pids = [node.launch() for _time in range(chance.randint(2, 4))]
        node.wait_until("all but one have ended", lambda: sum(node.has_ended(pid) for pid in pids) == len(pids) - 1)
        (node.pid,) = [pid for pid in pids if not node.has_ended(pid)]
        node.wait_serving()
    node.wait_ready()
    if node.status()["pid"] not in (node.pid, 0):
        raise Broken("the status is not from the running process")
    held_claims.verify_and_release()


def leftovers(node: Node, number: int, chance: random.Random) -> None:
    """Create files, directories, and programs of an unknown claim: the driver removes them at its start, or at its next timer run."""
    before = snapshot(node)
    running = number % 2 == 1
    kept = PreparedClaims(node, ("static",))
    node.kill()
    if running:
        node.start(timer=1.0)  # 1 s instead of the usual interval of 10 min
        node.wait_ready()
    with driver_suspended(node) if running else nullcontext():
        create_leftovers(node, str(uuid.UUID(int=chance.getrandbits(128))), chance)
        if node.vendor.start_orphaned_program is not None and snapshot(node)["programs"] != before["programs"] + 1:
            raise Broken("the orphaned program does not run")
    if not running:
        node.start_ready()
    kept.await_prepared()
    kept.release()
    if text := difference(snapshot(node), before):
        raise Leaked(text)
    if running:
        node.kill()
        node.start_ready()


@contextmanager
def driver_suspended(node: Node) -> Iterator[None]:
    """Suspend the driver for a while, so that it sees all leftovers at once."""
    os.kill(node.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def create_leftovers(node: Node, claim: str, chance: random.Random) -> None:
    """Create the files of a claim on the node: an unusable CDI file, files for containers, and a vendor program if there is one."""
    for folder in (node.metadata, node.state / "metadata"):  # the current place, and that of earlier releases
        (folder / claim).mkdir(parents=True)
        (folder / claim / "r0.json").write_text("{}")
    (CDI / f"k8s.{node.driver}-claim_{claim}.json").write_text(chance.choice(("{}", "", "no JSON", "[1, 2")))
    if node.vendor.start_orphaned_program is not None:
        node.vendor.start_orphaned_program(claim)
