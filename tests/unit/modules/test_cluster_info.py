# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module cluster_info: facts about nodes, slices, claims, and the collection's own objects, and the owner of each object."""

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
    """Lists and objects by path, as an API server returns them. ``kept`` is whether the server keeps counters."""

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
                    self.answer(404, {"kind": "Status", "message": "not found", "reason": "NotFound"})
                    return
                key, _equals, value = selector.partition("=")
                found = [
                    one for one in items or [] if not selector or one["metadata"].get("labels", {}).get(key) == value
                ]
                of_node = dict(parse_qsl(parts.query)).get("fieldSelector", "").removeprefix("spec.nodeName=")
                found = [one for one in found if not of_node or one["spec"]["nodeName"] == of_node]
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


def test_nodes_have_facts(ask: Callable[..., Result]) -> None:
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


def test_slices_have_owner_and_devices(ask: Callable[..., Result]) -> None:
    ours, theirs = ask()["nodes"]["node-1"]["slices"]
    assert (ours["managed"], theirs["managed"]) == (True, False)
    assert ours["object"] == {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata": {"name": "a"}}
    assert ours["devices"] == [
        {"name": "gpu-0", "type": "gpu", "product": "NVIDIA H100", "profile": "", "uuid": ""},
        {"name": "gpu-1-mig-0", "type": "mig", "product": "", "profile": "1g.10gb", "uuid": "MIG-1"},
    ]


@pytest.mark.parametrize("batch", [1, 40])
def test_devices_false_returns_counts(ask: Callable[..., Result], server: Server, batch: int) -> None:
    names = ["node-1"] if batch == 1 else fleet(server, 200)[:batch]
    server.lists[f"{DRA}/v1/resourceslices"][0]["spec"]["nodeName"] = names[0]
    whole, part = (ask(nodes=names, devices=devices)["nodes"][names[0]] for devices in (True, False))
    assert part["published"] == whole["published"]
    assert part["published"]["devices"] > 0 and part["published"]["partitions"] == {
        "1g.10gb": part["published"]["devices"]
    }
    assert part["published"]["products"] == ["NVIDIA H100"]
    assert whole["slices"][0]["devices"] and not any(each["devices"] for each in part["slices"])
    assert [{**each, "devices": []} for each in whole["slices"]] == part["slices"]


def test_extended_resource_of_several_classes_is_named(server: Server, ask: Callable[..., Result]) -> None:
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


def test_only_labeled_objects_are_own(ask: Callable[..., Result]) -> None:
    found = ask()
    assert found["classes"] == {"gpu.nvidia.com": True, "mig.nvidia.com": False}
    assert [(one["kind"], one["metadata"]["name"]) for one in found["own"]] == [
        ("DeviceClass", "gpu.nvidia.com"),
        ("ServiceAccount", "driver-node-1"),
        ("Namespace", "dra-accelerators"),
    ]
    assert found["accounts"] == ["driver-node-1"]


def test_claims_of_nodes_and_drivers_are_listed(ask: Callable[..., Result]) -> None:
    assert ask()["claims"] == []
    assert ask(claims=True)["claims"] == [
        {
            "namespace": "default",
            "name": "ours",
            "nodes": ["node-1"],
            "drivers": {"node-1": ["gpu.nvidia.com"]},
            "pods": ["worker"],
            "consumers": [{"namespace": "default", "name": "worker", "uid": "u"}],
        }
    ]


def test_held_claims_are_read_by_name_before_listing(ask: Callable[..., Result], server: Server) -> None:
    def read(*names: str) -> tuple[list[str], list[str]]:
        server.reads.clear()
        found = ask(claims=True, held_claims=[f"default/{name}" for name in names])["claims"]
        paths = [urlsplit(path).path.removeprefix(f"{DRA}/v1/") for path in server.reads if "resourceclaims" in path]
        return [each["name"] for each in found], paths

    place = "namespaces/default/resourceclaims"
    server.objects[f"{DRA}/v1/{place}/held"] = claim("held", "gpu.nvidia.com", "node-1", "worker")
    assert read("held", "gone") == (["held"], [f"{place}/held", f"{place}/gone"])
    # The claim has lost its devices since: all claims are listed after the known ones are released, which finds other
    # claims.
    server.objects[f"{DRA}/v1/{place}/held"] = named("held", namespace="default")
    assert read("held", "gone") == (["ours"], [f"{place}/held", f"{place}/gone", "resourceclaims"])


def test_counters_support_is_checked_with_dry_run(ask: Callable[..., Result], server: Server) -> None:
    assert ask()["counters"] == {"kept": True, "problem": ""}
    assert server.writes == [(f"{DRA}/v1/resourceslices", "dryRun=All")]
    server.kept = False
    answer = ask()["counters"]
    assert answer["kept"] is False and "at least one of" in answer["problem"]
    # The names in the request are fixed, and not from the inventory.
    assert ask(nodes=["Node_1", "fd00::1"])["counters"]["kept"] is False
    assert ask(counters=False)["counters"] == {"kept": None, "problem": ""}


@pytest.mark.prove
@pytest.mark.parametrize("status", [401, 403, 422, 429, 500, 503])
def test_rejected_dry_run_is_no_missing_feature_gate(ask: Callable[..., Result], server: Server, status: int) -> None:
    server.refused = status
    answer = ask()["counters"]
    assert answer["kept"] is None and f"HTTP status {status}" in answer["problem"]


@pytest.mark.parametrize("version", ["v1beta2", "v1beta1"])
def test_older_api_objects_are_returned(ask: Callable[..., Result], server: Server, version: str) -> None:
    """Kubernetes 1.33 and earlier have no v1. v1beta1 has the attributes of devices in a nested mapping."""
    expected = ask(claims=True)
    server.objects[DRA] = {"versions": [{"version": version}, {"version": "v1alpha3"}]}
    server.lists = {
        path.replace("/v1/", f"/{version}/") if DRA in path else path: each for path, each in server.lists.items()
    }
    for each in server.lists[f"{DRA}/{version}/resourceslices"] if version == "v1beta1" else ():
        each["spec"]["devices"] = [{"name": one.pop("name"), "basic": one} for one in each["spec"]["devices"]]
    found = ask(claims=True)
    assert found["reached"] and found["claims"] == expected["claims"] != [] and found["classes"] == expected["classes"]
    for one, other in ((found["own"], expected["own"]), ([found["nodes"]], [expected["nodes"]])):
        assert str(one).replace(f"resource.k8s.io/{version}", "resource.k8s.io/v1") == str(other)
    assert found["nodes"]["node-1"]["slices"][0]["object"]["apiVersion"] == f"resource.k8s.io/{version}"
    assert found["counters"] == {"kept": None, "problem": ""}


def test_missing_api_group_is_reported(ask: Callable[..., Result], server: Server) -> None:
    del server.objects[DRA]
    server.objects["/apis"] = {"kind": "APIGroupList", "groups": [{"name": "apps"}]}
    found = ask(claims=True)
    assert found["reached"] and found["versions"] == found["claims"] == [] and found["classes"] == {}


def test_claims_of_pools_with_other_names_are_listed(ask: Callable[..., Result], server: Server) -> None:
    """Drivers can choose any pool names. The slices state the node of a pool."""
    (first, second) = server.lists[f"{DRA}/v1/resourceslices"]
    first["spec"]["pool"]["name"] = "node-1-gpus"
    server.lists[f"{DRA}/v1/resourceclaims"] += [
        claim("of-the-pool", "gpu.nvidia.com", "node-1-gpus", "worker"),
        # A pool of another driver with the same name, and a pool of another node.
        claim("of-another-driver", "dra.net", "node-1-gpus"),
        claim("of-another-node", "gpu.nvidia.com", "node-9-gpus"),
    ]
    found = {each["name"]: each["nodes"] for each in ask(claims=True)["claims"]}
    assert found == {"ours": ["node-1"], "of-the-pool": ["node-1"]} and second["spec"]["pool"]["name"] == "node-1"


def test_unreachable_server_is_reported(ask: Callable[..., Result]) -> None:
    found = ask(host="http://127.0.0.1:9")
    assert not found["reached"] and "127.0.0.1:9" in found["problem"]
    assert found["nodes"]["node-1"]["exists"] is False


def fleet(server: Server, number: int) -> list[str]:
    """Add this number of Nodes to the server, each with a slice, and return their names."""
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
def test_few_nodes_of_large_cluster_are_read_by_name(ask: Callable[..., Result], server: Server, batch: int) -> None:
    names = fleet(server, 200)
    found = ask(nodes=names[:batch], own=False, counters=False)
    assert all(node["exists"] for node in found["nodes"].values())
    assert not [path for path in server.reads if "limit=500" in path and path.startswith("/api/v1/nodes?")]
    assert [path for path in server.reads if "fieldSelector=spec.nodeName%3Dnode-9" in path]


def test_own_objects_are_read_only_on_request(ask: Callable[..., Result], server: Server) -> None:
    found = ask(own=False)
    assert found["own"] == found["accounts"] == [] and not [path for path in server.reads if "labelSelector" in path]
    assert found["classes"] == {"gpu.nvidia.com": True, "mig.nvidia.com": False}


@pytest.mark.parametrize("batch", [2, 40])
def test_without_node_facts_reads_no_nodes_and_slices(ask: Callable[..., Result], server: Server, batch: int) -> None:
    """Without node facts neither Nodes nor slices are read, because other objects show the needs of other nodes."""
    names = fleet(server, 200)[:batch]
    found = ask(nodes=names, counters=False, needs=True, node_facts=False)
    assert found["reached"] and found["nodes"] == {} and found["accounts"] == ["driver-node-1"]
    assert found["needs"] == ask(nodes=names, counters=False, needs=True)["needs"]
    server.reads.clear()
    ask(nodes=names, counters=False, needs=True, node_facts=False)
    read = [path for path in server.reads if "/nodes" in path or "resourceslices" in path]
    assert read == ["/api/v1/nodes?labelSelector=dra-accelerators%2Fdriver&limit=500"]
    claims = ask(nodes=names, claims=True, counters=False, node_facts=False)
    assert sorted(claims["nodes"]) == sorted(names)


def test_controller_is_found_by_its_label(ask: Callable[..., Result], server: Server) -> None:
    assert ask(own=False)["controller"] is None
    assert ask(own=False, controller=True)["controller"] is False
    server.objects["/api/v1/namespaces/dra-accelerators/configmaps/waiting-claims"] = named("waiting-claims", OURS)
    assert ask(own=False, controller=True)["controller"] is True


@pytest.mark.parametrize(
    ("namespace", "nodes", "expected"),
    [
        ("dra-accelerators", ["node-1"], {"services": "", "pods": "pods"}),
        ("dra-accelerators", ["node-1", "node-3"], {"services": "", "pods": ""}),
        ("other", ["node-1"], {"services": "", "pods": "pods"}),
        ("other", ["node-2"], {"services": "dra-accelerators", "pods": "pods"}),
    ],
)
def test_driver_namespaces_of_other_nodes_are_named(
    server: Server, ask: Callable[..., Result], namespace: str, nodes: list[str], expected: dict[str, str]
) -> None:
    """The admission policy restricts the accounts of one namespace: the namespaces of other nodes' drivers are named."""
    account = "system:serviceaccount:"
    expression = f'name.startsWith("{account}dra-accelerators:driver-") || name == "{account}pods:driver"'
    path = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/dra-accelerators-driver-tokens"
    server.objects[path] = {
        **named("dra-accelerators-driver-tokens"),
        "spec": {"matchConditions": [{"expression": expression}]},
    }
    server.lists["/api/v1/nodes"] = [named("node-3", {"dra-accelerators/driver": ""}), named("node-1")]
    server.lists["/api/v1/namespaces/dra-accelerators/serviceaccounts"] = [named("driver-node-1", OURS)]
    assert ask(namespace=namespace, nodes=nodes, needs=True)["namespaces"] == expected


def test_orphans_include_drivers_of_other_namespaces(server: Server, ask: Callable[..., Result]) -> None:
    """Only the ClusterRoleBinding of a driver in another namespace is visible: its node is an orphan too."""
    server.lists["/api/v1/nodes"] = [named("node-1")]
    server.lists["/api/v1/namespaces/dra-accelerators/serviceaccounts"] = [named("driver-gone", OURS)]
    server.lists["/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"] = [
        named(f"dra-accelerators-driver-{name}", OURS)
        for name in ("node-1:node", "gone:node", "elsewhere:node", "other")
    ]
    assert ask(orphans=True)["orphans"] == ["elsewhere", "gone"]
