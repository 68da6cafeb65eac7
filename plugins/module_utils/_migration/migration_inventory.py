# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Find the pods, workloads, quotas, and plugins of a cluster that use device plugins, and the effect of a migration on each. No side effects.

Facts: kubernetes/kubernetes v1.37.0, pkg/scheduler/framework/plugins/dynamicresources (which pods get a claim, and where) and
pkg/quota/v1/evaluator/core (what counts in which quota).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..core.dra.extended_resources import SHARED
from ..core.quantity import parse
from .resource_names import meaning

Json = Mapping[str, Any]

#: The source of a pod's devices: a device plugin, or claims. A pending pod waits, and an ended pod is done.
PLUGIN, CLAIMS, WAITS, DONE = "plugin", "claims", "waits", "done"
#: The annotation of static pods, which a kubelet creates without the scheduler.
MIRROR = "kubernetes.io/config.mirror"
SCHEDULER = "default-scheduler"
#: The maximum number of devices of one claim. The scheduler creates one claim for all resources of a pod.
MOST_DEVICES = 32
#: The end of a quota entry that counts the devices of a class, and the entry that counts claims.
PER_CLASS = ".deviceclass.resource.k8s.io/devices"
CLAIM_COUNT = "count/resourceclaims.resource.k8s.io"
_REQUESTS = "requests."
_LIMITS = ("max", "min", "default", "defaultRequest", "maxLimitRequestRatio")
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Problem:
    """A problem to report. If ``blocks`` is true, the user must solve the problem, or accept its code."""

    code: str
    text: str
    remedy: str = ""
    blocks: bool = False

    def document(self) -> dict[str, Any]:
        """Return the problem in the form of the modules' results."""
        return {"code": self.code, "text": self.text, "remedy": self.remedy, "blocks": self.blocks}


@dataclass(frozen=True)
class PodUse:
    """A pod that requests resources of device plugins.

    ``way`` is the source of its devices, such as PLUGIN. ``by_plugin`` are the resources that a device plugin provides.
    """

    namespace: str
    name: str
    uid: str
    node: str
    way: str
    owner: str
    resources: Mapping[str, int]
    by_plugin: frozenset[str]
    deleting: bool = False
    problems: tuple[Problem, ...] = ()

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"

    def document(self, becomes: Mapping[str, str]) -> dict[str, Any]:
        """Return the pod in the form of the modules' results. ``becomes`` is the effect of the migration on each resource."""
        return {
            "namespace": self.namespace,
            "name": self.name,
            "node": self.node,
            "way": self.way,
            "owner": self.owner,
            "resources": dict(self.resources),
            "becomes": {each: becomes[each] for each in self.resources},
            "problems": [each.document() for each in self.problems],
        }


@dataclass(frozen=True)
class Plugin:
    """A DaemonSet whose pods serve the kubelet's device-plugin API.

    ``ours`` is true if this collection manages it. ``way`` is the method that keeps its pods off a node: AFFINITY, LABEL
    (``label``, which its operator reads), or NO_METHOD. ``nodes`` are the nodes with one of its pods. ``excludes`` is true
    if its affinity already excludes nodes with the label of this collection.
    """

    namespace: str
    name: str
    ours: bool
    way: str
    label: str
    owner: str
    nodes: frozenset[str]
    excludes: bool = False

    @property
    def key(self) -> str:
        """Namespace and name."""
        return f"{self.namespace}/{self.name}"


AFFINITY, LABEL, NO_METHOD = "affinity", "label", "none"


@dataclass(frozen=True)
class Service:
    """The DeviceClass that provides a resource through claims: an existing class, or a class to create.

    ``problem`` is the reason why claims cannot provide the resource. It is empty if they can.
    """

    resource: str
    device_class: str = ""
    exists: bool = False
    problem: str = ""

    @property
    def text(self) -> str:
        """Return the effect of the migration on the resource, as text."""
        if self.problem:
            return self.problem
        origin = "exists" if self.exists else "the migration creates"
        return f"unchanged in the pod. The DeviceClass {self.device_class}, which {origin}, provides it"


@dataclass(frozen=True)
class Inventory:
    """All objects of a cluster that use device plugins."""

    pods: tuple[PodUse, ...] = ()
    workloads: tuple[dict[str, Any], ...] = ()
    quotas: tuple[dict[str, Any], ...] = ()
    limit_ranges: tuple[dict[str, Any], ...] = ()
    plugins: tuple[Plugin, ...] = ()
    services: Mapping[str, Service] = field(default_factory=dict)

    @property
    def becomes(self) -> dict[str, str]:
        """Return the effect of the migration on each resource, as text."""
        return {name: each.text for name, each in self.services.items()}


def requested_amounts(spec: Json) -> dict[str, int]:
    """Return the amount of each known resource that a pod requests, as the scheduler computes it.

    Init containers run one after the other. Sidecars (init containers that always restart) run together with later containers.
    """
    total: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        own = _container_amounts(container)
        is_sidecar = container.get("restartPolicy") == "Always"
        if is_sidecar:
            for name, number in own.items():
                total[name] = total.get(name, 0) + number
        for name in {*own, *total}:
            peak[name] = max(peak.get(name, 0), total.get(name, 0) + (0 if is_sidecar else own.get(name, 0)))
    for container in spec.get("containers") or ():
        for name, number in _container_amounts(container).items():
            total[name] = total.get(name, 0) + number
    found = {name: max(total.get(name, 0), peak.get(name, 0)) for name in {*total, *peak}}
    return {name: found[name] for name in sorted(found) if found[name] > 0}


def _container_amounts(container: Json) -> dict[str, int]:
    resources = container.get("resources") or {}
    # The request of an extended resource equals its limit. The API server sets a missing one of the two.
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {str(name): int(parse(value)) for name, value in asked.items() if meaning(str(name)) is not None}


def resources_from_claims(pod: Json) -> frozenset[str]:
    """Return the resources for which a pod has devices from the claim that the scheduler created for it."""
    status = (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}
    return frozenset(str(each.get("resourceName", "")) for each in status.get("requestMappings") or ())


def pod_use(pod: Json, owner_of: Callable[[Json], str], taint: Json | None = None) -> PodUse | None:
    """Return how a pod uses known resources, or None if it uses none. ``taint`` is the taint of a node during its migration."""
    spec, metadata, status = pod.get("spec") or {}, pod["metadata"], pod.get("status") or {}
    asked = requested_amounts(spec)
    if not asked:
        return None
    node = str(spec.get("nodeName") or "")
    by_plugin = frozenset(asked) - resources_from_claims(pod)
    way = CLAIMS if not by_plugin else PLUGIN
    if status.get("phase") in _ENDED:
        way = DONE
    elif not node:
        way = WAITS
    return PodUse(
        namespace=str(metadata["namespace"]),
        name=str(metadata["name"]),
        uid=str(metadata.get("uid", "")),
        node=node,
        way=way,
        owner=owner_of(metadata),
        resources=asked,
        by_plugin=by_plugin if way == PLUGIN else frozenset(),
        deleting=bool(metadata.get("deletionTimestamp")),
        problems=() if way == DONE else tuple(_problems_of_pod(pod, asked, taint)),
    )


def _problems_of_pod(pod: Json, asked: Mapping[str, int], taint: Json | None) -> Iterable[Problem]:
    metadata, spec = pod["metadata"], pod.get("spec") or {}
    yield from problems_of_spec(spec, asked)
    if MIRROR in (metadata.get("annotations") or {}):
        yield Problem(
            "static-pod",
            "It is a static pod. The scheduler creates no claim for it, and it cannot be evicted.",
            "Remove its manifest from the node, and create the pod with a DaemonSet or a Deployment.",
            blocks=True,
        )
    elif not any(each.get("controller") for each in metadata.get("ownerReferences") or ()):
        yield Problem(
            "no-controller",
            "It has no controller that creates a replacement.",
            "Keep its manifest, and allow its eviction (evict_unmanaged).",
        )
    if taint is not None and tolerates(spec, taint):
        yield Problem(
            "comes-back",
            f"It tolerates the taint {taint['key']}. During the migration, its controller can create another pod on the node.",
            "Scale it down during the migration, or remove the toleration without a key.",
            blocks=True,
        )


def problems_of_spec(spec: Json, asked: Mapping[str, int]) -> list[Problem]:
    """Return the problems that prevent claims from serving an unchanged pod template."""
    found = []
    shared = [name for name in asked if _kind(name) == SHARED]
    if shared:
        found.append(
            Problem(
                "shared-resource",
                f"{', '.join(shared)}: no DeviceClass can provide replicas of a device under a resource name.",
                "Share devices in the layout (shares) and claim a share in each pod, or claim a whole device or a partition.",
                blocks=True,
            )
        )
    scheduler = str(spec.get("schedulerName") or SCHEDULER)
    if scheduler != SCHEDULER:
        found.append(
            Problem(
                "other-scheduler",
                f"Its scheduler is {scheduler}, which must create claims for resources as {SCHEDULER} does.",
                "Verify that this scheduler provides extended resources through DeviceClasses (DRAExtendedResource).",
                blocks=True,
            )
        )
    if sum(asked.values()) > MOST_DEVICES:
        found.append(
            Problem(
                "too-many-devices",
                f"It requests {sum(asked.values())} devices, and a claim has {MOST_DEVICES} at most.",
                "Split the pod.",
                blocks=True,
            )
        )
    return found


def _kind(resource: str) -> str:
    found = meaning(resource)
    return found.kind if found else ""


def tolerates(spec: Json, taint: Json) -> bool:
    """Return whether a pod tolerates a taint of a node."""
    for each in spec.get("tolerations") or ():
        if each.get("effect") and each["effect"] != taint["effect"]:
            continue
        if each.get("operator") == "Exists":
            if not each.get("key") or each["key"] == taint["key"]:
                return True
        elif each.get("key") == taint["key"] and (each.get("value") or "") == (taint.get("value") or ""):
            return True
    return False


def owner_lookup(objects: Iterable[Json]) -> Callable[[Json], str]:
    """Return a function for the owner of a pod: the top controller as kind and name. ``objects`` are ReplicaSets and Jobs."""
    above = {str(each["metadata"].get("uid", "")): controller(each["metadata"]) for each in objects}

    def owner_of(metadata: Json) -> str:
        first = controller(metadata)
        if first is None:
            return ""
        last = above.get(str(first.get("uid", ""))) or first
        return f"{last.get('kind', '')}/{last.get('name', '')}"

    return owner_of


def controller(metadata: Json) -> Json | None:
    """Return the owner reference to an object's controller, or None without a controller."""
    return next((each for each in metadata.get("ownerReferences") or () if each.get("controller")), None)


def workload_facts(kind: str, item: Json, becomes: Callable[[str], str]) -> dict[str, Any] | None:
    """Return the facts of a workload whose pods request known resources. Return None for other workloads.

    None is also returned for ReplicaSets and Jobs with a controller, because the controller is a workload itself.
    """
    metadata, spec = item["metadata"], item.get("spec") or {}
    if controller(metadata) is not None and kind in ("ReplicaSet", "Job"):
        return None
    template = ((spec.get("jobTemplate") or {}).get("spec") or {}) if kind == "CronJob" else spec
    pod = (template.get("template") or {}).get("spec") or {}
    asked = requested_amounts(pod)
    if not asked:
        return None
    return {
        "kind": kind,
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "replicas": spec.get("replicas"),
        "resources": asked,
        "becomes": {each: becomes(each) for each in asked},
        "problems": [each.document() for each in problems_of_spec(pod, asked)],
    }


def find_services(resources: Iterable[str], classes: Sequence[Json]) -> dict[str, Service]:
    """Return the DeviceClass for each resource. The newest class with the resource's name counts, as for the scheduler."""
    explicit: dict[str, Json] = {}
    for each in sorted(classes, key=_scheduler_order):
        wanted = (each.get("spec") or {}).get("extendedResourceName")
        if wanted:
            explicit[str(wanted)] = each
    found = {}
    for name in sorted(set(resources)):
        known = meaning(name)
        there = explicit.get(name)
        if there is not None:
            found[name] = Service(name, str(there["metadata"]["name"]), exists=True)
        elif known is None or known.kind == SHARED:
            replica = f", because it is a replica of {known.of}" if known else ""
            found[name] = Service(name, problem=f"not available through claims{replica}")
        else:
            found[name] = Service(name, known.device_class)
    return found


def _scheduler_order(item: Json) -> tuple[str, list[int]]:
    """Return a sort key. The last class in this order counts: the newest one, and of equally old ones the first by name."""
    name = str(item["metadata"]["name"])
    return str(item["metadata"].get("creationTimestamp", "")), [-ord(letter) for letter in name]


def quota_facts(quota: Json, services: Mapping[str, Service], by_plugin: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the effect of the migration on the entries of a ResourceQuota that count devices, or None without such entries.

    ``by_plugin`` contains the number of devices that the pods of its namespace have from device plugins, by resource. The
    key "" contains the number of these pods.
    """
    metadata, spec = quota["metadata"], quota.get("spec") or {}
    used: Json = (quota.get("status") or {}).get("used") or {}
    classes = {each.device_class: each for each in services.values() if each.device_class}
    entries, problems = [], []
    for name, hard in sorted((spec.get("hard") or {}).items()):
        resource = name[len(_REQUESTS) :] if name.startswith(_REQUESTS) else ""
        additional = 0
        if meaning(resource) is not None:
            service = services.get(resource) or find_services([resource], ())[resource]
            text = (
                f"{service.problem}. The entry still limits the pods that request the resource"
                if service.problem
                else f"still counts pods. It also counts claims of the class {service.device_class} that users create. "
                f"To limit only claims, add {service.device_class}{PER_CLASS}: {hard}"
            )
        elif name.endswith(PER_CLASS) and name[: -len(PER_CLASS)] in classes:
            served = classes[name[: -len(PER_CLASS)]]
            additional = by_plugin.get(served.resource, 0)
            text = f"also counts the devices of unchanged pods with {served.resource}, because the scheduler creates claims for them"
        elif name == CLAIM_COUNT:
            additional = by_plugin.get("", 0)
            text = "counts one additional claim for each pod that requests a resource"
        else:
            continue
        entries.append({"entry": name, "hard": str(hard), "used": str(used.get(name, "0")), "becomes": text})
        if additional and parse(used.get(name, "0")) + additional > parse(hard):
            problems.append(
                Problem(
                    "quota",
                    f"{name} is {hard}, and {used.get(name, '0')} are used. The pods with devices from a plugin need {additional} more.",
                    "Increase it. Otherwise the API server rejects the scheduler's claims, and the pods stay pending.",
                    blocks=True,
                )
            )
    if not entries:
        return None
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "entries": entries,
        "problems": [each.document() for each in problems],
    }


def limit_range_facts(item: Json) -> dict[str, Any] | None:
    """Return the facts of a LimitRange that limits known resources, or None for other LimitRanges."""
    found = {
        str(name)
        for each in (item.get("spec") or {}).get("limits") or ()
        for key in _LIMITS
        for name in each.get(key) or {}
        if meaning(str(name)) is not None
    }
    if not found:
        return None
    return {
        "namespace": item["metadata"]["namespace"],
        "name": item["metadata"]["name"],
        "resources": sorted(found),
        "becomes": "still limits pods. It does not limit claims that users create",
    }
