# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module cluster_info: what is read of nodes, slices, claims and the collection's own objects, and what is whose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import pytest

from tests.unit.json_server import JsonHandler, JsonServer

Result = dict[str, Any]
DRA = "/apis/resource.k8s.io"
OURS = {"app.kubernetes.io/managed-by": "dra-accelerators"}


def named(name: str, labels: dict[str, str] | None = None, namespace: str = "") -> Result:
    metadata = {"name": name, "labels": labels or {}, **({"namespace": namespace} if namespace else {})}
    return {"metadata": metadata}


def resource_slice(name: str, manager: str) -> Result:
    devices = [
        {"name": "gpu-0", "attributes": {"type": {"string": "gpu"}, "productName": {"string": "NVIDIA H100"}}},
        {
            "name": "gpu-1-mig-0",
            "attributes": {"type": {"string": "mig"}, "profile": {"string": "1g.10gb"}, "uuid": {"string": "MIG-1"}},
        },
    ]
    return {
        "metadata": {"name": name, "managedFields": [{"manager": manager}]},
        "spec": {
            "driver": "gpu.nvidia.com",
            "nodeName": "node-1",
            "pool": {"name": "node-1", "generation": 2, "resourceSliceCount": 1},
            "devices": devices,
        },
    }


def claim(name: str, driver: str, pool: str, *pods: str) -> Result:
    results = [{"driver": driver, "pool": pool, "device": "gpu-0", "request": "r"}]
    reserved = [{"resource": "pods", "name": pod, "uid": "u"} for pod in pods]
    status = {"allocation": {"devices": {"results": results}}, "reservedFor": reserved}
    return {**named(name, namespace="default"), "status": status}


class Server(JsonServer):
    """Lists and objects by path, as an API server gives them; ``kept`` is whether it keeps counters."""

    def __init__(self) -> None:
        self.kept = True
        self.refused = 0
        self.objects: dict[str, Result] = {
            DRA: {"versions": [{"version": "v1"}, {"version": "v1beta2"}]},
            "/api/v1/nodes/node-1": {
                "metadata": {"name": "node-1", "uid": "u-1", "labels": {"nvidia.com/mig.config": "all-1g.10gb"}},
                "spec": {"unschedulable": True},
                "status": {
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "nodeInfo": {"kubeletVersion": "v1.37.0", "containerRuntimeVersion": "containerd://2.3.7"},
                    "allocatable": {"cpu": "2", "nvidia.com/gpu": "8"},
                },
            },
            "/api/v1/namespaces/dra-accelerators": named("dra-accelerators", OURS),
        }
        self.lists: dict[str, list[Result]] = {
            f"{DRA}/v1/resourceslices": [
                resource_slice("a", "dra-accelerators-driver"),
                resource_slice("b", "gpu-kubelet-plugin"),
            ],
            f"{DRA}/v1/deviceclasses": [named("gpu.nvidia.com", OURS), named("mig.nvidia.com")],
            f"{DRA}/v1/resourceclaims": [
                claim("ours", "gpu.nvidia.com", "node-1", "worker"),
                claim("elsewhere", "gpu.nvidia.com", "node-9"),
                claim("another-driver", "dra.net", "node-1"),
                named("waiting", namespace="default"),
            ],
            "/api/v1/namespaces": [named("dra-accelerators", OURS), named("default")],
            "/api/v1/namespaces/dra-accelerators/serviceaccounts": [
                named("driver-node-1", OURS, "dra-accelerators"),
                named("default", None, "dra-accelerators"),
            ],
        }
        self.writes: list[tuple[str, str]] = []
        self.reads: list[str] = []
        server = self

        class Handler(JsonHandler):
            def do_GET(self) -> None:
                parts = urlsplit(self.path)
                server.reads.append(self.path)
                if parts.path in server.objects:
                    self.answer(200, server.objects[parts.path])
                    return
                selector = dict(parse_qsl(parts.query)).get("labelSelector", "")
                items = server.lists.get(parts.path)
                if items is None and not selector:
                    self.answer(404, {"message": "not found", "reason": "NotFound"})
                    return
                key, _equals, value = selector.partition("=")
                found = [
                    one for one in items or [] if not selector or one["metadata"].get("labels", {}).get(key) == value
                ]
                limit = int(dict(parse_qsl(parts.query)).get("limit", 500))
                rest = {"remainingItemCount": len(found) - limit} if limit == 1 and len(found) > limit else {}
                self.answer(200, {"items": found[:limit], "metadata": rest})

            def do_POST(self) -> None:
                body = self.body()
                server.writes.append((urlsplit(self.path).path, urlsplit(self.path).query))
                if server.refused:
                    self.answer(server.refused, {"message": "rejected", "reason": "Rejected"})
                elif server.kept or body["spec"].get("devices"):
                    self.answer(201, body)
                else:
                    self.answer(
                        422, {"message": "spec: at least one of sharedCounters and devices", "reason": "Invalid"}
                    )

        super().__init__(Handler)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture
def ask(run_here: Callable[..., Result], server: Server) -> Callable[..., Result]:
    def run(**options: Any) -> Result:
        connection = {"host": server.url, "api_key": "let-me-in"}
        return run_here("cluster_info", {**connection, "nodes": ["node-1", "node-2"], **options})

    return run


def test_what_the_nodes_are(ask: Callable[..., Result]) -> None:
    found = ask()
    assert found["reached"] and not found["changed"] and found["versions"] == ["v1", "v1beta2"]
    node = found["nodes"]["node-1"]
    assert {key: node[key] for key in ("exists", "uid", "ready", "kubelet", "runtime", "unschedulable")} == {
        "exists": True,
        "uid": "u-1",
        "ready": "True",
        "kubelet": "v1.37.0",
        "runtime": "containerd://2.3.7",
        "unschedulable": True,
    }
    assert node["allocatable"]["nvidia.com/gpu"] == "8"
    assert node["labels"] == {"nvidia.com/mig.config": "all-1g.10gb"}
    assert found["nodes"]["node-2"]["exists"] is False


def test_whose_a_slice_is_and_what_it_offers(ask: Callable[..., Result]) -> None:
    ours, theirs = ask()["nodes"]["node-1"]["slices"]
    assert (ours["ours"], theirs["ours"]) == (True, False)
    assert ours["object"] == {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "a"}}
    assert ours["devices"] == [
        {"name": "gpu-0", "type": "gpu", "product": "NVIDIA H100", "profile": "", "uuid": ""},
        {"name": "gpu-1-mig-0", "type": "mig", "product": "", "profile": "1g.10gb", "uuid": "MIG-1"},
    ]


def test_cluster_info_names_extended_resource_of_several_classes(server: Server, ask: Callable[..., Result]) -> None:
    assert ask()["duplicates"] == []
    classes = [named("gpu.nvidia.com", OURS), named("old.example.com"), named("mig.nvidia.com")]
    for number, each in enumerate(classes[:2]):
        each["metadata"]["creationTimestamp"] = f"2026-0{2 - number}-01T00:00:00Z"
        each["spec"] = {"extendedResourceName": "nvidia.com/gpu"}
    server.lists[f"{DRA}/v1/deviceclasses"] = classes
    (found,) = ask()["duplicates"]
    assert "nvidia.com/gpu is served by several DeviceClasses: gpu.nvidia.com, old.example.com" in found
    assert "Then update the remaining class: kubectl annotate --overwrite deviceclass" in found, (
        "the scheduler has lost the resource until then"
    )


def test_only_what_bears_the_label_is_the_collections(ask: Callable[..., Result]) -> None:
    found = ask()
    assert found["classes"] == {"gpu.nvidia.com": True, "mig.nvidia.com": False}
    assert [(one["kind"], one["metadata"]["name"]) for one in found["own"]] == [
        ("DeviceClass", "gpu.nvidia.com"),
        ("ServiceAccount", "driver-node-1"),
        ("Namespace", "dra-accelerators"),
    ]
    assert found["accounts"] == ["driver-node-1"]


def test_claims_of_these_nodes_and_drivers(ask: Callable[..., Result]) -> None:
    assert ask()["claims"] == []
    assert ask(claims=True)["claims"] == [
        {"namespace": "default", "name": "ours", "nodes": ["node-1"], "pods": ["worker"]}
    ]


def test_counters_are_asked_for_by_a_dry_run(ask: Callable[..., Result], server: Server) -> None:
    assert ask()["counters"] == {"kept": True, "problem": ""}
    assert server.writes == [(f"{DRA}/v1/resourceslices", "dryRun=All")]
    server.kept = False
    answer = ask()["counters"]
    assert answer["kept"] is False and "at least one of" in answer["problem"]
    # The names in the request do not come from the inventory.
    assert ask(nodes=["Node_1", "fd00::1"])["counters"]["kept"] is False
    assert ask(counters=False)["counters"] == {"kept": None, "problem": ""}


@pytest.mark.parametrize("status", [401, 403, 422, 429, 500, 503])
def test_rejected_dry_run_is_no_missing_feature_gate(ask: Callable[..., Result], server: Server, status: int) -> None:
    server.refused = status
    answer = ask()["counters"]
    assert answer["kept"] is None and f"HTTP status {status}" in answer["problem"]


def test_an_old_api_server_is_an_answer(ask: Callable[..., Result], server: Server) -> None:
    server.objects[DRA] = {"versions": [{"version": "v1beta1"}]}
    found = ask(claims=True)
    assert found["reached"] and found["versions"] == ["v1beta1"] and found["classes"] == {}


def test_an_api_server_that_does_not_answer_is_an_answer(ask: Callable[..., Result]) -> None:
    found = ask(host="http://127.0.0.1:9")
    assert not found["reached"] and "127.0.0.1:9" in found["problem"]
    assert found["nodes"]["node-1"]["exists"] is False


def fleet(server: Server, number: int) -> list[str]:
    """Give the server so many Nodes, each with a slice; return their names."""
    names = [f"node-{position}" for position in range(number)]
    server.lists["/api/v1/nodes"] = [named(name) for name in names]
    server.objects |= {f"/api/v1/nodes/{name}": named(name) for name in names}
    slices = [resource_slice(f"slice-of-{name}", "dra-accelerators-driver") for name in names]
    for name, each in zip(names, slices):
        each["spec"]["nodeName"] = name
    server.lists[f"{DRA}/v1/resourceslices"] = slices
    return names


def test_many_nodes_are_read_with_lists(ask: Callable[..., Result], server: Server) -> None:
    names = fleet(server, 200)
    found = ask(nodes=[*names[:40], "missing"], own=False, counters=False)
    assert [name for name, node in found["nodes"].items() if not node["exists"]] == ["missing"]
    assert {name: [each["name"] for each in node["slices"]] for name, node in found["nodes"].items()} == {
        **{name: [f"slice-of-{name}"] for name in names[:40]},
        "missing": [],
    }
    assert len(server.reads) < 10, server.reads


@pytest.mark.parametrize("batch", [10, 15])
def test_few_nodes_of_a_large_cluster_are_read_by_name(ask: Callable[..., Result], server: Server, batch: int) -> None:
    names = fleet(server, 200)
    found = ask(nodes=names[:batch], own=False, counters=False)
    assert all(node["exists"] for node in found["nodes"].values())
    assert not [path for path in server.reads if "limit=500" in path and path.startswith("/api/v1/nodes?")]
    assert [path for path in server.reads if "fieldSelector=spec.nodeName%3Dnode-9" in path]


def test_own_objects_are_read_only_if_they_are_asked_for(ask: Callable[..., Result], server: Server) -> None:
    found = ask(own=False)
    assert found["own"] == found["accounts"] == [] and not [path for path in server.reads if "labelSelector" in path]
    assert found["classes"] == {"gpu.nvidia.com": True, "mig.nvidia.com": False}


def test_nodes_whose_drivers_watch_all_claims_are_named(ask: Callable[..., Result], server: Server) -> None:
    def role(name: str, *verbs: str) -> Result:
        rules = [{"apiGroups": ["resource.k8s.io"], "resources": ["resourceclaims"], "verbs": list(verbs)}]
        return {**named(f"dra-accelerators-driver{name}", OURS), "rules": rules if verbs else None}

    server.lists["/apis/rbac.authorization.k8s.io/v1/clusterroles"] = [
        role("", "get"),
        role("-pods", "list", "watch"),
        role("-node-2", "list", "watch"),
        role("-node-1", "list", "watch"),
        role("-node-3"),
    ]
    assert ask(own=False)["claim_watchers"] == []
    assert ask(own=False, claim_watchers=True)["claim_watchers"] == ["node-1", "node-2"]
