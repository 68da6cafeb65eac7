# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read the facts of accelerator nodes from a cluster. The functions that end in ``_facts`` and have no ``api`` have no side effects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any
from urllib.parse import quote

from ..core.dra.extended_claims import describe_duplicate, duplicates
from .client import Api, ApiError, check_answer, first_serving, group_versions, without_managed_fields
from .shared_objects import (
    EARLIER_POD_ROLE,
    FLOW_SCHEMA,
    POD_ROLE,
    PREFIX,
    ROLE,
    TOKEN_POLICY,
    others_needs,
    policy_namespaces,
)

GROUP = "resource.k8s.io"
_UNPROCESSABLE = 422
MANAGED_BY = "app.kubernetes.io/managed-by=dra-accelerators"
NODES = "/api/v1/nodes"
#: The label of a Node with the driver in a pod. The labels of the pods' revisions begin with it.
DRIVER_LABEL = "dra-accelerators/driver"
#: The prefix and suffix of the name of a node driver's ClusterRoleBinding, around the node name.
BINDING, OF_NODE = f"{ROLE}-", ":node"
#: The supported versions of the API group, in order of preference.
VERSIONS = ("v1", "v1beta2", "v1beta1")
#: The largest number of Nodes that are read one by one. More Nodes are read as a list, if the cluster has at most NODES_FOR_EACH times as many.
FEW_NODES, NODES_FOR_EACH = 10, 10
#: The values of the attribute "type" of whole devices and of partitions (core/vendors/nvidia/offers.py, core/vendors/ascend/offers.py).
WHOLE, PARTITIONS = ("gpu", "npu"), ("mig", "vnpu")
#: The ConfigMap that the active controller writes. The node driver reads it in claims/pre_binding_lists.py.
CONTROLLER_CONFIG_MAP = "waiting-claims"
# All kinds of objects that the collection creates, in the order of their removal.
KINDS = (
    ("resource.k8s.io/{version}", "DeviceClass", "/apis/resource.k8s.io/{version}/deviceclasses"),
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
    """Return the facts of a Node."""
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
        "published": published([]),
    }


def published(slices: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of devices in slices, their products, and the number of existing partitions by profile.

    Partitions are not counted as devices. A partition that can be created has no UUID yet.
    """
    devices = [device for each in slices for device in each["devices"]]
    partitions = [each["profile"] for each in devices if each["type"] in PARTITIONS and each["uuid"]]
    return {
        "devices": sum(each["type"] in WHOLE for each in devices),
        "products": sorted({each["product"] for each in devices} - {""}),
        "partitions": {profile: partitions.count(profile) for profile in sorted(set(partitions))},
    }


def slice_facts(item: Mapping[str, Any], version: str) -> dict[str, Any]:
    """Return the facts of a ResourceSlice in this version of the API group."""
    spec = item["spec"]
    managers = [str(one.get("manager", "")) for one in item["metadata"].get("managedFields") or []]
    return {
        "name": item["metadata"]["name"],
        "driver": spec["driver"],
        "pool": spec["pool"]["name"],
        "generation": spec["pool"]["generation"],
        "expected": spec["pool"]["resourceSliceCount"],
        "managed": any(manager.startswith("dra-accelerators") for manager in managers),
        "devices": [device_facts(device) for device in spec.get("devices") or []],
        "object": object_facts(f"{GROUP}/{version}", "ResourceSlice", item),
    }


def device_facts(device: Mapping[str, Any]) -> dict[str, str]:
    """Return the facts of a published device. A missing attribute is an empty string."""
    # v1beta1 has the attributes under "basic".
    attributes = (device.get("basic") or device).get("attributes") or {}

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
    """Return the API version, kind, name, and namespace of an object of this collection."""
    metadata = {key: item["metadata"][key] for key in ("name", "namespace") if item["metadata"].get(key)}
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def claim_facts(
    claim: Mapping[str, Any], pools: Mapping[tuple[str, str], str], nodes: Iterable[str], drivers: Iterable[str]
) -> dict[str, Any] | None:
    """Return the facts of a ResourceClaim, or None if it holds no device of these drivers on the nodes.

    ``pools`` has the node of each published pool, by driver and pool. An unpublished pool with the name of a node belongs
    to that node.
    """
    status = claim.get("status") or {}
    results = (((status.get("allocation") or {}).get("devices")) or {}).get("results") or []
    known, named = set(nodes), set(drivers)
    held: dict[str, set[str]] = {}
    for one in results:
        driver, pool = str(one.get("driver")), str(one.get("pool"))
        node = pools.get((driver, pool), pool)
        if node in known and driver in named:
            held.setdefault(node, set()).add(driver)
    if not held:
        return None
    pods = [one for one in status.get("reservedFor") or [] if one.get("resource") == "pods"]
    return {
        "namespace": claim["metadata"]["namespace"],
        "name": claim["metadata"]["name"],
        "nodes": sorted(held),
        "drivers": {node: sorted(held[node]) for node in sorted(held)},
        "pods": [one["name"] for one in pods],
        "consumers": [
            {"namespace": claim["metadata"]["namespace"], "name": one["name"], "uid": one.get("uid") or ""}
            for one in pods
        ],
    }


def probe(**content: Any) -> dict[str, Any]:
    """Return the ResourceSlice for the dry run. Its names are valid for any node name."""
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


def check_counters(api: Api) -> dict[str, Any]:
    """Check with dry-run requests whether the API server keeps the counters of a ResourceSlice. Nothing is stored.

    ``kept`` is None if the server rejects the request for a reason other than dropped counters.
    """
    counters = probe(sharedCounters=[{"name": "probe", "counters": {"probe": {"value": "1"}}}])
    try:
        answer = _dry_run(api, counters)
    except ApiError as error:
        problem = str(error)
        # A server that drops the counters rejects the empty slice. It then accepts the same slice with a device.
        dropped = error.status == _UNPROCESSABLE and _accepts(api, probe(devices=[{"name": "probe"}]))
        return {"kept": False if dropped else None, "problem": problem}
    kept = bool((answer.get("spec") or {}).get("sharedCounters"))
    return {"kept": kept, "problem": "" if kept else "The API server drops the counters."}


def _dry_run(api: Api, body: Mapping[str, Any]) -> dict[str, Any]:
    return api.request("POST", f"/apis/{GROUP}/v1/resourceslices", query={"dryRun": "All"}, body=body)


def _accepts(api: Api, body: Mapping[str, Any]) -> bool:
    try:
        _dry_run(api, body)
    except ApiError:
        return False
    return True


def found_or_none(api: Api, path: str) -> dict[str, Any] | None:
    """Return an object, or None if the API server says that it does not exist. Raises ApiError."""
    try:
        found = api.request("GET", path)
    except ApiError as error:
        if error.is_not_found:
            return None
        raise
    check_answer(found, path, "metadata")
    return found


def _served_or_none(api: Api, group: str, kind: str, name: str) -> dict[str, Any] | None:
    """Return an object, or None if it does not exist or the API server does not serve its kind. Raises ApiError."""
    try:
        return found_or_none(api, f"/apis/{group}/v1/{kind}/{name}")
    except ApiError as error:
        if error.status == 404 and not first_serving(api, group, ("v1",), kind):
            return None
        raise


def _lists_are_cheaper(api: Api, number: int) -> bool:
    """Return whether lists of all Nodes and slices cost less than two requests per Node for ``number`` Nodes."""
    if number <= FEW_NODES:
        return False
    page = api.request("GET", NODES, query={"limit": "1"})
    total = len(page.get("items") or []) + int((page.get("metadata") or {}).get("remainingItemCount") or 0)
    return total <= number * NODES_FOR_EACH


def read_nodes(api: Api, nodes: Sequence[str], version: str) -> dict[str, dict[str, Any]]:
    """Return the facts of Nodes and their slices. Few Nodes are read one by one, many with lists.

    ``version`` is the API version of slices; an empty string skips them.
    """
    slices = f"/apis/{GROUP}/{version}/resourceslices" if version else ""
    read = _read_listed if _lists_are_cheaper(api, len(nodes)) else _read_by_name
    return read(api, nodes, slices, version)


def _read_by_name(api: Api, nodes: Iterable[str], slices: str, version: str) -> dict[str, dict[str, Any]]:
    found = {}
    for name in nodes:
        found[name] = node_facts(found_or_none(api, f"{NODES}/{quote(name)}"))
        if slices:
            query = {"fieldSelector": f"spec.nodeName={name}"}
            found[name]["slices"] = api.list_all(slices, query, lambda item: slice_facts(item, version))
    return found


def _read_listed(api: Api, nodes: Sequence[str], slices: str, version: str) -> dict[str, dict[str, Any]]:
    named = frozenset(nodes)

    def node(item: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        name = item["metadata"]["name"]
        return (name, node_facts(item)) if name in named else None

    def resource_slice(item: dict[str, Any]) -> tuple[str, dict[str, Any]] | None:
        name = item["spec"].get("nodeName")
        return (name, slice_facts(item, version)) if name in named else None

    listed = dict(api.list_all(NODES, {}, node))
    found = {name: listed.get(name) or node_facts(None) for name in nodes}
    for name, facts in api.list_all(slices, {}, resource_slice) if slices else ():
        found[name]["slices"].append(facts)
    return found


def read_cluster_facts(
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
    controller: bool = False,
    driver_pods: bool = False,
    held: Sequence[str] = (),
    nodes_facts: bool = True,
    devices: bool = True,
    lists: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """Return the facts about the cluster, without any change.

    ``problem`` is the reason why there is no connection (``api`` is None). The other arguments are the options of the
    module cluster_info, with ``drivers`` empty if no claims are requested, ``held`` for held_claims, and ``nodes_facts`` for
    node_facts.
    """
    facts: dict[str, Any] = {
        "reached": False,
        "problem": problem,
        "versions": [],
        "counters": {"kept": None, "problem": ""},
        "namespace": {"exists": False},
        "accounts": [],
        "classes": {},
        "duplicates": [],
        "own": [],
        "controller": None,
        "nodes": {name: node_facts(None) for name in nodes} if nodes_facts or drivers else {},
        "claims": [],
        "needs": {},
        "namespaces": {"services": "", "pods": ""},
        "orphans": [],
        "driver_pods": {},
        "objects": [],
    }
    if api is None:
        return facts
    try:
        if lists:
            # Earlier tasks have used the connection. A restart of the API server must not abort a removal.
            api.expect_server()
            return {**facts, "objects": [item for one in lists for item in _objects(api, one)], "reached": True}
        version = _read_basic_facts(
            api, facts, nodes=nodes, namespace=namespace, counters=counters, devices=devices, own=own
        )
        if version and drivers:
            pools = {(one["driver"], one["pool"]): name for name in nodes for one in facts["nodes"][name]["slices"]}
            facts["claims"] = _claims(api, version, lambda claim: claim_facts(claim, pools, nodes, drivers), held)
        if needs:
            facts |= _others_needs(api, nodes, facts["accounts"], namespace)
        if orphans:
            facts["orphans"] = _orphans(api, facts["own"])
        if driver_pods:
            facts["driver_pods"] = _driver_pods(api)
        if controller:
            path = f"/api/v1/namespaces/{quote(namespace)}/configmaps/{CONTROLLER_CONFIG_MAP}"
            facts["controller"] = found_or_none(api, path) is not None
    except ApiError as error:
        facts["problem"] = str(error)
    else:
        facts["reached"] = True
    return facts


def _driver_pods(api: Api) -> dict[str, list[str]]:
    """Return the nodes with the driver in a pod, with the labels that select these pods."""
    listed = api.list_all(NODES, {"labelSelector": f"{DRIVER_LABEL}=daemonset"})
    return {
        _name_of(each): sorted(name for name in each["metadata"]["labels"] if name.startswith(DRIVER_LABEL))
        for each in listed
    }


def _objects(api: Api, wanted: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the objects of one of the ``lists`` of cluster_info. An answer of a load balancer is an error, not an empty list."""
    version, kind = wanted["api_version"], wanted["kind"]
    name = kind.lower()
    plural = re.sub(
        "(?<![aeiou])ys$", "ies", f"{name}es" if name.endswith("ss") else name if name.endswith("s") else f"{name}s"
    )
    namespace = f"namespaces/{quote(wanted['namespace'])}/" if wanted.get("namespace") else ""
    path = f"/{'apis' if '/' in version else 'api'}/{version}/{namespace}{plural}"
    selectors = {"labelSelector": wanted.get("label_selector"), "fieldSelector": wanted.get("field_selector")}
    listed = api.list_all(path, {key: value for key, value in selectors.items() if value}, without_managed_fields)
    # Items of a list do not have these fields.
    return [{**item, "apiVersion": version, "kind": kind} for item in listed]


def _records(api: Api, namespace: str) -> dict[str, str]:
    """Return the recorded needs of nodes, by node."""

    def record(item: dict[str, Any]) -> tuple[str, str] | None:
        name = str(item["metadata"]["name"])
        text = str((item.get("data") or {}).get("needs", ""))
        return (name.removeprefix(PREFIX), text) if name.startswith(PREFIX) else None

    path = f"/api/v1/namespaces/{quote(namespace)}/configmaps"
    return dict(api.list_all(path, {"labelSelector": MANAGED_BY}, record))


def _others_needs(api: Api, nodes: Sequence[str], accounts: Sequence[str], namespace: str) -> dict[str, Any]:
    """Return the needs of all nodes except ``nodes`` for the shared objects, and the namespaces of their drivers."""
    pods = api.list_all(NODES, {"labelSelector": DRIVER_LABEL}, _name_of)
    drivers = [name.removeprefix(PREFIX) for name in accounts if name.startswith(PREFIX)]
    objects = {
        name: _served_or_none(api, group, kind, name) or {}
        for group, kind, name in (
            ("rbac.authorization.k8s.io", "clusterroles", ROLE),
            ("rbac.authorization.k8s.io", "clusterroles", POD_ROLE),
            ("rbac.authorization.k8s.io", "clusterroles", EARLIER_POD_ROLE),
            ("admissionregistration.k8s.io", "validatingadmissionpolicies", TOKEN_POLICY),
            ("flowcontrol.apiserver.k8s.io", "flowschemas", FLOW_SCHEMA),
        )
    }
    service_namespace, pod_namespace = policy_namespaces(objects[TOKEN_POLICY])
    if service_namespace and service_namespace != namespace:
        path = f"/api/v1/namespaces/{quote(service_namespace)}/serviceaccounts"
        listed = api.list_all(path, {"labelSelector": MANAGED_BY})
        drivers += [one["metadata"]["name"].removeprefix(PREFIX) for one in listed]
    return {
        "needs": others_needs(nodes, _records(api, namespace), [*drivers, *pods], objects),
        "namespaces": {
            kind: name if set(users) - set(nodes) else ""
            for kind, name, users in (("services", service_namespace, drivers), ("pods", pod_namespace, pods))
        },
    }


def _claims(
    api: Api, version: str, facts: Callable[[Mapping[str, Any]], dict[str, Any] | None], held: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the facts of the claims in ``held`` that hold devices, or of all claims in the cluster if none of these does."""
    base = f"/apis/{GROUP}/{version}"
    named = (each.partition("/") for each in held)
    paths = [
        f"{base}/namespaces/{quote(namespace, safe='')}/resourceclaims/{quote(name, safe='')}"
        for namespace, _slash, name in named
    ]
    read = [claim for claim in (found_or_none(api, path) for path in paths) if claim is not None]
    found = [each for each in map(facts, read) if each]
    return found or api.list_all(f"{base}/resourceclaims", {}, facts)


def _orphans(api: Api, own: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the nodes that have a driver's ServiceAccount or ClusterRoleBinding of the collection but no Node object."""
    named = set()
    for each in own:
        kind, name = each["kind"], str(each["metadata"]["name"])
        if kind == "ServiceAccount" and name.startswith(PREFIX):
            named.add(name.removeprefix(PREFIX))
        elif kind == "ClusterRoleBinding" and name.startswith(BINDING) and name.endswith(OF_NODE):
            named.add(name.removeprefix(BINDING).removesuffix(OF_NODE))
    if not named:
        return []
    return sorted(named.difference(api.list_all(NODES, {}, _name_of)))


def _name_of(item: Mapping[str, Any]) -> str:
    return str(item["metadata"]["name"])


def _read_basic_facts(
    api: Api,
    facts: dict[str, Any],
    *,
    nodes: Sequence[str],
    namespace: str,
    counters: bool,
    devices: bool,
    own: bool,
) -> str:
    """Add the facts that need no further option, and return the version of the API group, or "" if it is not served."""
    facts["versions"] = group_versions(api, GROUP)
    version = next((each for each in VERSIONS if each in facts["versions"]), "")
    base = f"/apis/{GROUP}/{version}"
    # If the caller does not request the facts of nodes, ``facts["nodes"]`` is empty.
    for name, node in read_nodes(api, list(facts["nodes"]), version).items():
        slices = sorted(node["slices"], key=lambda one: str(one["name"]))
        facts["nodes"][name] = {
            **node,
            "published": published(slices),
            "slices": slices if devices else [{**each, "devices": []} for each in slices],
        }
    if version == "v1" and counters and nodes:
        facts["counters"] = check_counters(api)
    facts["namespace"]["exists"] = found_or_none(api, f"/api/v1/namespaces/{quote(namespace)}") is not None
    for kind_version, kind, path in KINDS if own else ():
        if path.startswith(f"/apis/{GROUP}/") and not version:
            continue
        list_path = path.format(namespace=quote(namespace), version=version)
        keep = partial(object_facts, kind_version.format(version=version), kind)
        facts["own"] += api.list_all(list_path, {"labelSelector": MANAGED_BY}, keep)
    facts["accounts"] = sorted(one["metadata"]["name"] for one in facts["own"] if one["kind"] == "ServiceAccount")
    if version:
        listed = api.list_all(f"{base}/deviceclasses", {})
        label, _equals, value = MANAGED_BY.partition("=")
        facts["classes"] = {
            one["metadata"]["name"]: (one["metadata"].get("labels") or {}).get(label) == value for one in listed
        }
        facts["duplicates"] = [describe_duplicate(*each) for each in duplicates(listed).items()]
    return version
