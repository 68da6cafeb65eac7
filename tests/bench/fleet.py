# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A fleet as an API server stores it: Nodes as kubelets write them, and the ResourceSlices that the core builds for
eight H100 each.
"""

from __future__ import annotations

import asyncio
import datetime
import json
import sys
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from dra_driver.api.client import ApiClient, ApiError, ApiUnreachable
from dra_driver.core.dra.resource_slices import build_pool, plan_pool
from dra_driver.core.model import Partitioning
from dra_driver.core.vendors.nvidia import offers

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "core"))

import board_model

DRIVER = "gpu.nvidia.com"
NODES, SLICES = "/api/v1/nodes", "/apis/resource.k8s.io/v1/resourceslices"
GPUS = 8
#: One node in ten offers every partition of its GPUs. The others offer whole GPUs.
PARTITIONED_NODE_INTERVAL = 10
PARALLEL_REQUESTS = 8
#: Number of tries of a request, for a server under CPU load.
MAXIMUM_TRIES = 10
ANY_NAME = "any-name-of-a-node"
#: Number of images in a Node's status, and the maximum interval in which a kubelet writes it.
IMAGES, HEARTBEAT_SECONDS = 50, 300


def stamp() -> str:
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def node(name: str, *, ready: bool = True) -> dict[str, Any]:
    """Return a Node with its status."""
    words = {"MemoryPressure": "False", "DiskPressure": "False", "PIDPressure": "False", "Ready": str(ready)}
    times = {"lastHeartbeatTime": stamp(), "lastTransitionTime": stamp()}
    conditions = [
        {"type": kind, "status": status, "reason": "Kubelet", "message": "status of the kubelet", **times}
        for kind, status in words.items()
    ]
    images = [
        {"names": [f"registry.example.com/team/image-{number}@sha256:{number:064x}"], "sizeBytes": 10**9 + number}
        for number in range(IMAGES)
    ]
    labels = {"kubernetes.io/hostname": name, "dra.accelerators/release": "0.1.0-00000001"}
    status = {"conditions": conditions, "images": images, "capacity": {"cpu": "192", "memory": "2Ti", "pods": "110"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}


def slices(*, partitioned: bool) -> str:
    """Return the slices of one node as JSON text, with ANY_NAME as its name."""
    wanted = Partitioning(True, partitioned, partitioned)
    devices = [board_model.device("h100-80", index, partitioning=wanted) for index in range(GPUS)]
    pool = build_pool(
        driver=DRIVER,
        pool=ANY_NAME,
        node_name=ANY_NAME,
        offers=[offer for device in devices for offer in offers.offers(device, partitioned)],
        counter_sets=[offers.counter_set(device) for device in devices] if partitioned else [],
    )
    return json.dumps([write.body for write in plan_pool(pool, ()).writes])


async def await_all(calls: Iterable[Any]) -> None:
    """Await all coroutines, at most PARALLEL_REQUESTS at a time."""
    gate = asyncio.Semaphore(PARALLEL_REQUESTS)

    async def one(call: Any) -> None:
        async with gate:
            await call

    await asyncio.gather(*map(one, calls))


def names(number: int) -> list[str]:
    return [f"node-{position:05}" for position in range(number)]


async def request(client: ApiClient, method: str, path: str, **options: Any) -> dict[str, Any]:
    """Send a request and retry it without an answer. An object that an earlier try created or deleted is no error."""
    for last in range(1, MAXIMUM_TRIES + 1):
        try:
            return await client.request(method, path, **options)
        except ApiUnreachable:
            if last == MAXIMUM_TRIES:
                raise
        except ApiError as error:
            if last > 1 and (method, error.status) == ("POST", 409):
                return await client.get(f"{path}/{options['body']['metadata']['name']}")
            if last > 1 and (method, error.status) == ("DELETE", 404):
                return {}
            raise
    raise AssertionError("there is at least one try")


async def create_fleet(client: ApiClient, number: int) -> int:
    """Create the fleet and return its number of slices, which are written like the node driver's."""
    texts = {partitioned: slices(partitioned=partitioned) for partitioned in (False, True)}
    made = 0

    async def one(position: int, name: str) -> None:
        nonlocal made
        answer = await request(client, "POST", NODES, body=node(name))
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": answer["metadata"]["uid"], "controller": True}
        bodies = json.loads(texts[position % PARTITIONED_NODE_INTERVAL == 0].replace(ANY_NAME, name))
        for body in bodies:
            # A fixed name instead of generateName, so that a retry does not create a second object.
            body["metadata"] = {"name": f"{body['metadata']['generateName']}bench", "ownerReferences": [owner]}
            await request(client, "POST", SLICES, body=body)
        made += len(bodies)

    await await_all(one(position, name) for position, name in enumerate(names(number)))
    return made


async def write_status(client: ApiClient, name: str, *, ready: bool) -> None:
    """Write a Node's status, like its kubelet or the node controller."""
    body = {"status": {"conditions": node(name, ready=ready)["status"]["conditions"]}}
    kind = "application/strategic-merge-patch+json"
    await request(client, "PATCH", f"{NODES}/{name}/status", body=body, content_type=kind)


async def heartbeats(client: ApiClient, number: int) -> None:
    """Write the status of all Nodes like their kubelets, until cancelled."""
    async for name in _repeat(names(number)):
        await write_status(client, name, ready=True)
        await asyncio.sleep(HEARTBEAT_SECONDS / number)


async def _repeat(those: list[str]) -> AsyncIterator[str]:
    while True:
        for each in those:
            yield each
