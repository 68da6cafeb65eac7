# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A small API server over HTTP for objects of any kind: pages, watches, merge patches, and preconditions."""

from __future__ import annotations

import asyncio
import copy
import json
import re
from pathlib import Path
from typing import Any

from aiohttp import web
from api_model import kubeconfig

from tests.unit.undecodable import dumps

Json = dict[str, Any]

RESOURCES: dict[str, Json] = {
    "/apis": {"kind": "APIGroupList", "groups": [{"name": "apps"}, {"name": "resource.k8s.io"}]},
    "/apis/resource.k8s.io": {"versions": [{"version": "v1"}, {"version": "v1beta2"}, {"version": "v1beta1"}]},
    "/apis/resource.k8s.io/v1": {"resources": [{"name": "resourceclaims"}, {"name": "devicetaintrules"}]},
}


class ObjectServer:
    """An API server. ``objects`` are by path. ``log`` has method and path of each request, ``refusals`` has answers for the next ones.

    A GET of a path that contains one of ``unserved`` gets 404 without a reason, as from a load balancer without a
    server for it.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Json] = {}
        self.log: list[tuple[str, str]] = []
        self.refusals: list[tuple[str, str, int]] = []
        self.unserved: tuple[str, ...] = ()
        #: Writes of paths that contain one of these are not answered.
        self.hanging: tuple[str, ...] = ()
        self.retry_after = ""
        #: The number of later pages of lists that get 410: the snapshot of the list has expired.
        self.expired_pages = 0
        self.revision = 100
        self.url = ""
        self._watchers: list[tuple[str, asyncio.Queue[Json | None]]] = []
        self._runner: web.AppRunner | None = None

    async def start(self, directory: Path) -> str:
        """Start the server and return the path of a kubeconfig."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        file = directory / "kubeconfig"
        file.write_text(json.dumps(kubeconfig(self.url)))
        return str(file)

    async def stop(self) -> None:
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    def put(self, path: str, body: Json) -> Json:
        """Write an object as another client does."""
        self.revision += 1
        kind = "MODIFIED" if path in self.objects else "ADDED"
        metadata = {"name": path.rsplit("/", 1)[1], "uid": f"uid-{self.revision}", **body.get("metadata", {})}
        self.objects[path] = {**body, "metadata": {**metadata, "resourceVersion": str(self.revision)}}
        self._send_event(kind, path)
        # The list of all namespaces also contains the object if the test has added it there.
        everywhere = re.sub(r"/namespaces/[^/]+/", "/", path)
        if everywhere != path and everywhere in self.objects:
            self.objects[everywhere] = self.objects[path]
            self._send_event("MODIFIED", everywhere)
        return self.objects[path]

    def remove(self, path: str) -> None:
        self._send_event("DELETED", path)
        del self.objects[path]

    def end_watches(self, error: int = 0) -> None:
        for _collection, queue in self._watchers:
            if error:
                queue.put_nowait({"type": "ERROR", "object": {"code": error, "message": "too old"}})
            queue.put_nowait(None)

    def count(self, method: str, part: str) -> int:
        return sum(one == method and part in path for one, path in self.log)

    def _send_event(self, kind: str, path: str) -> None:
        for collection, queue in self._watchers:
            if path.rsplit("/", 1)[0] == collection:
                queue.put_nowait({"type": kind, "object": copy.deepcopy(self.objects[path])})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        method = "WATCH" if request.query.get("watch") else request.method
        self.log.append((method, path))
        for refusal in self.refusals:
            if refusal[0] == method and refusal[1] in path:
                self.refusals.remove(refusal)
                return self._error(refusal[2], path)
        if method not in ("GET", "WATCH") and any(part in path for part in self.hanging):
            await asyncio.sleep(3600)
        if method == "GET" and any(part in path for part in self.unserved):
            return web.Response(status=404, text="404 page not found\n")
        if path in RESOURCES:
            return web.json_response(RESOURCES[path])
        if method == "WATCH":
            return await self._watch(request, path)
        present = self.objects.get(path.removesuffix("/status"))
        if method == "GET":
            if present is not None:
                return _answer(present)
            if path.rsplit("/", 1)[1] in LISTED:
                return self._list(request, path)
            return self._error(404, path)
        body = await request.json()
        if method == "POST":
            name = body["metadata"].get("name") or f"{body['metadata']['generateName']}{self.revision}"
            if f"{path}/{name}" in self.objects:
                return self._error(409)
            return web.json_response(self.put(f"{path}/{name}", body), status=201)
        if request.content_type == "application/apply-patch+yaml":
            return self._apply(path, present, body)
        if present is None:
            return self._error(404, path)
        if isinstance(body, list):
            return self._json_patch(path, present, body)
        bound = body.get("preconditions") or body.get("metadata") or {}
        known = present["metadata"]
        if any(bound.get(key) not in (None, known.get(key)) for key in ("uid", "resourceVersion")):
            return self._error(409)
        path = path.removesuffix("/status")
        if method == "DELETE":
            self.remove(path)
            return web.json_response({"kind": "Status", "status": "Success"})
        merged = body if method == "PUT" else merge(present, body)
        merged["metadata"] = {**known, **merged.get("metadata", {})}
        return _answer(self.put(path, merged))

    def _apply(self, path: str, present: Json | None, body: Json) -> web.Response:
        """Apply an object (server-side apply). The object has one manager, so the values replace labels, owners, and data."""
        if present is None:
            return web.json_response(self.put(path, body), status=201)
        applied = {**present, **body, "metadata": {**present["metadata"], **body["metadata"]}}
        return _answer(present if applied == present else self.put(path, applied))

    def _json_patch(self, path: str, present: Json, operations: list[Json]) -> web.Response:
        """Apply a JSON patch (RFC 6902), limited to the used operations."""
        changed = copy.deepcopy(present)
        for operation in operations:
            *parents, last = operation["path"].strip("/").split("/")
            holder: Any = changed
            for part in parents:
                holder = holder[int(part)] if isinstance(holder, list) else holder.setdefault(part, {})
            if operation["op"] == "test" and holder.get(last) != operation["value"]:
                return self._error(422)
            if operation["op"] == "add":
                holder[last] = operation["value"]
        return web.json_response(self.put(path, changed))

    def _error(self, status: int, path: str = "") -> web.Response:
        name = path.removesuffix("/status").rpartition("/")[2]
        reason = {"reason": "NotFound", "details": {"name": name}} if status == 404 else {}
        return web.json_response(
            {"kind": "Status", "message": "an error of the test", "code": status, **reason},
            status=status,
            headers={"Retry-After": self.retry_after} if self.retry_after else {},
        )

    def _list(self, request: web.Request, path: str) -> web.Response:
        wanted = [each.split("=") for each in request.query.get("labelSelector", "").split(",") if each]
        named = sorted(
            name
            for name, item in self.objects.items()
            if name.rsplit("/", 1)[0] == path
            and all((item["metadata"].get("labels") or {}).get(key) == value for key, value in wanted)
        )
        start, limit = int(request.query.get("continue", "0")), int(request.query["limit"])
        metadata = {"resourceVersion": str(self.revision)}
        if start and self.expired_pages:
            self.expired_pages -= 1
            return self._error(410)
        if start + limit < len(named):
            metadata["continue"] = str(start + limit)
        items = [self.objects[name] for name in named[start : start + limit]]
        return _answer({"items": items, "metadata": metadata})

    async def _watch(self, request: web.Request, path: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        self._watchers.append((path, queue))
        try:
            while (event := await queue.get()) is not None:
                await response.write(dumps(event) + b"\n")
        finally:
            self._watchers.remove((path, queue))
        return response


LISTED = ("configmaps", "nodes", "deviceclasses", "resourceslices", "resourceclaims", "devicetaintrules")


def _answer(value: Json) -> web.Response:
    return web.Response(body=dumps(value), content_type="application/json")


def merge(present: Json, patch: Json) -> Json:
    """Apply a merge patch (RFC 7396)."""
    result = copy.deepcopy(present)
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            result[key] = merge(result.get(key) or {}, value)
        else:
            result[key] = value
    return result
