# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Read the objects of a cluster that use device plugins, for a report of the cluster, and for one node. Changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from .._kubernetes.client import Api, ApiError, group_versions, without_managed_fields
from .._kubernetes.cluster_facts import GROUP, found_or_none
from ..core.cluster.inventory import results
from . import migration_inventory as inventory
from . import node_plan as nodes
from .migration_inventory import CLAIMS, PLUGIN, Inventory, Json, PodUse, Service
from .resource_names import DRIVERS, meaning

DRA = f"/apis/{GROUP}/v1"
SETS = "/apis/apps/v1/daemonsets"
#: The kinds of objects with pod templates, and their paths in the API.
WORKLOADS = {
    "Deployment": "/apis/apps/v1/deployments",
    "StatefulSet": "/apis/apps/v1/statefulsets",
    "DaemonSet": SETS,
    "ReplicaSet": "/apis/apps/v1/replicasets",
    "ReplicationController": "/api/v1/replicationcontrollers",
    "Job": "/apis/batch/v1/jobs",
    "CronJob": "/apis/batch/v1/cronjobs",
}
_OWNERS = ("ReplicaSet", "Job")
PROBE = "dra-accelerators-extended-resource"


@dataclass(frozen=True)
class Cluster:
    """Objects as the API server returned them. ``workloads`` contains the objects of WORKLOADS, by kind."""

    nodes: tuple[Json, ...] = ()
    pods: tuple[Json, ...] = ()
    workloads: Mapping[str, Sequence[Json]] = field(default_factory=dict)
    quotas: tuple[Json, ...] = ()
    limit_ranges: tuple[Json, ...] = ()
    classes: tuple[Json, ...] = ()
    slices: tuple[Json, ...] = ()
    claims: tuple[Json, ...] = ()


def read_cluster(api: Api) -> Cluster:
    """Read all objects that a migration depends on. Raises ApiError."""

    def listed(path: str) -> tuple[Json, ...]:
        return tuple(api.list_all(path, {}, without_managed_fields))

    return Cluster(
        nodes=listed("/api/v1/nodes"),
        pods=listed("/api/v1/pods"),
        workloads={kind: listed(path) for kind, path in WORKLOADS.items()},
        quotas=listed("/api/v1/resourcequotas"),
        limit_ranges=listed("/api/v1/limitranges"),
        **dra_objects(api),
    )


def dra_objects(
    api: Api, *, node: str = "", held: Iterable[tuple[str, str]] | None = None
) -> dict[str, tuple[Json, ...]]:
    """Return the classes, slices, and claims. The result is empty if the API server does not serve them. Raises ApiError.

    With ``node``, it returns only the slices of this node, and the claims on them. With ``held``, it reads only the claims
    with these namespaces and names, and no classes.
    """
    if "v1" not in group_versions(api, GROUP):
        return {}
    selected = {"fieldSelector": f"spec.nodeName={node}"} if node else {}
    slices = tuple(api.list_all(f"{DRA}/resourceslices", selected, without_managed_fields))
    pools = {each["spec"]["pool"]["name"] for each in slices} | {node}

    def claim(item: dict[str, Any]) -> Json | None:
        allocated = (one for one in results(item) if one.get("driver") in DRIVERS)
        return without_managed_fields(item) if any(not node or one.get("pool") in pools for one in allocated) else None

    if held is not None:
        paths = (f"{DRA}/namespaces/{quote(space)}/resourceclaims/{quote(one)}" for space, one in held)
        read = (found_or_none(api, path) for path in paths)
        return {"slices": slices, "claims": tuple(each for each in read if each is not None)}
    return {
        "classes": tuple(api.list_all(f"{DRA}/deviceclasses", {})),
        "slices": slices,
        "claims": tuple(api.list_all(f"{DRA}/resourceclaims", {}, claim)),
    }


def build_inventory(found: Cluster, *, direction: str, kubelet_root: str) -> Inventory:
    """Return the objects of a cluster that use device plugins, with the effect of the migration. Has no side effects."""
    workloads = found.workloads
    owner_of = inventory.owner_lookup(each for kind in _OWNERS for each in workloads.get(kind, ()))
    taint = nodes.taint_of(direction)
    uses = tuple(use for use in (inventory.pod_use(pod, owner_of, taint) for pod in found.pods) if use is not None)
    plugins, _strays = nodes.find_plugins(workloads.get("DaemonSet", ()), found.pods, kubelet_root)
    asked = {name for use in uses for name in use.resources} | offered_resources(found.nodes)
    specs = [_pod_spec(kind, each) for kind, items in workloads.items() for each in items]
    asked |= {name for spec in specs for name in inventory.requested_amounts(spec)}
    services = inventory.find_services(asked, found.classes)
    texts = {name: each.text for name, each in services.items()}
    return Inventory(
        pods=uses,
        workloads=_all(
            inventory.workload_facts(kind, each, texts.__getitem__)
            for kind, items in workloads.items()
            for each in items
        ),
        quotas=_all(
            inventory.quota_facts(each, services, _by_plugin(uses, str(each["metadata"]["namespace"])))
            for each in found.quotas
        ),
        limit_ranges=_all(inventory.limit_range_facts(each) for each in found.limit_ranges),
        plugins=plugins,
        services=services,
    )


def _pod_spec(kind: str, item: Json) -> Json:
    spec = item.get("spec") or {}
    if kind == "CronJob":
        spec = (spec.get("jobTemplate") or {}).get("spec") or {}
    found: Json = (spec.get("template") or {}).get("spec") or {}
    return found


def _all(found: Iterable[dict[str, Any] | None]) -> tuple[dict[str, Any], ...]:
    known = [each for each in found if each is not None]
    return tuple(sorted(known, key=lambda each: (each["namespace"], each.get("kind", ""), each["name"])))


def _by_plugin(uses: Iterable[PodUse], namespace: str) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for use in uses:
        if use.namespace == namespace and use.way == PLUGIN:
            counted[""] += 1
            counted.update({name: number for name, number in use.resources.items() if name in use.by_plugin})
    return dict(counted)


def offered_resources(items: Iterable[Json]) -> set[str]:
    """Return the known resources in the status of Nodes."""
    return {
        str(name)
        for each in items
        for name in (each.get("status") or {}).get("allocatable") or {}
        if meaning(str(name)) is not None
    }


def node_states(
    found: Cluster, stock: Inventory, names: Sequence[str], kubelet_root: str
) -> dict[str, nodes.NodeState]:
    """Return the known state of nodes by name, also for names without a Node. Has no side effects."""
    by_name = {str(each["metadata"]["name"]): each for each in found.nodes}
    pods = {(str(each["metadata"]["namespace"]), str(each["metadata"]["name"])): each for each in found.pods}
    _plugins, strays = nodes.find_plugins((), found.pods, kubelet_root)
    return {
        name: nodes.node_state(
            by_name[name],
            plugins=stock.plugins,
            strays=strays,
            slices=found.slices,
            uses=stock.pods,
            claims=found.claims,
            pods=pods,
        )
        if name in by_name
        else nodes.NodeState(name, exists=False)
        for name in names
    }


@dataclass(frozen=True)
class NodeReading:
    """The state of a node, with the objects from which it was read.

    ``services`` are the DeviceClasses of its resources, ``sets`` all DaemonSets, ``claims`` the namespaces and names of the
    claims on the node, and ``item`` the Node object.
    """

    node: nodes.NodeState
    services: Mapping[str, Service]
    sets: tuple[Json, ...]
    claims: tuple[tuple[str, str], ...] = ()
    item: Json | None = None


def read_node(
    api: Api, name: str, *, direction: str, kubelet_root: str, known: NodeReading | None = None
) -> NodeReading:
    """Read the state of one node. Raises ApiError.

    With ``known``, it does not list DaemonSets, classes, and claims. It uses the known DaemonSets, and reads the known claims by name.
    """
    item = found_or_none(api, f"/api/v1/nodes/{quote(name, safe='')}")
    sets = known.sets if known else tuple(api.list_all(SETS, {}))
    if item is None:
        return NodeReading(nodes.NodeState(name, exists=False), {}, sets)
    pods = tuple(api.list_all("/api/v1/pods", {"fieldSelector": f"spec.nodeName={name}"}))
    objects = dra_objects(api, node=name, held=known.claims if known else None)
    found = Cluster(nodes=(item,), pods=pods, workloads={"DaemonSet": sets}, **objects)
    stock = build_inventory(found, direction=direction, kubelet_root=kubelet_root)
    claims = tuple((each["metadata"]["namespace"], each["metadata"]["name"]) for each in found.claims)
    return NodeReading(node_states(found, stock, [name], kubelet_root)[name], stock.services, sets, claims, item)


def report(found: Cluster, stock: Inventory, plans: Mapping[str, nodes.Plan], blocked: Sequence[str]) -> dict[str, Any]:
    """Return the result of the module device_plugin_migration_info."""
    return {
        "pods": [each.document(stock.becomes) for each in sorted(stock.pods, key=lambda one: one.key)],
        "workloads": list(stock.workloads),
        "quotas": list(stock.quotas),
        "limit_ranges": list(stock.limit_ranges),
        "resources": {
            name: {"device_class": each.device_class, "exists": each.exists, "becomes": each.text}
            for name, each in stock.services.items()
        },
        "plugins": [
            {
                "namespace": each.namespace,
                "name": each.name,
                "managed": each.ours,
                "nodes": sorted(each.nodes),
                "way": each.way,
                "label": each.label,
                "owner": each.owner,
                "kept_off": each.excludes,
            }
            for each in stock.plugins
        ],
        "nodes": {name: plan.document() for name, plan in plans.items()},
        "blocked": list(blocked),
        "leftovers": leftovers(found, stock),
        "counts": {
            "pods": len(stock.pods),
            "by_plugin": sum(each.way == PLUGIN for each in stock.pods),
            "by_claims": sum(each.way == CLAIMS for each in stock.pods),
        },
    }


def leftovers(found: Cluster, stock: Inventory) -> list[str]:
    """Return the leftovers of an interrupted run, and of deleted nodes. No side effects."""
    marked = [
        each["metadata"]["name"]
        for each in found.nodes
        if (each["metadata"].get("labels") or {}).get(nodes.KEPT_OFF) == nodes.OFF
    ]
    lines = [
        f"Node {item['metadata']['name']} has the taint {nodes.TAINT}={each.get('value', '')}. Its migration is in progress, or was "
        "interrupted. Run the playbook again for this node."
        for item in found.nodes
        for each in (item.get("spec") or {}).get("taints") or ()
        if each.get("key") == nodes.TAINT
    ]
    lines += [
        f"DaemonSet {plugin.key} excludes nodes with the label {nodes.KEPT_OFF}={nodes.OFF}, and no node has this label. The module "
        "device_plugin_migration with state absent removes this rule."
        for plugin in stock.plugins
        if plugin.excludes and not marked
    ]
    return lines


def read_gate(api: Api) -> dict[str, Any]:
    """Return whether the API server keeps the extended resource of a class, according to a dry run, which stores nothing."""
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": PROBE},
        "spec": {"extendedResourceName": "example.com/probe"},
    }
    try:
        answer = api.request("POST", f"{DRA}/deviceclasses", query={"dryRun": "All"}, body=body)
    except ApiError as error:
        if error.status == 0:
            raise
        return {"kept": False, "problem": str(error)}
    kept = bool((answer.get("spec") or {}).get("extendedResourceName"))
    return {
        "kept": kept,
        "problem": ""
        if kept
        else "The API server drops extendedResourceName, because the feature gate DRAExtendedResource is off. Enable it for the API server, "
        "the scheduler, the controller manager, and the kubelets. It is on by default since Kubernetes 1.36.",
    }
