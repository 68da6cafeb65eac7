# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A small API server over HTTP: resource slices and claims with watches, the status of claims, nodes, and Events."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from dra_driver.controller.claim_lists import list_text
from dra_driver.controller.facts import ClaimIndex, claim_facts
from dra_driver.core.api_connection import INSECURE_EXTENSION

from tests.unit.undecodable import dumps

Json = dict[str, Any]


class ApiModel:
    """An API server with the resources that the driver's client uses.

    ``log`` has method and path of each request, ``moments`` their times, ``connections`` method and client address.
    """

    def __init__(
        self,
        driver: str = "gpu.nvidia.com",
        *,
        minor: str = "37",
        versions: tuple[str, ...] = ("v1", "v1beta2", "v1beta1"),
    ) -> None:
        self.driver = driver
        self.minor = minor
        self.versions = versions
        self.slices: dict[str, Json] = {}
        self.nodes: dict[str, Json] = {"node-1": {"metadata": {"name": "node-1", "uid": "node-uid-1"}}}
        self.claims: dict[str, Json] = {}
        self.pods: dict[str, Json] = {}
        self.pods_forbidden = False
        #: The delay of the answer about a pod, in seconds.
        self.pod_seconds = 0.0
        self.events: list[Json] = []
        self.log: list[tuple[str, str]] = []
        self.moments: list[float] = []
        self.connections: set[tuple[str, Any]] = set()
        self.headers: list[dict[str, str]] = []
        self.revision = 100
        #: Method, status, and message of answers to the next requests. A status 404 without a message is not from an
        #: API server.
        self.failures: list[tuple[str, int, str]] = []
        self.failure_seconds = 0.0
        self.retry_after = ""
        #: Status of the answer to writes of a claim's status, by the name of the claim. 0: no answer.
        self.refused_claims: dict[str, int] = {}
        self.watch_ends_at_once = False
        #: While it is set no request is answered, and connections up to its end stay silent forever.
        self.is_silent = False
        self._silent: set[Any] = set()
        self._transports: set[Any] = set()
        # Names of slices that cannot be deleted, and the bodies of dry runs.
        self.kept: set[str] = set()
        self.dry_runs: list[Json] = []
        self.drop_fields: tuple[str, ...] = ()
        self._watchers: list[asyncio.Queue[Json | None]] = []
        # Each change of a slice, for watches that resume from an earlier version.
        self._slice_events: list[Json] = []
        self._claim_watchers: list[asyncio.Queue[Json | None]] = []
        #: Whether a controller lists the waiting claims of node-1, and the ConfigMaps that it writes.
        self.has_controller = False
        #: Whether each read of the controller's heartbeat finds it renewed.
        self.renews_sign = False
        self.lists: dict[str, Json] = {}
        self._list_watchers: list[asyncio.Queue[Json | None]] = []
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{port}"

    async def stop(self) -> None:
        self.end_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    def writes(self) -> list[tuple[str, str]]:
        """Return method and path of each request that writes, including failed ones."""
        return [entry for entry in self.log if entry[0] not in ("GET", "WATCH", "DRYRUN")]

    def slice_writes(self) -> list[tuple[str, str]]:
        """Return the writes of slices. A claim's status is written 1 s after its preparation, and after each start."""
        return [entry for entry in self.writes() if "/resourceslices" in entry[1]]

    def end_watches(self) -> None:
        for queue in (*self._watchers, *self._claim_watchers, *self._list_watchers):
            queue.put_nowait(None)

    def abort_connections(self) -> None:
        """Close all open connections without completing their answers, as a killed server does."""
        for transport in self._transports:
            transport.abort()

    def put_claim(self, claim: Json) -> None:
        """Store a new or changed claim, and notify the watches."""
        self.revision += 1
        name = claim["metadata"]["name"]
        claim["metadata"]["resourceVersion"] = str(self.revision)
        kind = "MODIFIED" if name in self.claims else "ADDED"
        self.claims[name] = claim
        for queue in self._claim_watchers:
            queue.put_nowait({"type": kind, "object": copy.deepcopy(claim)})
        if self.has_controller:
            self.act_as_controller()

    def act_as_controller(self) -> None:
        """Renew the heartbeat, and list the waiting claims of node-1, as the active controller does."""
        self.has_controller = True
        self.put_list("waiting-claims", {"renewed": "now"})
        index = ClaimIndex()
        for name, claim in self.claims.items():
            index[name] = claim_facts(claim, [self.driver])
        text = list_text(index.awaited.get("node-1", {}).values())
        self.put_list("waiting-claims-node-1", {"claims": text} if text else None)

    def put_list(self, name: str, data: Json | None) -> None:
        """Write one of the controller's ConfigMaps, or delete it (None), and send the event to the watches."""
        previous = self.lists.get(name)
        if (previous or {}).get("data") == data and name != "waiting-claims":
            return
        self.revision += 1
        kind = "DELETED" if data is None else "MODIFIED" if previous else "ADDED"
        metadata = {"name": name, "namespace": "dra-accelerators", "resourceVersion": str(self.revision)}
        self.lists[name] = {"metadata": metadata, "data": data}
        for queue in self._list_watchers if name != "waiting-claims" else ():
            queue.put_nowait({"type": kind, "object": copy.deepcopy(self.lists[name])})
        if data is None:
            del self.lists[name]

    def delete_slice(self, name: str) -> None:
        item = self.slices.pop(name)
        self.revision += 1
        item["metadata"]["resourceVersion"] = str(self.revision)
        self._tell("DELETED", item)

    def change_slice(self, name: str, spec: Json) -> None:
        self.revision += 1
        self.slices[name]["spec"] = spec
        self.slices[name]["metadata"]["resourceVersion"] = str(self.revision)
        self._tell("MODIFIED", self.slices[name])

    def _tell(self, kind: str, item: Json) -> None:
        event = {"type": kind, "object": copy.deepcopy(item)}
        self._slice_events.append(event)
        for queue in self._watchers:
            queue.put_nowait(copy.deepcopy(event))

    def _error(self, status: int, message: str, path: str = "") -> web.Response:
        reason = (
            {"reason": "NotFound", "details": {"name": path.rpartition("/")[2]}}
            if status == 404
            else {"reason": "Test"}
        )
        return web.json_response(
            {"kind": "Status", "message": message, "code": status, **reason},
            status=status,
            headers={"Retry-After": self.retry_after} if self.retry_after and status in (429, 503) else {},
        )

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if await self._stays_silent(request):
            return web.Response(status=503)
        path = request.path
        method = "WATCH" if request.query.get("watch") else request.method
        method = "DRYRUN" if request.query.get("dryRun") == "All" else method
        self.log.append((method, path))
        self._transports.add(request.transport)
        self.moments.append(asyncio.get_running_loop().time())
        self.connections.add((method, (request.transport and request.transport.get_extra_info("peername"))))
        self.headers.append(dict(request.headers))
        for entry in self.failures:
            if entry[0] == method:
                self.failures.remove(entry)
                await asyncio.sleep(self.failure_seconds)
                if entry[1:] == (404, ""):
                    return web.Response(status=404, text="404 page not found\n")
                return self._error(entry[1], entry[2], path)
        if path == "/version":
            return web.json_response({"major": "1", "minor": self.minor})
        if path == "/apis":
            groups = [{"name": "resource.k8s.io"}] if self.versions else []
            return web.json_response({"kind": "APIGroupList", "groups": groups})
        if path == "/apis/resource.k8s.io":
            if not self.versions:
                return self._error(404, "not found")
            return web.json_response({"versions": [{"version": version} for version in self.versions]})
        if path.startswith("/apis/resource.k8s.io/") and path.split("/")[3] not in self.versions:
            return web.Response(status=404, text="404 page not found\n")
        if path.startswith("/api/v1/nodes/"):
            node = self.nodes.get(path.rsplit("/", 1)[1])
            return web.json_response(node) if node else self._error(404, "node not found", path)
        if path.endswith("/resourceclaims"):
            if method == "WATCH":
                since = int(request.query.get("resourceVersion") or self.revision)
                changed = [each for each in self.claims.values() if _revision(each) > since]
                missed = [{"type": "MODIFIED", "object": each} for each in changed]
                return await self._watch(request, self._claim_watchers, missed)
            items = list(self.claims.values())
            answer = {"items": items, "metadata": {"resourceVersion": str(self.revision)}}
            return web.Response(body=dumps(answer), content_type="application/json")
        if "/configmaps" in path:
            return await self._configmaps(request, method, path)
        if "/pods/" in path:
            await asyncio.sleep(self.pod_seconds)
            pod = self.pods.get(path.rsplit("/", 1)[1])
            if pod is None:
                return self._error(
                    *((403, "pods is forbidden") if self.pods_forbidden else (404, "pod not found")), path
                )
            return web.Response(body=dumps(pod), content_type="application/json")
        if "/resourceclaims/" in path and path.endswith("/status"):
            return await self._apply_claim_status(request, path.split("/")[-2])
        if "/resourceclaims/" in path:
            claim = self.claims.get(path.rsplit("/", 1)[1])
            if claim is None:
                return self._error(404, "claim not found", path)
            return web.Response(body=dumps(claim), content_type="application/json")
        if path.endswith("/events"):
            body = await request.json()
            name = body["metadata"].setdefault("name", f"event-{len(self.events)}")
            if any(each["metadata"]["name"] == name for each in self.events):
                return self._error(409, f"events {name} already exists")
            self.events.append(body)
            return web.json_response(body, status=201)
        if "/events/" in path:
            number = int(path.rsplit("-", 1)[1])
            self.events[number].update(await request.json())
            return web.json_response(self.events[number])
        if "/resourceslices" in path:
            return await self._slices(request, method, path)
        return self._error(404, f"no {path}")

    async def _configmaps(self, request: web.Request, method: str, path: str) -> web.StreamResponse:
        """Answer a read of the controller's heartbeat, or a list or watch of the waiting claims of one node."""
        assert path.startswith("/api/v1/namespaces/dra-accelerators/configmaps")
        name = path.partition("/configmaps/")[2]
        if name:
            if self.renews_sign:
                self.put_list("waiting-claims", {"renewed": "now"})
            found = self.lists.get(name) if name == "waiting-claims" else None
            return web.json_response(found) if found else self._error(404, "no such ConfigMap", name)
        if request.query.get("fieldSelector") != "metadata.name=waiting-claims-node-1":
            return self._error(403, "configmaps is forbidden")
        present = [each for key, each in self.lists.items() if key == "waiting-claims-node-1"]
        if method == "WATCH":
            since = int(request.query.get("resourceVersion") or self.revision)
            missed = [{"type": "MODIFIED", "object": each} for each in present if _revision(each) > since]
            return await self._watch(request, self._list_watchers, missed)
        return web.json_response({"items": present, "metadata": {"resourceVersion": str(self.revision)}})

    async def _apply_claim_status(self, request: web.Request, name: str) -> web.Response:
        assert request.headers["Content-Type"] == "application/apply-patch+yaml" and request.query["force"] == "true"
        body = await request.json()
        claim = copy.deepcopy(self.claims.get(name))
        if self.refused_claims.get(name) == 0:
            await asyncio.sleep(3600)
        if name in self.refused_claims:
            return self._error(self.refused_claims[name], "refused")
        if claim is None:
            return self._error(404, "claim not found", name)
        if body["metadata"]["uid"] != claim["metadata"]["uid"]:
            return self._error(409, "another claim of that name")
        driver, status = request.query["fieldManager"], claim.setdefault("status", {})
        allocated = {
            (each["driver"], each["pool"], each["device"])
            for each in ((status.get("allocation") or {}).get("devices") or {}).get("results", ())
        }
        entries = body["status"]["devices"]
        if not {(each["driver"], each["pool"], each["device"]) for each in entries} <= allocated:
            return self._error(422, "must be an allocated device in the claim")
        others = [each for each in status.get("devices", ()) if each["driver"] != driver]
        if others + entries != status.get("devices"):
            status["devices"] = others + entries
            self.put_claim(claim)
        return web.json_response(claim)

    async def _slices(self, request: web.Request, method: str, path: str) -> web.StreamResponse:
        assert path.split("/")[3] in self.versions
        name = path.partition("/resourceslices/")[2]
        if method in ("GET", "WATCH"):
            assert request.query["fieldSelector"] == f"spec.driver={self.driver},spec.nodeName=node-1"
        if method == "WATCH":
            since = int(request.query.get("resourceVersion") or self.revision)
            missed = [each for each in self._slice_events if _revision(each["object"]) > since]
            return await self._watch(request, self._watchers, missed)
        if method == "GET":
            return web.json_response(
                {"items": list(self.slices.values()), "metadata": {"resourceVersion": str(self.revision)}}
            )
        if method in ("POST", "PUT", "DRYRUN"):
            spec = (await request.json())["spec"]
            if int(self.minor.rstrip("+")) >= 35 and spec.get("sharedCounters") and spec.get("devices"):
                return self._error(422, "spec: exactly one of `devices`, `sharedCounters` is required")
        if method == "DRYRUN":
            self.dry_runs.append(await request.json())
            return web.json_response(
                self._curtailed({**self.dry_runs[-1], "metadata": {"name": "dry-run"}}), status=201
            )
        self.revision += 1
        if method == "DELETE":
            if name not in self.slices:
                return self._error(404, "slice not found", name)
            if name in self.kept:
                return self._error(403, "denied by a policy")
            wanted = (await request.json()).get("preconditions", {})
            have = self.slices[name]["metadata"]
            if any(have.get(key) != value for key, value in wanted.items()):
                return self._error(409, "precondition")
            item = self.slices.pop(name)
            item["metadata"]["resourceVersion"] = str(self.revision)
            self._tell("DELETED", item)
            return web.json_response(item)
        body = self._curtailed(await request.json())
        if method == "POST":
            name = f"{body['metadata']['generateName']}{self.revision}"
            body["metadata"].update({"name": name, "uid": f"uid-{self.revision}"})
        elif name not in self.slices:
            return self._error(404, "slice not found", name)
        elif body["metadata"].get("resourceVersion") != self.slices[name]["metadata"]["resourceVersion"]:
            return self._error(409, "conflict")
        else:
            body["metadata"]["uid"] = self.slices[name]["metadata"]["uid"]
        body["metadata"]["resourceVersion"] = str(self.revision)
        self._tell("ADDED" if method == "POST" else "MODIFIED", body)
        self.slices[name] = body
        return web.json_response(body, status=201 if method == "POST" else 200)

    def _curtailed(self, body: Json) -> Json:
        body = copy.deepcopy(body)
        for device in body["spec"].get("devices") or ():
            for field in self.drop_fields:
                device.pop(field, None)
        for field in self.drop_fields:
            body["spec"].pop(field, None)
        return body

    async def _stays_silent(self, request: web.Request) -> bool:
        """Return whether a connection is silent. In that case wait until the client has closed it."""
        transport = request.transport
        if self.is_silent:
            self._silent.add(transport)
        if transport not in self._silent:
            return False
        while transport is not None and not transport.is_closing():
            await asyncio.sleep(0.05)
        self._silent.discard(transport)
        return True

    async def _watch(
        self, request: web.Request, watchers: list[asyncio.Queue[Json | None]], missed: Sequence[Json] = ()
    ) -> web.StreamResponse:
        """Send the events since the version that the watch starts from, which are ``missed``, and those of later changes."""
        response = web.StreamResponse()
        queue: asyncio.Queue[Json | None] = asyncio.Queue()
        for event in missed:
            queue.put_nowait(copy.deepcopy(event))
        watchers.append(queue)
        if self.watch_ends_at_once:
            queue.put_nowait(None)
        try:
            await response.prepare(request)
            while (sent := await queue.get()) is not None:
                if await self._stays_silent(request):
                    break
                data = dumps(sent) + b"\n"
                for start in range(0, len(data), 1000):  # lines arrive in pieces
                    await response.write(data[start : start + 1000])
        except ConnectionError:
            pass
        finally:
            watchers.remove(queue)
        return response


def _revision(item: Json) -> int:
    return int(item["metadata"].get("resourceVersion") or 0)


def kubeconfig(url: str, **user: str) -> Json:
    """Return a kubeconfig for the server, as data. YAML parsers read JSON."""
    return {
        "current-context": "c",
        "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
        "clusters": [{"name": "k", "cluster": {"server": url, "extensions": [INSECURE_EXTENSION]}}],
        "users": [{"name": "u", "user": user or {"token": "secret"}}],
    }
