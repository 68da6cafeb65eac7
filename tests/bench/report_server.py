# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The unit tests' API server with a generated fleet, as a program: Nodes, slices with 208 devices per node, and
claims.

The pages of these lists are generated from text on request, so that the server needs little memory and processor time.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.bench import fleet

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "unit" / "dra_driver"))

from object_server import ObjectServer

CLAIMS_OF_NODE = 20


def texts_of_node() -> dict[str, list[str]]:
    """Return the objects of one node as JSON text, by resource, with ANY_NAME as the name of the node."""
    slices = json.loads(fleet.slices(partitioned=True))
    for number, body in enumerate(slices):
        name = f"{fleet.ANY_NAME}-{number}"
        body["metadata"] = {"name": name, "uid": name, "managedFields": [{"manager": "dra-accelerators-driver"}]}
    devices = [device["name"] for body in slices for device in body["spec"].get("devices", ())]
    return {
        "nodes": [json.dumps(fleet.node(fleet.ANY_NAME))],
        "resourceslices": [json.dumps(body) for body in slices],
        "resourceclaims": [json.dumps(claim(number, devices[number])) for number in range(CLAIMS_OF_NODE)],
    }


def claim(number: int, device: str) -> dict[str, Any]:
    """Return a claim of a pod, with one device of a node."""
    name = f"{fleet.ANY_NAME}-claim-{number}"
    field = {"key": "metadata.name", "operator": "In", "values": [fleet.ANY_NAME]}
    result = {"request": "gpu", "driver": fleet.DRIVER, "pool": fleet.ANY_NAME, "device": device}
    request = {"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
    return {
        "metadata": {"namespace": "team", "name": name, "uid": name, "creationTimestamp": "2026-11-24T08:00:00Z"},
        "spec": {"devices": {"requests": [request]}},
        "status": {
            "allocation": {
                "devices": {"results": [result]},
                "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
            },
            "reservedFor": [{"resource": "pods", "name": f"{name}-pod", "uid": f"{name}-pod"}],
        },
    }


class FleetServer(ObjectServer):
    """An API server with a number of generated nodes, which lets all users read the report."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._names = fleet.names(number)
        self._texts = texts_of_node()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        resource = request.path.rsplit("/", 1)[1]
        if request.method == "GET" and "limit" in request.query:
            return web.Response(body=self._page(request, resource), content_type="application/json")
        if request.method == "POST" and resource == "tokenreviews":
            spec = (await request.json())["spec"]
            status = {"authenticated": True, "audiences": spec["audiences"], "user": {"username": "reader"}}
            return web.json_response({"status": status}, status=201)
        if request.method == "POST" and resource == "subjectaccessreviews":
            return web.json_response({"status": {"allowed": True}}, status=201)
        return await super()._handle(request)

    def _page(self, request: web.Request, resource: str) -> bytes:
        texts = self._texts.get(resource, [])
        start, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        end = min(start + limit, len(texts) * len(self._names))
        items = [
            texts[number % len(texts)].replace(fleet.ANY_NAME, self._names[number // len(texts)])
            for number in range(start, end)
        ]
        metadata = {"resourceVersion": str(self.revision)}
        if end < len(texts) * len(self._names):
            metadata["continue"] = str(end)
        return f'{{"metadata":{json.dumps(metadata)},"items":[{",".join(items)}]}}'.encode()


async def main(folder: Path, number: int, secret: str) -> None:
    server = FleetServer(number)
    path, data = secret.split("=", 1)
    server.put(path, {"data": json.loads(data)})
    kubeconfig = await server.start(folder)
    print(kubeconfig, flush=True)
    try:
        await asyncio.Event().wait()
    finally:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
