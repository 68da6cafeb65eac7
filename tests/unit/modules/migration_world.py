# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A model of a cluster for the migration from device plugins to claims: its API without a network, its controllers, and kubelets."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

from ansible_collections.dra.accelerators.plugins.module_utils._kubernetes.client import ApiError
from ansible_collections.dra.accelerators.plugins.module_utils._migration import node_plan as nodes

Json = dict[str, Any]
GPU, MIG = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
FOLDER = [{"name": "plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins/"}}]


def node(name: str, offered: Mapping[str, Any] | None = None, labels: Json | None = None, **status: Any) -> Json:
    there = {key: str(value) for key, value in (offered or {}).items()}
    metadata = {"name": name, "labels": labels or {}, "annotations": {}, "resourceVersion": "1"}
    return {"metadata": metadata, "spec": {}, "status": {"allocatable": there, "capacity": dict(there), **status}}


def pod(
    name: str,
    resources: Json | None = None,
    *,
    on: str = "",
    owner: tuple[str, str] | None = ("ReplicaSet", "rs"),
    namespace: str = "default",
    resources_from_claims: tuple[str, ...] = (),
    phase: str = "Running",
    **spec: Any,
) -> Json:
    references = [{"kind": owner[0], "name": owner[1], "uid": f"uid-{owner[1]}", "controller": True}] if owner else []
    status: Json = {"phase": phase}
    if resources_from_claims:
        mappings = [
            {"containerName": "main", "resourceName": each, "requestName": "r"} for each in resources_from_claims
        ]
        status["extendedResourceClaimStatus"] = {"resourceClaimName": f"{name}-claim", "requestMappings": mappings}
    return {
        "metadata": {
            "namespace": namespace,
            "name": name,
            "uid": f"uid-{namespace}-{name}",
            "ownerReferences": references,
        },
        "spec": {
            "nodeName": on,
            "containers": [{"name": "main", "resources": {"limits": dict(resources or {})}}],
            **spec,
        },
        "status": status,
    }


def daemon_set(name: str, *, namespace: str = "kube-system", **template: Any) -> Json:
    spec = {"containers": [], "volumes": FOLDER, **template}
    metadata = {"namespace": namespace, "name": name, "uid": f"uid-{name}", "resourceVersion": "1"}
    return {"metadata": metadata, "spec": {"template": {"spec": spec}}}


def plugin_pod(of: str, on: str, namespace: str = "kube-system") -> Json:
    return pod(f"{of}-{on}", on=on, owner=("DaemonSet", of), namespace=namespace, volumes=FOLDER)


def slices(name: str, devices: int = 8, *, count: int = 1, driver: str = "gpu.nvidia.com") -> Json:
    pool = {"name": name, "generation": 1, "resourceSliceCount": count}
    spec = {
        "driver": driver,
        "nodeName": name,
        "pool": pool,
        "devices": [{"name": f"gpu-{each}"} for each in range(devices)],
    }
    return {"metadata": {"name": f"slice-{name}"}, "spec": spec}


def claim(name: str, on: str, *pods: Json, made: bool = False) -> Json:
    noted = {"resource.kubernetes.io/extended-resource-claim": "true"} if made else {}
    results = [{"request": "r", "driver": "gpu.nvidia.com", "pool": on, "device": "gpu-0"}]
    reserved = [{"resource": "pods", "name": each["metadata"]["name"], "uid": each["metadata"]["uid"]} for each in pods]
    return {
        "metadata": {"namespace": "default", "name": name, "annotations": noted},
        "status": {"allocation": {"devices": {"results": results}}, "reservedFor": reserved},
    }


def device_class(name: str, resource: str = "", *, ours: bool = True, created: str = "2026-01-01T00:00:00Z") -> Json:
    labels = {nodes.MANAGED_BY: nodes.OURS} if ours else {}
    spec = {"selectors": [{"cel": {"expression": "true"}}], **({"extendedResourceName": resource} if resource else {})}
    return {
        "metadata": {"name": name, "labels": labels, "creationTimestamp": created, "resourceVersion": "1"},
        "spec": spec,
    }


def merged(target: Any, patch: Any) -> Any:
    """Return the result of a merge patch on a document."""
    if not isinstance(patch, Mapping):
        return copy.deepcopy(patch)
    found = dict(target) if isinstance(target, Mapping) else {}
    for key, value in patch.items():
        if value is None:
            found.pop(key, None)
        else:
            found[key] = merged(found.get(key), value)
    return found


class World:
    """The API. ``tick`` runs the controllers and kubelets. ``writes`` has methods and paths, without dry runs."""

    def __init__(self, **kinds: list[Json]) -> None:
        self.kinds: dict[str, list[Json]] = {
            kind: copy.deepcopy(kinds.get(kind, []))
            for kind in (
                "nodes",
                "pods",
                "daemonsets",
                "deployments",
                "replicasets",
                "jobs",
                "cronjobs",
                "resourcequotas",
                "limitranges",
                "deviceclasses",
                "resourceslices",
                "resourceclaims",
                "statefulsets",
                "replicationcontrollers",
            )
        }
        self.writes: list[tuple[str, str]] = []
        #: The kinds of the lists, in order.
        self.lists: list[str] = []
        self.budget: dict[str, int] = {}
        self.minor = "37"
        self.conflicts = 0
        self.drops_names = False
        self.now = 0.0
        self.offers: dict[str, Json] = {
            each["metadata"]["name"]: dict(each["status"]["allocatable"]) for each in self.kinds["nodes"]
        }

    # Requests of a module

    def list_all(
        self, path: str, query: Mapping[str, str], keep: Callable[[Json], Any] = lambda item: item
    ) -> list[Any]:
        items = self.kinds[path.rpartition("/")[2]]
        self.lists.append(path.rpartition("/")[2])
        field, label = query.get("fieldSelector", ""), query.get("labelSelector", "")
        if field:
            value = field.partition("=")[2]
            items = [each for each in items if each["spec"].get("nodeName") == value]
        if label:
            key, _equals, value = label.partition("=")
            items = [each for each in items if (each["metadata"].get("labels") or {}).get(key) == value]
        return [kept for kept in map(keep, copy.deepcopy(items)) if kept is not None]

    def find(self, kind: str, name: str) -> Json:
        for each in self.kinds[kind]:
            if each["metadata"]["name"] == name:
                return each
        raise ApiError(f"{name} not found", status=404, reason="NotFound")

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        repeat: bool = True,
    ) -> Json:
        dry = "dryRun" in (query or {}) or "dryRun" in (body or {})
        if method != "GET" and not dry:
            self.writes.append((method, path))
        if path == "/version":
            return {"minor": self.minor}
        if path.endswith("/eviction"):
            return self._evict(path, body or {})
        if path in ("/apis/resource.k8s.io", "/apis/resource.k8s.io/v1"):
            return {"versions": [{"version": "v1"}]}
        found = re.fullmatch(r".*/(nodes|daemonsets|deviceclasses|resourceclaims)(?:/([^/]+))?(/status)?", path)
        assert found is not None, path
        kind, name, _status = found.groups()
        if method == "POST":
            return self._create(kind, body or {}, dry)
        there = self.find(kind, name)
        if method == "GET":
            return copy.deepcopy(there)
        if method == "DELETE":
            if not dry:
                self.kinds[kind].remove(there)
            return {}
        made = merged(there, body) if content_type.startswith("application/merge") else copy.deepcopy(body or {})
        self._check_version(body or {}, there)
        made["metadata"]["resourceVersion"] = str(int(there["metadata"]["resourceVersion"]) + 1)
        if not dry:
            self.kinds[kind][self.kinds[kind].index(there)] = made
        return copy.deepcopy(made)

    def _check_version(self, body: Json, there: Json) -> None:
        wanted = (body.get("metadata") or {}).get("resourceVersion")
        if self.conflicts:
            self.conflicts -= 1
            raise ApiError("another client has written it", status=409)
        if wanted not in (None, there["metadata"]["resourceVersion"]):
            raise ApiError("it has another version", status=409)

    def _create(self, kind: str, body: Json, dry: bool) -> Json:
        made = copy.deepcopy(body)
        made["metadata"]["resourceVersion"] = "1"
        if self.drops_names:
            made["spec"].pop("extendedResourceName", None)
        if not dry:
            self.kinds[kind].append(made)
        return made

    def _evict(self, path: str, body: Json) -> Json:
        name = path.split("/")[-2]
        if self.budget.get(name, 0) > 0:
            self.budget[name] -= 1
            raise ApiError(
                "Cannot evict pod as it would violate the pod's disruption budget.",
                status=429,
                causes=["DisruptionBudget"],
            )
        found = self.find("pods", name)
        assert body["deleteOptions"]["preconditions"]["uid"] == found["metadata"]["uid"]
        found["metadata"]["deletionTimestamp"] = "now"
        return {}

    # Changes by controllers and kubelets

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.tick()

    def clock(self) -> float:
        return self.now

    def tick(self) -> None:
        """Delete evicted pods and their reservations, place DaemonSets by labels, and publish the resources of the nodes' plugins."""
        gone = {each["metadata"]["uid"] for each in self.kinds["pods"] if each["metadata"].get("deletionTimestamp")}
        self.kinds["pods"] = [each for each in self.kinds["pods"] if each["metadata"]["uid"] not in gone]
        for each in self.kinds["resourceclaims"]:
            users = each["status"]["reservedFor"]
            each["status"]["reservedFor"] = [one for one in users if one["uid"] not in gone]
        for item in self.kinds["nodes"]:
            self._of_node(item)

    def _of_node(self, item: Json) -> None:
        name, labels = item["metadata"]["name"], item["metadata"].get("labels") or {}
        tainted = any(each["key"] == nodes.TAINT for each in item["spec"].get("taints") or ())
        serving = labels.get(nodes.INTERFACE) == nodes.BY_PLUGIN
        for each in self.kinds["daemonsets"]:
            spec, own = each["spec"]["template"]["spec"], f"{each['metadata']['name']}-{name}"
            kept = nodes.excludes(spec) and labels.get(nodes.KEPT_OFF) == nodes.OFF
            kept = kept or any(labels.get(key) != value for key, value in (spec.get("nodeSelector") or {}).items())
            there = [one for one in self.kinds["pods"] if one["metadata"]["name"] == own]
            if kept:
                self.kinds["pods"] = [one for one in self.kinds["pods"] if one not in there]
            elif not there and not tainted:
                self.kinds["pods"].append(plugin_pod(each["metadata"]["name"], name))
            serving = serving or (not kept and (bool(there) or not tainted))
        for key, number in self.offers[name].items():
            if key in item["status"]["allocatable"]:
                item["status"]["allocatable"][key] = number if serving else "0"
