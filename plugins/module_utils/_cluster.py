# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""What a cluster knows of its accelerator nodes: pure readers of API objects, and the one function that asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ._kubernetes import Api, ApiError
from ._shared_needs import POD_ROLE, PREFIX, ROLE, TOKEN_POLICY, others_needs
from .core.extended_claims import describe_duplicate, duplicates

GROUP = "resource.k8s.io"
_UNPROCESSABLE = 422
MANAGED_BY = "app.kubernetes.io/managed-by=dra-accelerators"
NODES, SLICES = "/api/v1/nodes", f"/apis/{GROUP}/v1/resourceslices"
#: The largest number of Nodes that are read one by one. More Nodes are read as a list, if the cluster has at most NODES_FOR_EACH times as many.
FEW_NODES, NODES_FOR_EACH = 10, 10
#: The Node (or None) and its slices, by name.
NodesRead = dict[str, "tuple[dict[str, Any] | None, list[dict[str, Any]]]"]
# Every kind of object that the collection makes, in the order in which they can be removed.
KINDS = (
    ("resource.k8s.io/v1", "DeviceClass", "/apis/resource.k8s.io/v1/deviceclasses"),
    (
        "flowcontrol.apiserver.k8s.io/v1",
        "FlowSchema",
        "/apis/flowcontrol.apiserver.k8s.io/v1/flowschemas",
    ),
    (
        "flowcontrol.apiserver.k8s.io/v1",
        "PriorityLevelConfiguration",
        "/apis/flowcontrol.apiserver.k8s.io/v1/prioritylevelconfigurations",
    ),
    (
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicyBinding",
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
    ),
    (
        "admissionregistration.k8s.io/v1",
        "ValidatingAdmissionPolicy",
        "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    ),
    (
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings",
    ),
    ("rbac.authorization.k8s.io/v1", "Role", "/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/roles"),
    ("rbac.authorization.k8s.io/v1", "ClusterRoleBinding", "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"),
    ("rbac.authorization.k8s.io/v1", "ClusterRole", "/apis/rbac.authorization.k8s.io/v1/clusterroles"),
    ("v1", "ConfigMap", "/api/v1/namespaces/{namespace}/configmaps"),
    ("v1", "ServiceAccount", "/api/v1/namespaces/{namespace}/serviceaccounts"),
    ("v1", "Namespace", "/api/v1/namespaces"),
)


def node_facts(node: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is returned of a Node object."""
    metadata, status = (node or {}).get("metadata") or {}, (node or {}).get("status") or {}
    system = status.get("nodeInfo") or {}
    ready = [one["status"] for one in status.get("conditions") or [] if one.get("type") == "Ready"]
    return {
        "exists": node is not None,
        "uid": metadata.get("uid", ""),
        "ready": ready[0] if ready else "Unknown",
        "kubelet": system.get("kubeletVersion", ""),
        "runtime": system.get("containerRuntimeVersion", ""),
        "unschedulable": bool(((node or {}).get("spec") or {}).get("unschedulable")),
        "annotations": metadata.get("annotations") or {},
        "labels": metadata.get("labels") or {},
        "allocatable": status.get("allocatable") or {},
        "slices": [],
    }


def slice_facts(item: Mapping[str, Any]) -> dict[str, Any]:
    """What is returned of a ResourceSlice."""
    spec = item["spec"]
    managers = [str(one.get("manager", "")) for one in item["metadata"].get("managedFields") or []]
    return {
        "name": item["metadata"]["name"],
        "driver": spec["driver"],
        "pool": spec["pool"]["name"],
        "generation": spec["pool"]["generation"],
        "expected": spec["pool"]["resourceSliceCount"],
        "ours": any(manager.startswith("dra-accelerators") for manager in managers),
        "devices": [device_facts(device) for device in spec.get("devices") or []],
        "object": object_facts(f"{GROUP}/v1", "ResourceSlice", item),
    }


def device_facts(device: Mapping[str, Any]) -> dict[str, str]:
    """What is returned of a published device; an attribute that a driver does not publish is empty."""
    attributes = device.get("attributes") or {}

    def text(name: str) -> str:
        return str((attributes.get(name) or {}).get("string", ""))

    return {
        "name": device["name"],
        "type": text("type"),
        "product": text("productName"),
        "profile": text("profile") or text("template"),
        "uuid": text("uuid"),
    }


def object_facts(version: str, kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    """What is returned of an object of the collection's own: as much as names it."""
    metadata = {key: item["metadata"][key] for key in ("name", "namespace") if item["metadata"].get(key)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def _claim_watchers(api: Api) -> list[str]:
    """Return the names of the nodes whose drivers may watch all ResourceClaims.

    Reads the drivers' ClusterRoles. Drivers in a DaemonSet have no ClusterRole per node.
    """
    prefix, pods = "dra-accelerators-driver-", "dra-accelerators-driver-pods"
    roles = api.list_all("/apis/rbac.authorization.k8s.io/v1/clusterroles", {"labelSelector": MANAGED_BY})
    return sorted(
        role["metadata"]["name"].removeprefix(prefix)
        for role in roles
        if role["metadata"]["name"].startswith(prefix)
        and role["metadata"]["name"] != pods
        and any(
            "resourceclaims" in (rule.get("resources") or []) and "watch" in (rule.get("verbs") or [])
            for rule in role.get("rules") or []
        )
    )


def claim_facts(claim: Mapping[str, Any], nodes: Iterable[str], drivers: Iterable[str]) -> dict[str, Any] | None:
    """What is returned of a ResourceClaim, or None if it holds no device of these drivers in the nodes' own pools."""
    status = claim.get("status") or {}
    results = (((status.get("allocation") or {}).get("devices")) or {}).get("results") or []
    known, named = set(nodes), set(drivers)
    mine = [one for one in results if one.get("pool") in known and one.get("driver") in named]
    if not mine:
        return None
    return {
        "namespace": claim["metadata"]["namespace"],
        "name": claim["metadata"]["name"],
        "nodes": sorted({one["pool"] for one in mine}),
        "pods": [one["name"] for one in status.get("reservedFor") or [] if one.get("resource") == "pods"],
    }


def probe(**content: Any) -> dict[str, Any]:
    """Return the ResourceSlice for the dry run; its names are valid whatever the node's name."""
    return {
        "apiVersion": f"{GROUP}/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "dra-accelerators-preflight"},
        "spec": {
            "driver": "preflight.dra-accelerators",
            "allNodes": True,
            "pool": {"name": "dra-accelerators-preflight", "generation": 1, "resourceSliceCount": 1},
            **content,
        },
    }


def ask_counters(api: Api) -> dict[str, Any]:
    """Learn by dry runs whether the API server keeps the counters of a ResourceSlice; nothing is stored.

    ``kept`` is None where the server rejects the request for another reason than dropped counters.
    """
    counters = probe(sharedCounters=[{"name": "probe", "counters": {"probe": {"value": "1"}}}])
    try:
        answer = _dry_run(api, counters)
    except ApiError as error:
        problem = str(error)
        # A server that drops the counters finds the slice empty. It takes the same slice with a device then.
        dropped = error.status == _UNPROCESSABLE and _takes(api, probe(devices=[{"name": "probe"}]))
        return {"kept": False if dropped else None, "problem": problem}
    kept = bool((answer.get("spec") or {}).get("sharedCounters"))
    return {"kept": kept, "problem": "" if kept else "it answered without the counters"}


def _dry_run(api: Api, body: Mapping[str, Any]) -> dict[str, Any]:
    return api.request("POST", f"/apis/{GROUP}/v1/resourceslices", query={"dryRun": "All"}, body=body)


def _takes(api: Api, body: Mapping[str, Any]) -> bool:
    try:
        _dry_run(api, body)
    except ApiError:
        return False
    return True


def found_or_none(api: Api, path: str) -> dict[str, Any] | None:
    """Return an object, or None if the API server says that it does not exist. Raises ApiError."""
    try:
        return api.request("GET", path)
    except ApiError as error:
        if error.is_not_found:
            return None
        raise


def served_or_none(api: Api, path: str) -> dict[str, Any] | None:
    """Return what a path serves, or None if it is not served: the API server answers such paths with 404 and plain text. Raises ApiError."""
    try:
        return api.request("GET", path)
    except ApiError as error:
        if error.status == 404:
            return None
        raise


def _lists_are_cheaper(api: Api, number: int) -> bool:
    """Return whether lists of all Nodes and slices cost less than two requests per Node for ``number`` Nodes."""
    if number <= FEW_NODES:
        return False
    page = api.request("GET", NODES, query={"limit": "1"})
    total = len(page.get("items") or []) + int((page.get("metadata") or {}).get("remainingItemCount") or 0)
    return total <= number * NODES_FOR_EACH


def _read_by_name(api: Api, nodes: Iterable[str], *, with_slices: bool) -> NodesRead:
    found: NodesRead = {}
    for name in nodes:
        node, slices = found_or_none(api, f"{NODES}/{quote(name)}"), list[dict[str, Any]]()
        if with_slices:
            slices = api.list_all(SLICES, {"fieldSelector": f"spec.nodeName={name}"})
        found[name] = node, slices
    return found


def _read_listed(api: Api, nodes: Iterable[str], *, with_slices: bool) -> NodesRead:
    listed = {one["metadata"]["name"]: one for one in api.list_all(NODES, {})}
    found: NodesRead = {name: (listed.get(name), []) for name in nodes}
    for each in api.list_all(SLICES, {}) if with_slices else ():
        name = each["spec"].get("nodeName")
        if name in found:
            found[name][1].append(each)
    return found


def ask(
    api: Api | None,
    problem: str,
    *,
    nodes: Sequence[str],
    namespace: str,
    counters: bool,
    drivers: Sequence[str],
    own: bool,
    needs: bool = False,
    orphans: bool = False,
    claim_watchers: bool = False,
) -> dict[str, Any]:
    """Return the facts about the cluster, without a change.

    ``problem`` is the reason why there is no connection. ``drivers`` are the drivers whose claims are read. ``own`` is whether the
    collection's own objects are read. ``claim_watchers`` is whether to find the nodes whose drivers watch all claims.
    """
    answer: dict[str, Any] = {
        "reached": False,
        "problem": problem,
        "versions": [],
        "counters": {"kept": None, "problem": ""},
        "namespace": {"exists": False},
        "accounts": [],
        "classes": {},
        "duplicates": [],
        "own": [],
        "claim_watchers": [],
        "nodes": {name: node_facts(None) for name in nodes},
        "claims": [],
        "needs": {},
        "orphans": [],
    }
    if api is None:
        return answer
    try:
        _ask(api, answer, nodes=nodes, namespace=namespace, counters=counters, drivers=drivers, own=own)
        if needs:
            answer["needs"] = _others_needs(api, nodes, answer["accounts"], namespace)
        if orphans:
            answer["orphans"] = _orphans(api, answer["accounts"])
        if claim_watchers:
            answer["claim_watchers"] = _claim_watchers(api)
    except ApiError as error:
        answer["problem"] = str(error)
    else:
        answer["reached"] = True
    return answer


def _others_needs(api: Api, nodes: Sequence[str], accounts: Sequence[str], namespace: str) -> dict[str, Any]:
    """Return the needs of all nodes other than ``nodes`` for the objects that all nodes share."""
    path = f"/api/v1/namespaces/{quote(namespace)}/configmaps"
    listed = api.list_all(path, {"labelSelector": MANAGED_BY})
    records = {one["metadata"]["name"]: str((one.get("data") or {}).get("needs", "")) for one in listed}
    with_pod = api.list_all("/api/v1/nodes", {"labelSelector": "dra-accelerators/driver"})
    drivers = [name.removeprefix(PREFIX) for name in accounts if name.startswith(PREFIX)]
    objects = {
        name: served_or_none(api, f"/apis/{group}/{kind}/{name}") or {}
        for group, kind, name in (
            ("rbac.authorization.k8s.io/v1", "clusterroles", ROLE),
            ("rbac.authorization.k8s.io/v1", "clusterroles", POD_ROLE),
            ("admissionregistration.k8s.io/v1", "validatingadmissionpolicies", TOKEN_POLICY),
        )
    }
    return others_needs(
        nodes,
        {name.removeprefix(PREFIX): text for name, text in records.items() if name.startswith(PREFIX)},
        [*drivers, *(one["metadata"]["name"] for one in with_pod)],
        objects,
    )


def _orphans(api: Api, accounts: Sequence[str]) -> list[str]:
    """Return the nodes that have a driver's service account and no Node object."""
    named = {name.removeprefix(PREFIX) for name in accounts if name.startswith(PREFIX)}
    if not named:
        return []
    return sorted(named - {one["metadata"]["name"] for one in api.list_all("/api/v1/nodes", {})})


def _ask(
    api: Api,
    answer: dict[str, Any],
    *,
    nodes: Sequence[str],
    namespace: str,
    counters: bool,
    drivers: Sequence[str],
    own: bool,
) -> None:
    group = served_or_none(api, f"/apis/{GROUP}")
    answer["versions"] = [one["version"] for one in (group or {}).get("versions") or []]
    served = "v1" in answer["versions"]
    read = _read_listed if _lists_are_cheaper(api, len(nodes)) else _read_by_name
    for name, (node, slices) in read(api, nodes, with_slices=served).items():
        answer["nodes"][name] = node_facts(node)
        answer["nodes"][name]["slices"] = sorted(map(slice_facts, slices), key=lambda one: str(one["name"]))
    if served and counters and nodes:
        answer["counters"] = ask_counters(api)
    answer["namespace"]["exists"] = found_or_none(api, f"/api/v1/namespaces/{quote(namespace)}") is not None
    for version, kind, path in KINDS if own else ():
        if path.startswith(f"/apis/{GROUP}/") and not served:
            continue
        listed = api.list_all(path.format(namespace=quote(namespace)), {"labelSelector": MANAGED_BY})
        answer["own"] += [object_facts(version, kind, one) for one in listed]
    answer["accounts"] = sorted(one["metadata"]["name"] for one in answer["own"] if one["kind"] == "ServiceAccount")
    if served:
        listed = api.list_all(f"/apis/{GROUP}/v1/deviceclasses", {})
        label, _equals, value = MANAGED_BY.partition("=")
        answer["classes"] = {
            one["metadata"]["name"]: (one["metadata"].get("labels") or {}).get(label) == value for one in listed
        }
        answer["duplicates"] = [describe_duplicate(*each) for each in duplicates(listed).items()]
    if served and drivers:
        listed = api.list_all(f"/apis/{GROUP}/v1/resourceclaims", {})
        answer["claims"] = [facts for facts in (claim_facts(one, nodes, drivers) for one in listed) if facts]
