# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Reads a cluster's use of device plugins, for a report of the whole cluster and for one node. Changes nothing."""

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
from .migration_inventory import CLAIMS, PLUGIN, Inventory, Json, Service, Use
from .resource_names import DRIVERS, meaning

DRA = f"/apis/{GROUP}/v1"
SETS = "/apis/apps/v1/daemonsets"
#: Whose templates make pods.
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
    """Objects as the API server sent them. ``workloads`` go by their kind."""

    nodes: tuple[Json, ...] = ()
    pods: tuple[Json, ...] = ()
    workloads: Mapping[str, Sequence[Json]] = field(default_factory=dict)
    quotas: tuple[Json, ...] = ()
    limit_ranges: tuple[Json, ...] = ()
    classes: tuple[Json, ...] = ()
    slices: tuple[Json, ...] = ()
    claims: tuple[Json, ...] = ()


def ask(api: Api) -> Cluster:
    """Ask for everything. Raises ApiError."""

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
    api: Api, *, slices: str = "", held: Iterable[tuple[str, str]] | None = None
) -> dict[str, tuple[Json, ...]]:
    """Return classes, slices and claims; nothing of them where the API server serves none. Raises ApiError.

    With ``held``, it reads the claims with these namespaces and names, and no classes, instead of listing both.
    """
    if "v1" not in group_versions(api, GROUP):
        return {}
    selected = {"fieldSelector": f"spec.nodeName={slices}"} if slices else {}
    found = tuple(api.list_all(f"{DRA}/resourceslices", selected, without_managed_fields))
    pools = {each["spec"]["pool"]["name"] for each in found} | {slices}

    def claim(item: dict[str, Any]) -> Json | None:
        mine = (one for one in results(item) if one.get("driver") in DRIVERS)
        return without_managed_fields(item) if any(not slices or one.get("pool") in pools for one in mine) else None

    if held is not None:
        paths = (f"{DRA}/namespaces/{quote(space)}/resourceclaims/{quote(one)}" for space, one in held)
        read = (found_or_none(api, path) for path in paths)
        return {"slices": found, "claims": tuple(each for each in read if each is not None)}
    return {
        "classes": tuple(api.list_all(f"{DRA}/deviceclasses", {})),
        "slices": found,
        "claims": tuple(api.list_all(f"{DRA}/resourceclaims", {}, claim)),
    }


def take_stock(found: Cluster, *, direction: str, kubelet_root: str) -> Inventory:
    """Return the objects of a cluster by their role in the migration. Has no side effects."""
    workloads = found.workloads
    owner_of = inventory.owners(each for kind in _OWNERS for each in workloads.get(kind, ()))
    taint = nodes.taint_of(direction)
    uses = tuple(use for use in (inventory.use_of(pod, owner_of, taint) for pod in found.pods) if use is not None)
    plugins, _strays = nodes.plugins_of(workloads.get("DaemonSet", ()), found.pods, kubelet_root)
    asked = {name for use in uses for name in use.resources} | offered_names(found.nodes)
    specs = [_pod_spec(kind, each) for kind, items in workloads.items() for each in items]
    asked |= {name for spec in specs for name in inventory.amounts(spec)}
    services = inventory.services_of(asked, found.classes)
    texts = {name: each.text for name, each in services.items()}
    return Inventory(
        pods=uses,
        workloads=_all(
            inventory.workload_of(kind, each, texts.__getitem__) for kind, items in workloads.items() for each in items
        ),
        quotas=_all(
            inventory.quota_of(each, services, _by_plugin(uses, str(each["metadata"]["namespace"])))
            for each in found.quotas
        ),
        limit_ranges=_all(inventory.limit_range_of(each) for each in found.limit_ranges),
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


def _by_plugin(uses: Iterable[Use], namespace: str) -> dict[str, int]:
    counted: Counter[str] = Counter()
    for use in uses:
        if use.namespace == namespace and use.way == PLUGIN:
            counted[""] += 1
            counted.update({name: number for name, number in use.resources.items() if name in use.by_plugin})
    return dict(counted)


def offered_names(items: Iterable[Json]) -> set[str]:
    """Return the known resources that Nodes name; pure."""
    return {
        str(name)
        for each in items
        for name in (each.get("status") or {}).get("allocatable") or {}
        if meaning(str(name)) is not None
    }


def views(found: Cluster, stock: Inventory, names: Sequence[str], kubelet_root: str) -> dict[str, nodes.Node]:
    """Return the known state of nodes by name, also for names without a Node. Has no side effects."""
    by_name = {str(each["metadata"]["name"]): each for each in found.nodes}
    pods = {(str(each["metadata"]["namespace"]), str(each["metadata"]["name"])): each for each in found.pods}
    _plugins, strays = nodes.plugins_of((), found.pods, kubelet_root)
    return {
        name: nodes.node_of(
            by_name[name],
            plugins=stock.plugins,
            strays=strays,
            slices=found.slices,
            uses=stock.pods,
            claims=found.claims,
            pods=pods,
        )
        if name in by_name
        else nodes.Node(name, exists=False)
        for name in names
    }


@dataclass(frozen=True)
class NodeReading:
    """A node, what serves its resources, the DaemonSets, namespaces and names of the claims on the node, and the Node object."""

    node: nodes.Node
    services: Mapping[str, Service]
    sets: tuple[Json, ...]
    claims: tuple[tuple[str, str], ...] = ()
    item: Json | None = None


def read_node(
    api: Api, name: str, *, direction: str, kubelet_root: str, known: NodeReading | None = None
) -> NodeReading:
    """Read the state of one node. Raises ApiError.

    With ``known``, it lists no DaemonSets, classes, and claims: it takes the known DaemonSets, and reads the known claims by name.
    """
    item = found_or_none(api, f"/api/v1/nodes/{quote(name, safe='')}")
    sets = known.sets if known else tuple(api.list_all(SETS, {}))
    if item is None:
        return NodeReading(nodes.Node(name, exists=False), {}, sets)
    pods = tuple(api.list_all("/api/v1/pods", {"fieldSelector": f"spec.nodeName={name}"}))
    objects = dra_objects(api, slices=name, held=known.claims if known else None)
    found = Cluster(nodes=(item,), pods=pods, workloads={"DaemonSet": sets}, **objects)
    stock = take_stock(found, direction=direction, kubelet_root=kubelet_root)
    claims = tuple((each["metadata"]["namespace"], each["metadata"]["name"]) for each in found.claims)
    return NodeReading(views(found, stock, [name], kubelet_root)[name], stock.services, sets, claims, item)


def report(found: Cluster, stock: Inventory, plans: Mapping[str, nodes.Plan], blocked: Sequence[str]) -> dict[str, Any]:
    """Return everything as the module does; pure."""
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
        f"Node {item['metadata']['name']} has the taint {nodes.TAINT}={each.get('value', '')}: it is on its way, or a run was cut short "
        "there. Run the playbook again for it."
        for item in found.nodes
        for each in (item.get("spec") or {}).get("taints") or ()
        if each.get("key") == nodes.TAINT
    ]
    lines += [
        f"DaemonSet {plugin.key} is kept off nodes with the label {nodes.KEPT_OFF}={nodes.OFF}, and no node has it. The module "
        "device_plugin_migration with state absent removes this rule."
        for plugin in stock.plugins
        if plugin.excludes and not marked
    ]
    return lines


def gate_is_on(api: Api) -> dict[str, Any]:
    """Learn by a dry run whether the API server keeps the extended resource of a class; nothing is stored."""
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
        else "The API server drops extendedResourceName: the feature gate DRAExtendedResource is off. It has to be on for API server, "
        "scheduler, controller manager and kubelets; from Kubernetes 1.36 on it is on by default.",
    }
