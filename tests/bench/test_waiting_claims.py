# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Count the events of claims that are prepared before pods are bound: for a watch of all claims and for a node's list,
on a real API server.

Each claim gets the writes of the scheduler, the driver, and the kubelet's pod. Durations are not asserted.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

from dra_driver.api.client import ApiClient
from dra_driver.api.events import EventRecorder
from dra_driver.controller.cleanup.cleanup_loop import CleanupLoop
from dra_driver.controller.controller_metrics import ControllerMetrics
from dra_driver.controller.facts import claim_facts
from dra_driver.controller.reporting import Reporter

from tests.bench import fleet
from tests.bench.api_server import ApiServer
from tests.bench.figures import Figures

NODES, CLAIMS_OF_NODE, FLEET = 10, 20, 5000
NAMESPACE = "drivers"
CLAIMS = "/apis/resource.k8s.io/v1/resourceclaims"
OWN_CLAIMS = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
LISTS = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
MERGE = "application/merge-patch+json"


class Heard:
    """The events of one watch: their number, and their size as JSON in bytes."""

    def __init__(self) -> None:
        self.events, self.size = 0, 0

    async def follow(self, client: ApiClient, path: str, **params: str) -> None:
        found = await client.get(path, {**params, "limit": "1"})
        async for event in client.watch(path, resource_version=found["metadata"]["resourceVersion"], params=params):
            if event.type != "BOOKMARK":
                self.events += 1
                self.size += len(json.dumps({"type": event.type, "object": event.object}, separators=(",", ":")))


def test_events_of_waiting_claims(tmp_path: Path, figures: Figures) -> None:
    server = ApiServer(tmp_path)
    with server.running():
        asyncio.run(scenario(str(server.kubeconfig), figures))


async def scenario(kubeconfig: str, figures: Figures) -> None:
    client, requests = ApiClient(kubeconfig), Counter[str]()

    def observe(verb: str, path: str, _code: str, _seconds: float) -> None:
        requests[verb] += LISTS in path and not path.endswith("/waiting-claims")

    acting = ApiClient(kubeconfig, observer=observe)
    await client.request("POST", "/api/v1/namespaces", body={"metadata": {"name": NAMESPACE}})
    names = fleet.names(NODES)
    for name in names:
        await client.request("POST", "/api/v1/nodes", body={"metadata": {"name": name}})
    events = EventRecorder(acting, component="bench", node_name="bench")
    measurements = ControllerMetrics()
    cleanup_loop = CleanupLoop(
        acting,
        drivers=[fleet.DRIVER],
        events=events,
        measurements=measurements,
        may_act=lambda: True,
        grace=120,
        interval=30,
        dry_run=False,
        reporter=Reporter(drivers=[fleet.DRIVER], events=events, measurements=measurements, lasting=600, dry_run=False),
        driver_namespace=NAMESPACE,
    )
    before, after = Heard(), Heard()
    tasks = [
        asyncio.ensure_future(cleanup_loop.run()),
        asyncio.ensure_future(before.follow(client, CLAIMS)),
        asyncio.ensure_future(after.follow(client, LISTS, fieldSelector=f"metadata.name=waiting-claims-{names[0]}")),
    ]
    while (
        not cleanup_loop.claims.synced.is_set()
        or cleanup_loop.claim_lists is None
        or not cleanup_loop.claim_lists.lists.synced.is_set()
    ):
        await asyncio.sleep(0.1)
    written = 0
    for number in range(CLAIMS_OF_NODE):
        for name in names:
            written += await _live(client, f"c-{number}", name)
        await asyncio.sleep(0.2)
    while await _lists(client) < NODES:
        await asyncio.sleep(0.1)
    for number in range(CLAIMS_OF_NODE):
        for name in names:
            written += await _die(client, f"c-{number}", name)
        await asyncio.sleep(0.2)
    while await _lists(client):
        await asyncio.sleep(0.1)
    while before.events < written:
        await asyncio.sleep(0.1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in (client, acting):
        await each.close()
    number = NODES * CLAIMS_OF_NODE
    lists = requests["PATCH"] + requests["DELETE"]
    # Each node of the fleet gets all events of all claims, or only those of its claims.
    size, events_of_claim = before.size / number, before.events / number
    figures.add_line(
        f"claims prepared before pods are bound, {number} on {NODES} nodes, {written / number:.1f} writes of a claim in its life: a watch of all claims "
        f"gets {events_of_claim:.1f} events and {size / 1000:.1f} kB for each claim, whatever its node; the list of a node "
        f"{after.events / CLAIMS_OF_NODE:.1f} events and {after.size / CLAIMS_OF_NODE / 1000:.1f} kB for each claim of that node, none for others; "
        f"{lists / number:.1f} requests of the controller for each claim. With {FLEET} nodes, one write of a claim is "
        f"{FLEET} events and {FLEET * size / events_of_claim / 1e6:.1f} MB from the API server before, and "
        f"{after.events / CLAIMS_OF_NODE * number / written:.2f} events and {after.size / CLAIMS_OF_NODE * number / written / 1000:.2f} kB now: "
        f"{FLEET * size / (after.size / CLAIMS_OF_NODE):,.0f} times less"
    )


async def _lists(client: ApiClient) -> int:
    found = await client.get(LISTS, {"labelSelector": "app.kubernetes.io/component=controller"})
    return sum(each["metadata"]["name"] != "waiting-claims" for each in found["items"])


async def _live(client: ApiClient, number: str, node: str) -> int:
    """Create, allocate, reserve, and prepare a claim; return the number of writes."""
    name = f"{number}-{node}"
    exactly = {"deviceClassName": "gpu.example.com"}
    spec = {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}
    await client.request("POST", OWN_CLAIMS, body={"metadata": {"name": name}, "spec": spec})
    device = {"driver": fleet.DRIVER, "pool": node, "device": f"gpu-{number}"}
    waits = {
        "bindingConditions": ["dra.accelerators/Prepared"],
        "bindingFailureConditions": ["dra.accelerators/Failed"],
    }
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    allocation = {
        "devices": {"results": [{"request": "gpu", **device, **waits}]},
        "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        "allocationTimestamp": "2026-01-01T00:00:00Z",
    }
    await _patch(client, name, {"metadata": {"finalizers": ["resource.kubernetes.io/delete-protection"]}})
    reserved = [{"resource": "pods", "name": name, "uid": name}]
    await _patch(client, name, {"status": {"allocation": allocation, "reservedFor": reserved}})
    conditions = [
        {
            "type": kind,
            "status": "True",
            "reason": "Prepared",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for kind in ("Ready", "dra.accelerators/Prepared")
    ]
    data = {"uuid": f"MIG-{name}", "parentUUID": f"GPU-{node}", "profile": "1g.10gb", "driverStore": "store"}
    await _patch(client, name, {"status": {"devices": [{**device, "conditions": conditions, "data": data}]}})
    found = await client.get(f"{OWN_CLAIMS}/{name}")
    assert claim_facts(found, [fleet.DRIVER]).pre_binding_node == node, "the API server keeps binding conditions"
    return 4


async def _die(client: ApiClient, number: str, node: str) -> int:
    """Release and delete a claim; return the number of writes."""
    name = f"{number}-{node}"
    await _patch(client, name, {"status": {"allocation": None, "reservedFor": None, "devices": None}})
    await _patch(client, name, {"metadata": {"finalizers": None}})
    await client.request("DELETE", f"{OWN_CLAIMS}/{name}", body={"kind": "DeleteOptions", "apiVersion": "v1"})
    return 3


async def _patch(client: ApiClient, name: str, patch: dict[str, Any]) -> None:
    path = f"{OWN_CLAIMS}/{name}" + ("/status" if "status" in patch else "")
    await client.request("PATCH", path, body=patch, content_type=MERGE)
