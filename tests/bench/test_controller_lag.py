# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Measure how long passes of the controller block its event loop, with 100,000 claims that change as 1,000 pods per
minute change them.

The events are passed to the watches directly. A real API server stores the Events of the reports: each second one node
has a new release, and every second one is not ready. Durations are not asserted.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from dra_driver.api.client import ApiClient
from dra_driver.api.events import EventRecorder
from dra_driver.controller.cleanup.cleanup_loop import CleanupLoop
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.facts import RELEASE_LABEL
from dra_driver.controller.reporting import Reporter

from tests.bench import fleet
from tests.bench.api_server import ApiServer
from tests.bench.figures import Figures

FLEET = int(os.environ.get("DRA_ACCELERATORS_FLEET_NODES", "5000"))
CLAIMS_OF_NODE, EVENTS_A_SECOND, SECONDS = 20, 100, 30
STEP_SECONDS = 0.002


def claim(name: str, node: str, version: int = 0) -> dict[str, Any]:
    """Return a prepared claim of a pod."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    allocation = {
        "devices": {"results": [{"request": "gpu", "driver": fleet.DRIVER, "pool": node, "device": "gpu-0"}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
    }
    reserved = [{"resource": "pods", "name": f"{name}-pod", "uid": f"{name}-{version}"}]
    return {
        "metadata": {"namespace": "team", "name": name, "uid": name},
        "status": {"allocation": allocation, "reservedFor": reserved},
    }


def test_lag_of_the_event_loop_with_claims_that_change(tmp_path: Path, figures: Figures) -> None:
    server = ApiServer(tmp_path)
    with server.running():
        asyncio.run(scenario(server.kubeconfig, figures))


async def scenario(kubeconfig: Path, figures: Figures) -> None:
    client = ApiClient(str(kubeconfig))
    measurements = ControllerMetrics()
    events = EventRecorder(client, component="bench", node_name="bench")
    reporter = Reporter(drivers=[fleet.DRIVER], events=events, measurements=measurements, lasting=2, dry_run=False)
    cleanup_loop = CleanupLoop(
        client,
        drivers=[fleet.DRIVER],
        events=events,
        measurements=measurements,
        may_act=lambda: True,
        grace=120,
        interval=30,
        dry_run=True,
        reporter=reporter,
    )
    names = fleet.names(FLEET)
    texts = {partitioned: fleet.slices(partitioned=partitioned) for partitioned in (False, True)}
    for position, name in enumerate(names):
        cleanup_loop.nodes._observe("ADDED", fleet.node(name))
        for body in json.loads(texts[position % fleet.PARTITIONED_NODE_INTERVAL == 0].replace(fleet.ANY_NAME, name)):
            body["metadata"] = {"name": f"{body['metadata']['generateName']}bench", "uid": name}
            body["metadata"]["managedFields"] = [{"manager": "dra-accelerators-driver"}]
            cleanup_loop.slices[0]._observe("ADDED", body)
        for number in range(CLAIMS_OF_NODE):
            cleanup_loop.claims._observe("ADDED", claim(f"{name}-{number}", name))
    for watched in cleanup_loop._watches:
        watched.current = True
        watched.synced.set()
    lags: list[float] = []
    cleaning = asyncio.ensure_future(cleanup_loop._clean_up())
    sending = asyncio.ensure_future(_send(cleanup_loop, names))
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        began = time.perf_counter()
        await asyncio.sleep(STEP_SECONDS)
        lags.append(time.perf_counter() - began - STEP_SECONDS)
    for task in (cleaning, sending):
        task.cancel()
    await asyncio.gather(cleaning, sending, return_exceptions=True)
    await events.close()
    written = len((await client.get("/api/v1/events"))["items"])
    assert written
    await client.close()
    lags.sort()
    passes = [line for line in measurements.text().decode().splitlines() if "pass_duration_seconds_count" in line]
    figures.add_line(
        f"controller, {FLEET} nodes, {len(cleanup_loop.claims.items)} claims, {EVENTS_A_SECOND} changes of claims and one of a node a second: "
        f"{float(passes[0].split()[1]):.0f} passes and {written} Events in {SECONDS} s; "
        f"lag of the event loop {1000 * lags[len(lags) * 99 // 100]:.0f} ms at p99, "
        f"{1000 * lags[-1]:.0f} ms at most"
    )


async def _send(cleanup_loop: CleanupLoop, names: list[str]) -> None:
    """Change claims and nodes until cancelled."""
    version = 0
    while True:
        for _each in range(EVENTS_A_SECOND):
            version += 1
            name = names[version % len(names)]
            cleanup_loop.claims._observe("MODIFIED", claim(f"{name}-0", name, version))
            await asyncio.sleep(1 / EVENTS_A_SECOND)
        changed = fleet.node(names[version % len(names)], ready=version % 200 != 0)
        changed["metadata"]["labels"][RELEASE_LABEL] = "0.1.0-00000002"
        cleanup_loop.nodes._observe("MODIFIED", changed)
