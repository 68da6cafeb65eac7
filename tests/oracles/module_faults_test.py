# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inject a fault once into each request of each module that uses the Kubernetes API, between the module and a real API
server.

A module runs without a fault first, to count its requests and to read its end state. Then, for each request and each
fault, the initial state is restored and the module runs again. A last run without a fault must lead to the same end
state.
"""

from __future__ import annotations

import importlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dra.accelerators.plugins.module_utils._drain import drain_run
from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes import client as kubernetes_client
from cluster_modules_test import DRA, DRIVER, Server

from tests.oracles.fault_proxy import FAULTS, FaultProxy

Json = dict[str, Any]
NODE, SPACE = "faulty-1", "faults"
CLAIMS = f"{DRA}/namespaces/{SPACE}/resourceclaims"
PODS = f"/api/v1/namespaces/{SPACE}/pods"
#: The faults of each request. The proxy's other faults are for the daemons (controller_faults_test.py,
#: driver_faults_test.py).
MODULE_FAULTS = ("429", "503", "500", "404 of a load balancer", "connection lost", "answer lost")


@pytest.fixture(scope="module")
def server(administrator: Path) -> Server:
    """Create a node with a GPU that a pod of a ReplicaSet uses."""
    found = Server(administrator)
    found.request("POST", "/api/v1/namespaces", {"metadata": {"name": SPACE}})
    found.request("POST", f"/api/v1/namespaces/{SPACE}/serviceaccounts", {"metadata": {"name": "default"}})
    found.request("POST", "/api/v1/nodes", {"metadata": {"name": NODE}})
    spec = {
        "driver": DRIVER,
        "nodeName": NODE,
        "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu-0", "attributes": {"type": {"string": "gpu"}}}],
    }
    body = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": NODE}, "spec": spec}
    found.request("POST", f"{DRA}/resourceslices", body)
    return found


@pytest.fixture(scope="module")
def between(administrator: Path) -> Iterator[FaultProxy]:
    with FaultProxy(administrator) as proxy:
        yield proxy


@dataclass
class Case:
    """One call of a module. ``before`` creates the initial state. ``state`` lists the paths that it can write."""

    module: str
    options: Json
    before: Callable[[Server], None] = lambda _server: None
    state: tuple[str, ...] = ()
    #: Runs while the module sleeps, for example a kubelet that releases a claim.
    meanwhile: Callable[[Server], None] = lambda _server: None
    #: Keys of the first answer that a second run needs to change nothing.
    carries: tuple[str, ...] = ()
    answers: list[Json] = field(default_factory=list)


def removed(path: str) -> Callable[[Server], None]:
    """Return a function that deletes the collection's objects of a list."""

    def remove(server: Server) -> None:
        for each in server.request("GET", path)["items"]:
            if not each["metadata"]["name"].startswith(("default", NODE, "kube-")):
                server.request("DELETE", f"{path}/{each['metadata']['name']}", {})

    return remove


def unlabelled(server: Server) -> None:
    item = server.request("GET", f"/api/v1/nodes/{NODE}")
    item["metadata"]["labels"] = {}
    item["metadata"]["annotations"] = {}
    server.request("PUT", f"/api/v1/nodes/{NODE}", item)


def held(server: Server) -> None:
    """Let a pod of a ReplicaSet use the GPU, without taint rules."""
    removed(f"{DRA}/devicetaintrules")(server)
    if server.exists(PODS, "worker"):
        release(server, always=True)
    for each in server.request("GET", CLAIMS)["items"]:
        server.request("DELETE", f"{CLAIMS}/{each['metadata']['name']}", {})
    owner = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "worker", "uid": "u", "controller": True}
    pod = {
        "metadata": {"name": "worker", "namespace": SPACE, "ownerReferences": [owner]},
        "spec": {"automountServiceAccountToken": False, "containers": [{"name": "main", "image": "i"}]},
    }
    made = server.request("POST", PODS, pod)
    requests = [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]
    claim = server.request(
        "POST", CLAIMS, {"metadata": {"name": "held", "namespace": SPACE}, "spec": {"devices": {"requests": requests}}}
    )
    result = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": "gpu-0"}
    claim["status"] = {
        "allocation": {"devices": {"results": [result]}},
        "reservedFor": [{"resource": "pods", "name": "worker", "uid": made["metadata"]["uid"]}],
    }
    server.request("PUT", f"{CLAIMS}/held/status", claim)


def release(server: Server, *, always: bool = False) -> None:
    """Act like the kubelet and the controllers after an eviction: the pod ends, and its claim is released."""
    if server.exists(PODS, "worker"):
        if not always:
            return
        server.request("DELETE", f"{PODS}/worker", {"gracePeriodSeconds": 0})
    claim = server.request("GET", f"{CLAIMS}/held")
    if claim["status"]:
        claim["status"] = {}
        server.request("PUT", f"{CLAIMS}/held/status", claim)


def drained(server: Server) -> None:
    """Create a drain rule that an earlier run has left."""
    held(server)
    release(server, always=True)
    rule = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceTaintRule",
        "metadata": {
            "name": "dra-accelerators-drain-left",
            "labels": {"app.kubernetes.io/managed-by": "dra-accelerators", "dra.accelerators/drain": "faults"},
            "annotations": {"dra.accelerators/drain-node": NODE},
        },
        "spec": {"deviceSelector": {"pool": NODE}, "taint": {"key": "k", "effect": "NoSchedule"}},
    }
    server.request("POST", f"{DRA}/devicetaintrules?fieldManager=dra.accelerators.device-drain", rule)


def classes(server: Server) -> None:
    removed(f"{DRA}/deviceclasses")(server)
    spec = {"selectors": [{"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}]}
    for name in ("one", "two"):
        labels = {"app.kubernetes.io/managed-by": "dra-accelerators"}
        server.request("POST", f"{DRA}/deviceclasses", {"metadata": {"name": name, "labels": labels}, "spec": spec})


BY_DRIVER = "device.driver == 'gpu.nvidia.com'"
RULES, CLASSES, SLICES = (f"{DRA}/{each}" for each in ("devicetaintrules", "deviceclasses", "resourceslices"))
SECRETS = f"/api/v1/namespaces/{SPACE}/secrets"
DRAIN = {"node": NODE, "operation": "faults"}
POOL = {"driver": "fpga.example.com", "pool": "shelf"}
#: The plan of a node without operations.
PLAN: Json = {"operations": [], "before": [], "untouched": [], "unfinished": [], "unread": [], "rules_differ": False}
CASES = {
    "device_taint present": Case(
        "device_taint", {"name": "worn", "match": {"node": NODE}, "reason": "worn"}, removed(RULES), (RULES,)
    ),
    "device_class present": Case(
        "device_class",
        {"classes": [{"name": name, "selectors": [BY_DRIVER]} for name in ("one", "two")]},
        removed(CLASSES),
        (CLASSES,),
    ),
    "device_class absent": Case(
        "device_class", {"state": "absent", "classes": [{"name": "one"}, {"name": "two"}]}, classes, (CLASSES,)
    ),
    "resource_slices present": Case(
        "resource_slices",
        {**POOL, "all_nodes": True, "devices": [{"name": f"fpga-{each}"} for each in range(130)]},
        removed(SLICES),
        (SLICES,),
    ),
    "node_labels": Case(
        "node_labels",
        {"node": NODE, "labels": {"nvidia.com/gpu.count": "8"}, "way": "api"},
        unlabelled,
        (f"/api/v1/nodes?fieldSelector=metadata.name={NODE}",),
    ),
    "device_drain drained": Case(
        "device_drain",
        {**DRAIN, "state": "drained", "evict": True, "timeout": 60},
        held,
        (RULES, PODS, CLAIMS),
        meanwhile=release,
    ),
    "device_drain in_service": Case("device_drain", {**DRAIN, "state": "in_service"}, drained, (RULES,)),
    "device_plugin_migration": Case("device_plugin_migration", {"state": "prepared"}, removed(CLASSES), (CLASSES,)),
    "service_account_token": Case(
        "service_account_token", {"name": "default", "namespace": SPACE, "node": NODE}, carries=("token",)
    ),
    "webhook_authority": Case("webhook_authority", {"namespace": SPACE, "settle": 0}, removed(SECRETS), (SECRETS,)),
    "accelerator_report": Case("accelerator_report", {"nodes": {NODE: {}}}),
    "claim_explanation_info": Case("claim_explanation_info", {"claims": [f"{SPACE}/held"]}, held),
    "claim_info": Case("claim_info", {}, held),
    "cluster_info": Case("cluster_info", {"nodes": [NODE], "claims": True}),
    "device_plugin_migration_info": Case("device_plugin_migration_info", {"nodes": [NODE]}),
    "fleet_plan": Case("fleet_plan", {"nodes": {NODE: {}}, "wanted": [{"name": "a", "devices": 1, "count": 1}]}),
    "repartition_plan": Case("repartition_plan", {"nodes": {NODE: PLAN}}),
    "token_audiences_info": Case("token_audiences_info", {"name": "default", "namespace": SPACE}),
}


def without_times(found: Any) -> Any:
    """Return the state without values that differ between two equal runs."""
    if isinstance(found, dict):
        left_out = ("uid", "resourceVersion", "creationTimestamp", "managedFields", "timeAdded", "generation", "data")
        return {
            key: without_times(value)
            for key, value in found.items()
            if key not in left_out
            and not key.startswith("dra.accelerators/drain-")
            and not (key == "name" and "generateName" in found)
        }
    if isinstance(found, list):
        return sorted((without_times(each) for each in found), key=json.dumps)
    return found


@pytest.fixture
def run(
    server: Server, between: FaultProxy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Json]:
    """Return a function that runs a case through the proxy, with a fault at the request with the number ``spoiled``."""
    monkeypatch.setattr(kubernetes_client, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(drain_run, "SETTLE_SECONDS", 0.0)
    sleep = time.sleep

    def briefly(seconds: float, case: Case) -> None:
        case.meanwhile(server)
        sleep(min(seconds, 0.01))

    def once(case: Case, spoiled: int = 0, fault: str = "", **more: Any) -> Json:
        between.arm(lambda number, _request: FAULTS[fault] if number == spoiled else None)
        monkeypatch.setattr("time.sleep", lambda seconds: briefly(seconds, case))
        defaults = drain_run.Drainer.__init__.__kwdefaults__ or {}
        monkeypatch.setitem(defaults, "sleep", lambda seconds: briefly(seconds, case))
        options = {"host": between.url, "api_key": between.token, **case.options, **more, "_ansible_diff": True}
        found = importlib.import_module(f"ansible_collections.dra.accelerators.plugins.modules.{case.module}")
        with patch_module_args(options), pytest.raises(SystemExit):
            found.main()
        answer: Json = json.loads(capsys.readouterr().out)
        return answer

    return once


def state_of(server: Server, case: Case) -> Any:
    return [without_times(server.request("GET", path)["items"]) for path in case.state]


@pytest.mark.prove
@pytest.mark.parametrize("name", CASES)
def test_fault_at_each_request(name: str, run: Callable[..., Json], server: Server, between: FaultProxy) -> None:
    case = CASES[name]
    case.before(server)
    whole = run(case)
    assert "failed" not in whole, whole
    requests, wanted = [kind for _phase, kind in between.requests], state_of(server, case)
    carried = {key: whole[key] for key in case.carries}
    again = run(case, **carried)
    assert "failed" not in again and not again["changed"], again
    for number, request in enumerate(requests, 1):
        for fault in MODULE_FAULTS:
            case.before(server)
            answer = run(case, number, fault)
            where = f"{name}, request {number} ({request}), {fault}: {answer.get('msg')}"
            assert "exception" not in answer and (answer.get("error_code") or "failed" not in answer), where
            is_repeated = fault == "429" or (
                request.startswith(("get ", "list ")) and fault != "404 of a load balancer"
            )
            if is_repeated and number > 1:
                assert "failed" not in answer and answer["changed"] == whole["changed"], where
            if fault == "404 of a load balancer" and request.startswith(("get ", "list ")):
                # The answer contains no information about the object or the API.
                assert "not from an API server" in str(answer.get("msg") or answer.get("problem")), where
            last = run(case, **carried)
            assert "failed" not in last, f"{where}; then {last}"
            assert state_of(server, case) == wanted, where
