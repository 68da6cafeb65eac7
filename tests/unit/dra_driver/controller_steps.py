# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Helpers for controller tests: run a scenario with a server, run work in the background, wait, and elect a leader."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dra_driver.api.client import ApiClient
from dra_driver.api.events import EventRecorder
from dra_driver.controller.cleanup.cleanup_loop import CleanupLoop
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.lease import Elector, LeaseTimes
from dra_driver.controller.reporting import Reporter
from object_server import ObjectServer

NODES, RULES = "/api/v1/nodes", "/apis/resource.k8s.io/v1/devicetaintrules"
SLICES = "/apis/resource.k8s.io/v1/resourceslices"
CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"
OWN_CLAIMS = "/apis/resource.k8s.io/v1/namespaces/team/resourceclaims"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/here/leases/controller"
DRIVER = "gpu.example.com"
QUICK = LeaseTimes(lease_seconds=0.6, renew_seconds=0.4, retry_seconds=0.05)


async def until(what: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "it did not come about"
        await asyncio.sleep(0.01)


def run(tmp_path: Path, scenario: Any) -> None:
    async def main() -> None:
        server = ObjectServer()
        file = await server.start(tmp_path)
        client = ApiClient(file, user_agent="test")
        try:
            await asyncio.wait_for(scenario(server, client), 60)
        finally:
            await client.close()
            await server.stop()

    asyncio.run(main())


@contextlib.asynccontextmanager
async def running(work: Any) -> Any:
    task = asyncio.ensure_future(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def candidate(client: ApiClient, identity: str, **options: Any) -> Elector:
    return Elector(client, namespace="here", name="controller", identity=identity, **{"times": QUICK, **options})


def cluster_of(server: ObjectServer) -> None:
    """Store a deleted and an existing node with their objects."""
    server.put(f"{NODES}/here", {"status": {"conditions": [{"type": "Ready", "status": "True"}]}})
    for node in ("here", "gone"):
        server.put(
            f"{SLICES}/{node}",
            {
                "metadata": {"managedFields": [{"manager": "dra-accelerators-driver"}]},
                "spec": {"driver": DRIVER, "nodeName": node, "pool": {"name": node}},
            },
        )
        field = {"key": "metadata.name", "operator": "In", "values": [node]}
        allocation = {
            "devices": {"results": [{"driver": DRIVER}]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        }
        labels = {"app.kubernetes.io/managed-by": "dra-accelerators", "dra.accelerators/node": node}
        server.put(f"{RULES}/{node}", {"metadata": {"labels": labels}})
        for name, consumers in (("free", []), ("used", ["alive"]), ("left", ["away"])):
            reserved = [{"resource": "pods", "name": pod, "uid": f"uid-{pod}"} for pod in consumers]
            claim = {
                "metadata": {"namespace": "team", "finalizers": ["dra.accelerators/held", "else/held"]},
                "status": {"allocation": allocation, "reservedFor": reserved},
            }
            # The server lists claims of all namespaces at a different path.
            server.objects[f"{CLAIMS}/{node}-{name}"] = server.put(f"{OWN_CLAIMS}/{node}-{name}", claim)
    server.put("/api/v1/namespaces/team/pods/alive", {"metadata": {"uid": "uid-alive"}, "status": {"phase": "Running"}})


def new_cleanup_loop(client: ApiClient, measurements: ControllerMetrics, **options: Any) -> CleanupLoop:
    events = EventRecorder(client, component="test", node_name="test")
    settings = {"may_act": lambda: True, "grace": 0.1, "interval": 0.05, "dry_run": False, "lasting": 600, **options}
    lasting = settings.pop("lasting")
    reporter = Reporter(
        drivers=[DRIVER], events=events, measurements=measurements, lasting=lasting, dry_run=settings["dry_run"]
    )
    return CleanupLoop(
        client, drivers=[DRIVER], events=events, measurements=measurements, reporter=reporter, **settings
    )
