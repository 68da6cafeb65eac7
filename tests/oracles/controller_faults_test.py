# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Inject each fault once into each API request of the controller's process, between the process and a real API server.

The scenario runs without a fault first, to record the requests and the end state. Then it runs for each request and
each fault. The controller must reach the same end state with a bounded number of requests, and must not exit.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_modules_test import DRA, Server
from dra_driver.core import certificates
from dra_driver.core.api_connection import INSECURE_EXTENSION

from tests.bench.api_server import free_port
from tests.fleets import DRIVER
from tests.oracles.controller_process import Acting, NoNodes
from tests.oracles.controller_rights import ACCOUNT, DRIVER_NAMESPACE, NAMESPACE, SECRET, objects
from tests.oracles.fault_cases import FaultRuns, Request, every, rotated
from tests.oracles.fault_proxy import SIGN, FaultProxy

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]
ALIVE, GONE, LATE = "fault-alive", "fault-gone", "fault-late"
SPACE = "controller-faults"
CLAIMS, PODS = f"{DRA}/namespaces/{SPACE}/resourceclaims", f"/api/v1/namespaces/{SPACE}/pods"
SLICES, RULES = f"{DRA}/resourceslices", f"{DRA}/devicetaintrules"
LEASE = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
LEASE_NAME = "dra-accelerators-controller"
LISTS, LIST = f"/api/v1/namespaces/{DRIVER_NAMESPACE}/configmaps", f"{SIGN}-{ALIVE}"
CLASSES, CLASS = f"{DRA}/deviceclasses", "fault-partitions"
#: The slice of an incomplete pool, and the Event about it.
INCOMPLETE, DRIFT = "fault-alive-incomplete", "PoolIncomplete"
EVENTS = (f"/api/v1/namespaces/{SPACE}/events", "/api/v1/namespaces/default/events")
DRAINED = f"drained-{ALIVE}"
OWN, KEPT, OTHER = "dra.accelerators/own", "example.com/kept", "other.example.com"
#: Prefixes of the names of slices, rules, and lists.
OBJECTS = (ALIVE, GONE, LATE, "worn-fault-", "drained-fault-", SIGN)
#: The reader of the report.
READER = "reader"
SECONDS = 90.0


def items(server: Server, path: str) -> list[Json]:
    """Return the objects of a list, without slices, rules, and ConfigMaps of other tests."""
    found: list[Json] = server.request("GET", path)["items"]
    return [
        each for each in found if path not in (SLICES, RULES, LISTS) or each["metadata"]["name"].startswith(OBJECTS)
    ]


def wait(what: str, condition: Callable[[], Any], explain: Callable[[], str] = str) -> None:
    """Wait until a condition is true. Raises AssertionError."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"waited {SECONDS:g} s for: {what}\n{explain()}"
        time.sleep(0.05)


def part_of(request: Request) -> str:
    """Return the part of the controller that sends a request: a watch, the cleanup of objects of a kind, or another
    task.
    """
    phase, kind = request
    verb, _space, target = kind.partition(" ")
    if phase == "report" and (verb == "list" or target.startswith("/apis")):
        return "report"
    for word in ("leases", "reviews"):
        if word in target:
            return word
    resource = target.partition("/*")[0]
    return f"watch {resource}" if verb in ("list", "watch") else resource


class Scene:
    """The objects at the API server, and the controller's process. ``play`` runs the scenario."""

    def __init__(self, server: Server, proxy: FaultProxy, folder: Path) -> None:
        self._server, self._proxy, self._folder = server, proxy, folder
        self._status, self._webhook = (f"127.0.0.1:{free_port()}" for _each in range(2))
        self.log = folder / "log"
        now = datetime.datetime.now(datetime.timezone.utc)
        authorities = certificates.Authorities(certificates.create_ca(now, 86400.0))
        self._authority = authorities.bundle.decode()
        ready = {"conditions": [{"type": "Ready", "status": "True"}]}
        node = server.request("POST", "/api/v1/nodes", {"metadata": {"name": ALIVE}, "status": ready})
        server.request("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
        for name in ("default", READER):
            server.request("POST", f"/api/v1/namespaces/{SPACE}/serviceaccounts", {"metadata": {"name": name}})
        secret = {"metadata": {"name": SECRET, "namespace": NAMESPACE}, "data": authorities.to_data()}
        server.request("POST", f"/api/v1/namespaces/{NAMESPACE}/secrets", secret)
        bound = {"apiVersion": "v1", "kind": "Node", "name": ALIVE, "uid": node["metadata"]["uid"]}
        self._token = self._request_token(NAMESPACE, ACCOUNT, {"boundObjectRef": bound})
        self._reader = self._request_token(SPACE, READER, {"audiences": ["dra-accelerators-report"]})
        self._untouched: dict[str, str] = {}
        is_partition = f"device.attributes['{DRIVER}'].type == 'mig'"
        spec = {"selectors": [{"cel": {"expression": is_partition}}]}
        server.request("POST", CLASSES, {"metadata": {"name": CLASS}, "spec": spec})

    def _request_token(self, namespace: str, account: str, spec: Json) -> str:
        body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
        return str(self._server.request("POST", path, body)["status"]["token"])

    # ------------------------------------------------------------------ the initial objects

    def _lay(self, *, has_lease: bool) -> None:
        """Create the objects of a deleted node and of an existing node, and delete all others."""
        server = self._server
        self._remove_all()
        if has_lease:
            spec = {"holderIdentity": "", "acquireTime": "2026-01-01T00:00:00.000000Z", "leaseTransitions": 1}
            server.request("POST", LEASE, {"metadata": {"name": LEASE_NAME}, "spec": spec})
        for node in (ALIVE, GONE):
            self._slice(node, DRIVER, "dra-accelerators-driver")
            self._rule(f"worn-{node}", node)
        self._slice(GONE, OTHER, "someone")
        self._slice(ALIVE, DRIVER, "dra-accelerators-driver", name=INCOMPLETE, slices=2)
        self._rule(DRAINED, ALIVE, operation="faults")
        self._claim("gone", GONE)
        self._claim("gone-pod", GONE, pod="deleted-uid")
        uid = server.request("POST", PODS, pod("alive"))["metadata"]["uid"]
        self._claim("gone-pod-alive", GONE, name_of_pod="alive", pod=uid)
        self._claim("alive", ALIVE, pod="deleted-uid")
        self._claim("other", GONE, driver=OTHER)
        self._claim("waiting")
        self._untouched = self._versions()

    def _versions(self) -> dict[str, str]:
        """Return the versions of the objects that the controller must not change."""
        kept = {"gone-pod-alive", "alive", "other", f"{ALIVE}-{DRIVER}", f"{GONE}-{OTHER}", f"worn-{ALIVE}", INCOMPLETE}
        found = [*items(self._server, CLAIMS), *items(self._server, SLICES), *items(self._server, RULES)]
        return {
            each["metadata"]["name"]: each["metadata"]["resourceVersion"]
            for each in found
            if each["metadata"]["name"] in kept
        }

    def _remove_all(self) -> None:
        server = self._server
        for each in items(server, CLAIMS):
            if each["metadata"].get("finalizers"):
                del each["metadata"]["finalizers"]
                server.request("PUT", f"{CLAIMS}/{each['metadata']['name']}", each)
        for path in (CLAIMS, PODS, *EVENTS, SLICES, RULES, LEASE, LISTS):
            for each in items(server, path):
                name = each["metadata"]["name"]
                with contextlib.suppress(AssertionError):  # it can be deleted together with its finalizers
                    server.request("DELETE", f"{path}/{name}", {"gracePeriodSeconds": 0})

    def _slice(self, node: str, driver: str, manager: str, *, name: str = "", slices: int = 1) -> None:
        spec = {
            "driver": driver,
            "nodeName": node,
            "pool": {"name": name or node, "generation": 1, "resourceSliceCount": slices},
            "devices": [{"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}}],
        }
        body = {"metadata": {"name": name or f"{node}-{driver}"}, "spec": spec}
        self._server.request("POST", f"{SLICES}?fieldManager={manager}", body)

    def _rule(self, name: str, node: str, operation: str = "") -> None:
        labels = {"app.kubernetes.io/managed-by": "dra-accelerators", "dra.accelerators/node": node}
        if operation:
            labels["dra.accelerators/drain"] = operation
        spec = {"deviceSelector": {"pool": node}, "taint": {"key": "example.com/worn", "effect": "NoSchedule"}}
        manager = "dra.accelerators.device-drain" if operation else "dra.accelerators.device-taint"
        body = {"metadata": {"name": name, "labels": labels}, "spec": spec}
        self._server.request("POST", f"{RULES}?fieldManager={manager}", body)

    def _claim(
        self, name: str, node: str = "", *, driver: str = DRIVER, name_of_pod: str = "deleted", pod: str = ""
    ) -> None:
        spec = {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": "any"}}]}}
        body = {"metadata": {"name": name, "finalizers": [KEPT, OWN]}, "spec": spec}
        self._server.request("POST", CLAIMS, body)
        if node:
            users = [{"resource": "pods", "name": name_of_pod, "uid": pod}] if pod else []
            self._allocate(name, node, driver=driver, users=users)

    def _allocate(
        self, name: str, node: str, *, driver: str = DRIVER, users: Sequence[Json] = (), waits: Mapping[str, Any] = {}
    ) -> None:
        claim = self._server.request("GET", f"{CLAIMS}/{name}")
        result = {"request": "gpu", "driver": driver, "pool": node, "device": "gpu-0", **waits}
        field = {"key": "metadata.name", "operator": "In", "values": [node]}
        allocation = {
            "devices": {"results": [result]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        }
        if waits:
            allocation["allocationTimestamp"] = datetime.datetime.now(datetime.timezone.utc).isoformat()
        claim["status"] = {"allocation": allocation, "reservedFor": list(users)}
        self._server.request("PUT", f"{CLAIMS}/{name}/status", claim)

    def _give_up(self, name: str) -> None:
        """Remove the allocation of a claim, as the scheduler does."""
        claim = self._server.request("GET", f"{CLAIMS}/{name}")
        self._server.request("PUT", f"{CLAIMS}/{name}/status", {**claim, "status": {}})

    # ------------------------------------------------------------------ the controller

    @contextlib.contextmanager
    def _controller(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run the controller through the proxy. It must run until the context ends, and then exit with status 0."""
        cluster = {"server": self._proxy.url, "extensions": [INSECURE_EXTENSION]}
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "k", "user": "u"}}],
            "clusters": [{"name": "k", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": self._token}}],
        }
        (self._folder / "kubeconfig").write_text(json.dumps(kubeconfig), encoding="utf-8")
        settings = {
            "name": "here",
            "kubeconfig": str(self._folder / "kubeconfig"),
            "namespace": NAMESPACE,
            "drivers": [DRIVER],
            "interval": 1,
            "grace": 1,
            "lift_drains_after": 1,
            "drifting": 1,
            "lease_seconds": 4,
            "driver_namespace": DRIVER_NAMESPACE,
            "token_lifetime": 3600,
            "address": self._status,
            "webhook": {"address": self._webhook, "names": ["127.0.0.1"], "report": True},
        }
        (self._folder / "controller.yaml").write_text(yaml.safe_dump(settings), encoding="utf-8")
        command = [
            sys.executable,
            "-m",
            "tests.oracles.short_waits",
            "run",
            "--config",
            self._folder / "controller.yaml",
        ]
        with self.log.open("w") as log, subprocess.Popen(command, stderr=log, cwd=ROOT) as running:
            try:
                yield running
                assert running.poll() is None, f"the controller ended with {running.returncode}\n{self._said()}"
            finally:
                self._proxy.phase = "stop"
                running.terminate()
                status = running.wait(30)
        assert status == 0, f"the controller ended with {status}\n{self._said()}"

    def _said(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-30:])

    def _is_clean(self, node: str) -> bool:
        """Return whether all required objects of a node are cleaned up."""
        slices, rules = ([each["metadata"]["name"] for each in items(self._server, path)] for path in (SLICES, RULES))
        claims = {each["metadata"]["name"]: each for each in items(self._server, CLAIMS)}
        names = {GONE: ("gone", "gone-pod"), LATE: ("late",)}[node]
        return (
            f"{node}-{DRIVER}" not in slices
            and f"worn-{node}" not in rules
            and DRAINED not in rules
            and not any(claims[name].get("status") or OWN in claims[name]["metadata"]["finalizers"] for name in names)
        )

    def _ask(self, path: str, body: Json | None = None) -> Json | None:
        """Return an answer of the webhook's server; None without an answer."""
        context = ssl.create_default_context(cadata=self._authority)
        headers = {"Authorization": f"Bearer {self._reader}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"https://{self._webhook}/{path}", data=data, headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=SECONDS, context=context) as answer:
                found: Json = json.loads(answer.read())
        except OSError:
            return None
        return found

    def _refusal(self) -> str:
        """Return why the webhook rejects a claim whose config does not fit its class; empty while it does not know the
        class.
        """
        parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig"}
        spec = {
            "requests": [{"name": "gpu", "exactly": {"deviceClassName": CLASS}}],
            "config": [{"opaque": {"driver": DRIVER, "parameters": parameters}}],
        }
        claim = {
            "metadata": {"name": "refused"},
            "spec": {"devices": spec},
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
        }
        review = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}
        found = self._ask("validate", {**review, "request": {"uid": "1", "operation": "CREATE", "object": claim}})
        return str(((found or {}).get("response") or {}).get("status", {}).get("message", ""))

    def _report(self) -> Json | None:
        """Return the report of the cluster; None while it is not served."""
        found = self._ask("dra-accelerators/report")
        if found is None:
            return None
        nodes = [each for each in found["nodes"] if each["name"] in (ALIVE, GONE, LATE)]
        claims = [each for each in found["claims"] if each["name"].startswith(SPACE)]
        return {"nodes": nodes, "claims": claims}

    def play(self, faults: Mapping[Request, str]) -> Json:
        """Start the controller; it cleans up, serves the report, cleans up later objects, and releases the Lease when
        it stops.
        """
        creates_lease = not faults or any(kind.startswith("post coordination") for _phase, kind in faults)
        self._lay(has_lease=not creates_lease)
        self._proxy.phase = "start"
        acting = Acting(self._status)
        with self._controller():
            wait("the controller leads", lambda: acting.counted("leading") == 1, self._said)
            wait("the objects of the deleted node are cleaned up", lambda: self._is_clean(GONE), self._said)
            if not any("events" in kind for _phase, kind in faults):  # a rejected Event is lost
                wait("the drift is reported", lambda: DRIFT in self._reasons(), self._said)
            wait("the sign for the drivers is written", lambda: self._data(SIGN), self._said)
            wait("the webhook refuses a claim", self._refusal, self._said)
            refusal = self._refusal()
            self._proxy.phase = "report"
            found: list[Json | None] = []
            wait("the report is served", lambda: found.append(self._report()) or found[-1], self._said)
            self._proxy.phase = "late"
            self._slice(LATE, DRIVER, "dra-accelerators-driver")
            self._rule(f"worn-{LATE}", LATE)
            self._claim("late", LATE)
            conditions = {
                "bindingConditions": ["example.com/Ready"],
                "bindingFailureConditions": ["example.com/Failed"],
            }
            self._allocate("waiting", ALIVE, waits=conditions)
            wait("the waiting claim is listed", lambda: f"{SPACE}/waiting " in str(self._data(LIST)), self._said)
            self._give_up("waiting")
            wait("the list is deleted", lambda: not self._data(LIST), self._said)
            wait("the objects of a node that is deleted later are cleaned up", lambda: self._is_clean(LATE), self._said)
            wait("the token is renewed", self._is_renewed, self._said)
        assert self._versions() == self._untouched, "the controller changed objects of existing nodes"
        lease = self._server.request("GET", f"{LEASE}/{LEASE_NAME}")["spec"]
        is_silent = any(phase == "stop" and "silent" in fault for (phase, _kind), fault in faults.items())
        return {
            "slices": items(self._server, SLICES),
            "rules": items(self._server, RULES),
            "claims": items(self._server, CLAIMS),
            "pods": [each["metadata"]["name"] for each in items(self._server, PODS)],
            # Without an answer the controller stops with its Lease, which expires.
            "holder": "" if is_silent else lease.get("holderIdentity", ""),
            "report": found[-1],
            "refusal": refusal,
            "lists": [each["metadata"]["name"] for each in items(self._server, LISTS)],
            "repeated events": self._repeated_events(),
        }

    def _data(self, name: str) -> Json:
        """Return the data of a ConfigMap; empty if it does not exist."""
        found = [each["data"] for each in items(self._server, LISTS) if each["metadata"]["name"] == name]
        return dict(found[0]) if found else {}

    def _reasons(self) -> set[str]:
        """Return the reasons of the Events of the drift."""
        return {each["reason"] for path in EVENTS for each in items(self._server, path)}

    def _is_renewed(self) -> bool:
        document = json.loads((self._folder / "kubeconfig").read_text(encoding="utf-8"))
        return bool(document["users"][0]["user"]["token"] != self._token)

    def _repeated_events(self) -> list[str]:
        """Return the Events that exist more than twice. An Event whose answer was lost can exist twice. A rejected one
        is lost.
        """
        found = [
            f"{each['reason']} {each['involvedObject']['kind']} {each['involvedObject']['name']} {each['message']}"
            for path in EVENTS
            for each in items(self._server, path)
            if each.get("reportingComponent") == "dra-accelerators-controller"
        ]
        return sorted({each for each in found if found.count(each) > 2})


def pod(name: str) -> Json:
    spec = {"automountServiceAccountToken": False, "containers": [{"name": "main", "image": "i"}]}
    return {"metadata": {"name": name, "namespace": SPACE}, "spec": spec}


@pytest.fixture(scope="module")
def runs(administrator: Path, kubectl: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultRuns]:
    cluster = NoNodes(kubectl, administrator)
    cluster.apply(*objects("service"))
    words = ("--clusterrole=dra-accelerators-report", f"--serviceaccount={SPACE}:{READER}")
    cluster.kubectl("create", "clusterrolebinding", "fault-report-reader", *words)
    with FaultProxy(administrator) as proxy:
        scene = Scene(Server(administrator), proxy, tmp_path_factory.mktemp("controller"))
        yield FaultRuns(proxy, scene.play)


def test_each_request_meets_a_fault_by_rotation(runs: FaultRuns) -> None:
    runs.inject(rotated(runs.record(), 0))
    runs.conclude()


@pytest.mark.prove
def test_each_request_meets_each_fault(runs: FaultRuns) -> None:
    for faults in every(runs.record(), part_of):
        runs.inject(faults)
    runs.conclude()
