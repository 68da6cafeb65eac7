# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors

# This file is private to the collection: it can change in any release.
"""Inventory of a cluster's use of device plugins: pods, workloads, quotas, plugins, and the result of a migration for each. No side effects.

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

#: How a pod gets its devices.
PLUGIN, CLAIMS, WAITS, DONE = "plugin", "claims", "waits", "done"
MIRROR = "kubernetes.io/config.mirror"
SCHEDULER = "default-scheduler"
#: The most devices of one claim, which is what all resources of a pod become.
MOST_DEVICES = 32
PER_CLASS = ".deviceclass.resource.k8s.io/devices"
CLAIM_COUNT = "count/resourceclaims.resource.k8s.io"
_REQUESTS = "requests."
_LIMITS = ("max", "min", "default", "defaultRequest", "maxLimitRequestRatio")
_ENDED = ("Succeeded", "Failed")


@dataclass(frozen=True)
class Problem:
    """A problem to report. One that ``blocks`` must be accepted by its code, or solved."""

    code: str
    text: str
    remedy: str = ""
    blocks: bool = False

    def document(self) -> dict[str, Any]:
        """Return it as a module does."""
        return {"code": self.code, "text": self.text, "remedy": self.remedy, "blocks": self.blocks}


@dataclass(frozen=True)
class Use:
    """A pod that asks for resources of a device plugin; ``by_plugin`` is what of them it has from one."""

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
        """Return it as a module does."""
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

    ``way`` is the method that keeps it off a node: its affinity, a label that its operator uses, or none. ``nodes`` are those with a pod of it.
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


AFFINITY, LABEL, NOWAY = "affinity", "label", "none"


@dataclass(frozen=True)
class Service:
    """The DeviceClass that provides a resource through claims: an existing one, or one to create. ``why_not`` is the reason why neither is possible."""

    resource: str
    device_class: str = ""
    exists: bool = False
    why_not: str = ""

    @property
    def text(self) -> str:
        """For people."""
        if self.why_not:
            return self.why_not
        word = "is there" if self.exists else "is written"
        return f"the same name in the pod; the DeviceClass {self.device_class} serves it, which {word}"


@dataclass(frozen=True)
class Inventory:
    """All that was found; see each of them."""

    pods: tuple[Use, ...] = ()
    workloads: tuple[dict[str, Any], ...] = ()
    quotas: tuple[dict[str, Any], ...] = ()
    limit_ranges: tuple[dict[str, Any], ...] = ()
    plugins: tuple[Plugin, ...] = ()
    services: Mapping[str, Service] = field(default_factory=dict)

    @property
    def becomes(self) -> dict[str, str]:
        """Return the effect of the migration on each resource, as text."""
        return {name: each.text for name, each in self.services.items()}


def amounts(spec: Json) -> dict[str, int]:
    """Return a pod's requests of known resources like the scheduler: init containers run one after the other, sidecars stay."""
    total: dict[str, int] = {}
    peak: dict[str, int] = {}
    for container in spec.get("initContainers") or ():
        own = _of_container(container)
        if container.get("restartPolicy") == "Always":
            for name, number in own.items():
                total[name] = total.get(name, 0) + number
        for name in {*own, *total}:
            stays = container.get("restartPolicy") == "Always"
            peak[name] = max(peak.get(name, 0), total.get(name, 0) + (0 if stays else own.get(name, 0)))
    for container in spec.get("containers") or ():
        for name, number in _of_container(container).items():
            total[name] = total.get(name, 0) + number
    found = {name: max(total.get(name, 0), peak.get(name, 0)) for name in {*total, *peak}}
    return {name: found[name] for name in sorted(found) if found[name] > 0}


def _of_container(container: Json) -> dict[str, int]:
    resources = container.get("resources") or {}
    # The request of an extended resource equals its limit. The API server sets a missing one of the two.
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {str(name): int(parse(value)) for name, value in asked.items() if meaning(str(name)) is not None}


def mapped(pod: Json) -> frozenset[str]:
    """Return the resources of a pod that it has by the claim that the scheduler has made for it."""
    status = (pod.get("status") or {}).get("extendedResourceClaimStatus") or {}
    return frozenset(str(each.get("resourceName", "")) for each in status.get("requestMappings") or ())


def use_of(pod: Json, owner_of: Callable[[Json], str], taint: Json | None = None) -> Use | None:
    """Return how a pod uses known resources, None where it does not. ``taint`` is that of a node which is on its way."""
    spec, metadata, status = pod.get("spec") or {}, pod["metadata"], pod.get("status") or {}
    asked = amounts(spec)
    if not asked:
        return None
    node = str(spec.get("nodeName") or "")
    by_plugin = frozenset(asked) - mapped(pod)
    way = CLAIMS if not by_plugin else PLUGIN
    if status.get("phase") in _ENDED:
        way = DONE
    elif not node:
        way = WAITS
    return Use(
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
            "It is a static pod: no scheduler sees it and creates a claim for it, and it cannot be evicted.",
            "Remove its manifest from the node, and create the pod with a DaemonSet or a Deployment.",
            blocks=True,
        )
    elif not any(each.get("controller") for each in metadata.get("ownerReferences") or ()):
        yield Problem(
            "no-controller",
            "No controller makes another pod when this one goes.",
            "Keep its manifest, or let its eviction be allowed expressly (evict_unmanaged).",
        )
    if taint is not None and tolerates(spec, taint):
        yield Problem(
            "comes-back",
            f"It tolerates the taint {taint['key']}: its controller can send another one to the node while that is on its way.",
            "Scale it down for that time, or take the toleration without a key away.",
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
                f"{', '.join(shared)}: replicas of a device have no counterpart that a resource's name could reach.",
                "Share devices in the layout (shares) and claim a share in each pod, or claim a whole device or a partition.",
                blocks=True,
            )
        )
    scheduler = str(spec.get("schedulerName") or SCHEDULER)
    if scheduler != SCHEDULER:
        found.append(
            Problem(
                "other-scheduler",
                f"Its scheduler is {scheduler}, which has to make the claims that the usual one makes of resources.",
                "See that this scheduler serves extended resources through DeviceClasses (DRAExtendedResource).",
                blocks=True,
            )
        )
    if sum(asked.values()) > MOST_DEVICES:
        found.append(
            Problem(
                "too-many-devices",
                f"It asks for {sum(asked.values())} devices, and a claim has {MOST_DEVICES} at most.",
                "Split the pod.",
                blocks=True,
            )
        )
    return found


def _kind(resource: str) -> str:
    found = meaning(resource)
    return found.kind if found else ""


def tolerates(spec: Json, taint: Json) -> bool:
    """Whether a pod tolerates a taint of a node."""
    for each in spec.get("tolerations") or ():
        if each.get("effect") and each["effect"] != taint["effect"]:
            continue
        if each.get("operator") == "Exists":
            if not each.get("key") or each["key"] == taint["key"]:
                return True
        elif each.get("key") == taint["key"] and (each.get("value") or "") == (taint.get("value") or ""):
            return True
    return False


def owners(objects: Iterable[Json]) -> Callable[[Json], str]:
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
    """Return the reference to what controls an object, None where nothing does."""
    return next((each for each in metadata.get("ownerReferences") or () if each.get("controller")), None)


def workload_of(kind: str, item: Json, becomes: Callable[[str], str]) -> dict[str, Any] | None:
    """Return the report of a workload whose pods request known resources; None for other workloads and for those with a controller."""
    metadata, spec = item["metadata"], item.get("spec") or {}
    if controller(metadata) is not None and kind in ("ReplicaSet", "Job"):
        return None
    template = ((spec.get("jobTemplate") or {}).get("spec") or {}) if kind == "CronJob" else spec
    pod = (template.get("template") or {}).get("spec") or {}
    asked = amounts(pod)
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


def services_of(resources: Iterable[str], classes: Sequence[Json]) -> dict[str, Service]:
    """Return what serves each resource. Of several classes with the same name for it the newest counts, as for the scheduler."""
    explicit: dict[str, Json] = {}
    for each in sorted(classes, key=_age):
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
            of = f"; it is a replica of {known.of}" if known else ""
            found[name] = Service(name, why_not=f"nothing: it cannot be carried{of}")
        else:
            found[name] = Service(name, known.device_class)
    return found


def _age(item: Json) -> tuple[str, list[int]]:
    # The newest wins, and of two that are as old the first by name.
    name = str(item["metadata"]["name"])
    return str(item["metadata"].get("creationTimestamp", "")), [-ord(letter) for letter in name]


def quota_of(quota: Json, services: Mapping[str, Service], by_plugin: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the effect of the migration on the entries of a ResourceQuota that count devices; None if it has no such entries.

    ``by_plugin`` are the numbers of devices that pods of its namespace have from a plugin, by resource; "" is how many such pods there are.
    """
    metadata, spec = quota["metadata"], quota.get("spec") or {}
    used: Json = (quota.get("status") or {}).get("used") or {}
    classes = {each.device_class: each for each in services.values() if each.device_class}
    entries, problems = [], []
    for name, hard in sorted((spec.get("hard") or {}).items()):
        resource = name[len(_REQUESTS) :] if name.startswith(_REQUESTS) else ""
        more = 0
        if meaning(resource) is not None:
            service = services.get(resource) or services_of([resource], ())[resource]
            text = (
                f"{service.why_not}; the entry still limits the pods that request it"
                if service.why_not
                else f"stays, and counts pods as before; claims of the class {service.device_class} that users write themselves count too. "
                f"To hold claims alone as well: {service.device_class}{PER_CLASS}: {hard}"
            )
        elif name.endswith(PER_CLASS) and name[: -len(PER_CLASS)] in classes:
            served = classes[name[: -len(PER_CLASS)]]
            more = by_plugin.get(served.resource, 0)
            text = f"counts from now on what unchanged pods have of {served.resource} too, by the claims that are made for them"
        elif name == CLAIM_COUNT:
            more = by_plugin.get("", 0)
            text = "counts one claim more for each pod that asks for a resource"
        else:
            continue
        entries.append({"entry": name, "hard": str(hard), "used": str(used.get(name, "0")), "becomes": text})
        if more and parse(used.get(name, "0")) + more > parse(hard):
            problems.append(
                Problem(
                    "quota",
                    f"{name} is {hard}, of which {used.get(name, '0')} are used, and the pods that have devices from a plugin need {more} more.",
                    "Raise it: where it is full, the scheduler is refused the claim, and the pod waits.",
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


def limit_range_of(item: Json) -> dict[str, Any] | None:
    """Return which known resources a LimitRange limits; None where it limits none. It looks at pods, whose words stay the same."""
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
        "becomes": "stays, and holds for pods as before; claims that users write themselves are not looked at",
    }
