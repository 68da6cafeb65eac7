# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the real scheduler on an API server without a kubelet: nodes are objects, and pods are bound but never run."""

from __future__ import annotations

import contextlib
import json
import ssl
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import urllib3
from world_cli.settings import gates_flag

from tests.bench.api_server import ApiServer

Json = dict[str, Any]
DRA = "/apis/resource.k8s.io/v1"
PATHS = {
    "Node": "/api/v1/nodes",
    "Pod": "/api/v1/namespaces/default/pods",
    "ResourceClaim": f"{DRA}/namespaces/default/resourceclaims",
    "ResourceSlice": f"{DRA}/resourceslices",
    "DeviceClass": f"{DRA}/deviceclasses",
    "DeviceTaintRule": f"{DRA}/devicetaintrules",
}
NOT_READY = {"key": "node.kubernetes.io/not-ready", "operator": "Exists"}


class Cluster(ApiServer):
    """An etcd, an API server, and a scheduler. ``create`` accepts objects like manifests, including allocations."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run all three until the context ends."""
        with super().running():
            self._http = urllib3.PoolManager(
                maxsize=16, cert_reqs=ssl.CERT_REQUIRED, ca_certs=str(self._folder / "certificates/apiserver.crt")
            )
            self.request("POST", "/api/v1/namespaces/default/serviceaccounts", {"metadata": {"name": "default"}})
            label = {"metadata": {"labels": {"resource.kubernetes.io/admin-access": "true"}}}
            self.request("PATCH", "/api/v1/namespaces/default", label, "application/merge-patch+json")
            yield

    def start_scheduler(self) -> None:
        """Start the scheduler, which sees all existing objects at once."""
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": {"kubeconfig": str(self.kubeconfig), "qps": 1000, "burst": 2000},
            "leaderElection": {"leaderElect": False},
            "podInitialBackoffSeconds": 30,
            "podMaxBackoffSeconds": 60,
        }
        path = self._folder / "scheduler.json"
        path.write_text(json.dumps(configuration))
        gates, release = gates_flag(dict(self._served.gates)), self._served.release
        self._run("kube-scheduler", f"--config={path}", "--secure-port=0", *gates, release=release)

    def request(self, method: str, path: str, body: Json | None = None, kind: str = "application/json") -> Json:
        """Send one request; a rejection raises AssertionError."""
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": kind}
        answer = self._http.request(
            method, f"{self.url}{path}", body=None if body is None else json.dumps(body), headers=headers, timeout=60
        )
        assert answer.status < 300, f"{method} {path}: {answer.data.decode()}"
        found: Json = json.loads(answer.data)
        return found

    def create(self, objects: Iterable[Json]) -> None:
        """Create objects in the order of their kinds in PATHS, with pods last, so that the scheduler sees complete
        inputs.
        """
        order = [kind for kind in PATHS if kind != "Pod"] + ["Pod"]
        kinds: dict[str, list[Json]] = {kind: [] for kind in order}
        for each in objects:
            kinds[each["kind"]].append(each)
        with ThreadPoolExecutor(8) as threads:
            for kind in order:
                list(threads.map(self._create, kinds[kind]))

    def pods(self, seconds: float = 300) -> dict[str, Json]:
        """Return all pods by name as soon as the scheduler has decided on each, or its claims are allocated."""
        deadline = time.monotonic() + seconds
        while True:
            pods = {one["metadata"]["name"]: one for one in self.request("GET", PATHS["Pod"])["items"]}
            allocated = {
                one["metadata"]["name"]
                for one in self.request("GET", PATHS["ResourceClaim"])["items"]
                if (one.get("status") or {}).get("allocation")
            }
            waiting = [name for name, pod in pods.items() if not _decided(pod, allocated)]
            if not waiting:
                return pods
            assert time.monotonic() < deadline, f"the scheduler has said nothing of {waiting[:5]} ({len(waiting)})"
            time.sleep(0.5)

    def until(self, lacking: Callable[[], list[str]], seconds: float = 300) -> None:
        """Wait until the list of missing parts is empty."""
        deadline = time.monotonic() + seconds
        while still := lacking():
            assert time.monotonic() < deadline, f"still lacking after {seconds:g} seconds: {still[:5]} ({len(still)})"
            time.sleep(0.5)

    def claims(self) -> dict[str, Json]:
        """Return all claims by name."""
        return {one["metadata"]["name"]: one for one in self.request("GET", PATHS["ResourceClaim"])["items"]}

    @contextlib.contextmanager
    def with_objects(self, objects: Iterable[Json]) -> Iterator[None]:
        """Create objects until the context ends. Existing objects of the same name are changed and restored."""
        wanted, before = list(objects), []
        for each in wanted:
            there = [
                one
                for one in self.request("GET", _path(each))["items"]
                if one["metadata"]["name"] == each["metadata"]["name"]
            ]
            before += [{**one, "kind": each["kind"]} for one in there]
        names = [(one["kind"], one["metadata"]["name"]) for one in before]
        self._delete(before)
        self.create(wanted)
        yield
        self._delete(wanted)
        self.create({**each, "metadata": {"name": each["metadata"]["name"]}} for each in before)
        assert len(names) == len(set(names))

    def _delete(self, objects: Iterable[Json]) -> None:
        # Pods first: if the cause of their wait (such as a taint) is deleted earlier, their claims are allocated
        # before the deletion.
        for each in sorted(objects, key=lambda one: one["kind"] != "Pod"):
            path = f"{_path(each)}/{each['metadata']['name']}"
            if each["kind"] == "ResourceClaim":
                # No other component removes the scheduler's finalizer from an allocated claim here.
                self.request("PATCH", path, {"metadata": {"finalizers": None}}, "application/merge-patch+json")
            self.request("DELETE", path, {"gracePeriodSeconds": 0})

    def _create(self, each: Json) -> None:
        path = _path(each)
        made = self.request("POST", path, {key: value for key, value in each.items() if key != "status"})
        name = made["metadata"]["name"]
        if each["kind"] == "Node":
            # The API server taints Nodes that never were ready.
            self.request("PATCH", f"{path}/{name}", {"spec": {"taints": None}}, "application/merge-patch+json")
        if each.get("status"):
            self.request(
                "PUT",
                f"{path}/{name}/status",
                {**made, "status": each["status"]}
                if each["kind"] != "Node"
                else {**self.request("GET", f"{path}/{name}"), "status": each["status"]},
            )


def _path(each: Json) -> str:
    return PATHS[each["kind"]].replace("/default/", f"/{each['metadata'].get('namespace') or 'default'}/")


def _decided(pod: Json, allocated: set[str]) -> bool:
    if pod["spec"].get("nodeName") or condition(pod):
        return True
    claims = [one.get("resourceClaimName") for one in pod["spec"].get("resourceClaims") or ()]
    return bool(claims) and all(name in allocated for name in claims)


def condition(pod: Json) -> Json:
    """Return the scheduler's condition of an unbound pod; empty if there is no condition."""
    for each in (pod.get("status") or {}).get("conditions") or ():
        if each["type"] == "PodScheduled" and each["status"] == "False":
            found: Json = each
            return found
    return {}
