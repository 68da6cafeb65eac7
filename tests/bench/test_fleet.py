# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Measure the controller with 5,000 nodes on a real API server, at rest and when nodes are deleted or not ready.

``DRA_ACCELERATORS_FLEET_NODES`` sets another size. Durations are not asserted. The test asserts that there are no
unnecessary requests, and that the memory matches the number of objects.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import yaml
from dra_driver.api.client import ApiClient

from tests.bench import fleet
from tests.bench.api_server import ApiServer, free_port
from tests.bench.figures import Figures

FLEET = int(os.environ.get("DRA_ACCELERATORS_FLEET_NODES", "5000"))
GONE, NOT_READY = max(FLEET // 50, 1), max(FLEET // 5, 1)
REST_SECONDS = 60
GRACE, DRIFTING = 5, 20
#: Maximum memory of the controller: the interpreter with its libraries, a page of a list, and a constant per object.
BASE_KIB, OBJECT_KIB = 110 * 1024, 1
REQUESTS = re.compile(r"^dra_accelerators_controller_api_requests_total\{(.*)\} (\S+)$", re.MULTILINE)
LEASE = ("leases",)


class Controller:
    """The controller as a process on this host. ``more`` are settings."""

    def __init__(self, folder: Path, kubeconfig: Path, **more: Any) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        settings = {
            "name": "here",
            "kubeconfig": str(kubeconfig),
            "namespace": "default",
            "address": self.address,
            "lease_seconds": 60,
            "grace": GRACE,
            "drifting": DRIFTING,
            "drivers": [fleet.DRIVER],
            **more,
        }
        (folder / "controller.yaml").write_text(yaml.safe_dump(settings))
        self.log = folder / "controller.log"
        command = [
            sys.executable,
            "-m",
            "dra_driver.controller",
            "run",
            "--config",
            str(folder / "controller.yaml"),
        ]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log)

    def metrics(self) -> str:
        """Return its metrics; empty while it does not answer."""
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://{self.address}/metrics", timeout=5) as reported,
        ):
            return str(reported.read().decode())
        return ""

    def value(self, series: str) -> float:
        """Return the value of one series; -1 if it does not exist."""
        found = re.search(rf"^dra_accelerators_controller_{re.escape(series)} (\S+)$", self.metrics(), re.MULTILINE)
        return float(found.group(1)) if found else -1.0

    def requests(self) -> Counter[str]:
        """Return the counts of its API requests, by verb and resource."""
        counted: Counter[str] = Counter()
        for labels, value in REQUESTS.findall(self.metrics()):
            named = dict(re.findall(r'(\w+)="([^"]*)"', labels))
            counted[f"{named['verb']} {named['resource']}"] += int(float(value))
        return counted

    def memory(self) -> tuple[int, int]:
        """Return the resident memory in KiB, current and maximum."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        known = dict(re.findall(r"^(\w+):\s+(\d+) kB$", status, re.MULTILINE))
        return int(known["VmRSS"]), int(known["VmHWM"])

    def processor(self) -> float:
        """Return the used processor time in seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def until(self, what: str, probe: Callable[[], Any], seconds: float = 600) -> float:
        """Poll until the condition is true; return the elapsed seconds."""
        began = time.monotonic()
        while not probe():
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            assert time.monotonic() - began < seconds, f"waited {seconds} s for: {what}\n{self.log.read_text()[-3000:]}"
            await asyncio.sleep(0.1)
        return time.monotonic() - began

    def stop(self) -> None:
        """Stop it with SIGTERM and assert a clean exit."""
        self.process.terminate()
        assert self.process.wait(30) == 0, self.log.read_text()[-3000:]


@contextlib.asynccontextmanager
async def background_task(work: Any) -> AsyncIterator[None]:
    task = asyncio.ensure_future(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def without_lease(counted: Counter[str]) -> dict[str, int]:
    return {what: number for what, number in counted.items() if number and not what.endswith(LEASE)}


def mib(kib: int) -> str:
    return f"{kib / 1024:.0f} MiB"


def test_the_controller_over_a_large_fleet(tmp_path: Path, figures: Figures) -> None:
    server = ApiServer(tmp_path)
    with server.running():
        asyncio.run(measure(tmp_path, server, figures))


async def measure(folder: Path, server: ApiServer, figures: Figures) -> None:
    client = ApiClient(str(server.kubeconfig), user_agent="dra-accelerators-driver/bench")
    began = time.monotonic()
    number = await fleet.create_fleet(client, FLEET)
    print(
        f"{FLEET} nodes with {number} slices made in {time.monotonic() - began:.0f} s", file=sys.__stdout__, flush=True
    )
    controller = Controller(folder, server.kubeconfig)
    try:
        await controller.until("it acts", lambda: controller.value("leading") == 1)
        took = await controller.until("all seen", lambda: controller.value('objects{kind="slices"}') == number)
        assert controller.value('nodes{release="0.1.0-00000001",state="ready"}') == FLEET
        now, most = controller.memory()
        figures.add_line(
            f"controller, {FLEET} nodes, {number} slices: all seen {took:.1f} s after it acts, {mib(now)} resident, {mib(most)} at most"
        )
        await measure_idle(client, controller, figures)
        await measure_deletion(client, controller, fleet.names(FLEET)[1:2], figures)
        await measure_deletion(client, controller, fleet.names(FLEET)[-GONE:], figures)
        await measure_unready_nodes(client, controller, figures)
        now, most = controller.memory()
        assert most < BASE_KIB + OBJECT_KIB * (FLEET + number), f"{mib(most)} for {FLEET + number} objects"
        figures.add_line(f"controller, at the end: {mib(now)} resident, {mib(most)} at most")
    finally:
        controller.stop()
        await client.close()


async def measure_idle(client: ApiClient, controller: Controller, figures: Figures) -> None:
    before, used = controller.requests(), controller.processor()
    async with background_task(fleet.heartbeats(client, FLEET)):
        await asyncio.sleep(REST_SECONDS)
    asked, used = controller.requests() - before, controller.processor() - used
    figures.add_line(
        f"controller, at rest, kubelets' heartbeats coming in: {asked.total() * 60 / REST_SECONDS:.0f} API calls a minute, all about "
        f"its Lease; {used * 60 / REST_SECONDS:.2f} s of a processor a minute"
    )
    assert asked and not {what for what in without_lease(asked) if not what.startswith("WATCH")}, asked


async def slices_of(client: ApiClient, names: list[str]) -> int:
    """Return the number of slices of these nodes."""
    found = 0
    for name in names:
        answer = await fleet.request(client, "GET", fleet.SLICES, params={"fieldSelector": f"spec.nodeName={name}"})
        found += len(answer["items"])
    return found


async def measure_deletion(client: ApiClient, controller: Controller, names: list[str], figures: Figures) -> None:
    """Delete Nodes and measure the time and requests until all their slices are deleted."""
    slices, before = await slices_of(client, names), controller.requests()
    done = 'clean_up_actions_total{action="delete-slice",outcome="done"}'
    so_far, began = controller.value(done), time.monotonic()
    await fleet.await_all(fleet.request(client, "DELETE", f"{fleet.NODES}/{name}") for name in names)
    deleted = time.monotonic()
    await controller.until("all are deleted", lambda: controller.value(done) == so_far + slices)
    took = time.monotonic() - began
    assert await slices_of(client, names) == 0
    calls = without_lease(controller.requests() - before)
    # If a node is deleted during a pass, that pass can delete some of its slices and the next pass the others.
    asked_of_nodes = 2 * (len(names) + len(names) // 10 + 1)
    # On a slow host a Node can be absent for so long that the controller reports drift, and later its end.
    told_of_drift = 2 * len(names) if took > DRIFTING else 0
    most = 2 * slices + asked_of_nodes + told_of_drift
    assert calls["DELETE resourceslices"] == slices and sum(calls.values()) <= most, (took, calls)
    figures.add_line(
        f"controller, Nodes deleted: {len(names)}, in {deleted - began:.1f} s; their {slices} slices are deleted {took:.1f} s after the "
        f"first (grace {GRACE} s), by {sum(calls.values())} calls: "
        f"{', '.join(f'{number} {what}' for what, number in sorted(calls.items()))}"
    )


async def measure_unready_nodes(client: ApiClient, controller: Controller, figures: Figures) -> None:
    names = fleet.names(FLEET)[2 : 2 + NOT_READY]
    before = controller.requests()
    await fleet.await_all(fleet.write_status(client, name, ready=False) for name in names)
    series = 'drift{kind="node-not-ready"}'
    await controller.until("all are counted", lambda: controller.value(series) == NOT_READY)
    calls = without_lease(controller.requests() - before)
    events = calls.pop("POST events", 0)  # not yet expected: Events are written one by one
    assert not calls and events < 100, (events, calls)
    await fleet.await_all(fleet.write_status(client, name, ready=True) for name in names)
    await controller.until("none is", lambda: controller.value(series) == 0)
    figures.add_line(
        f"controller, {NOT_READY} Nodes are not ready: all are counted; {events} Events are written by then, the others one by one"
    )
