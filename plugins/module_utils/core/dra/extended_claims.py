# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Build the claim that the scheduler creates for a pod with extended resources in its limits. No side effects.

Source: KEP-5004 and k8s.io/kubernetes, pkg/scheduler/framework/plugins/dynamicresources (extended resources), 1.36. A
resource refers to the DeviceClass with this ``extendedResourceName``. If several classes have it, the newest one is
used, and among classes created in the same second the first by name. ``deviceclass.resource.kubernetes.io/CLASS``
refers to that class. The claim has one request for each resource of each container. After its creation, its name is in
``status.extendedResourceClaimStatus`` of the pod.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from ..quantity import parse

Json = Mapping[str, Any]

CLASS_PREFIX = "deviceclass.resource.kubernetes.io/"


def class_of_resource(resource: str, classes: Iterable[Json]) -> str:
    """Return the name of the DeviceClass that serves a resource; empty without one, for example for cpu."""
    known = list(classes)
    if resource.startswith(CLASS_PREFIX):
        name = resource[len(CLASS_PREFIX) :]
        return name if any(each["metadata"]["name"] == name for each in known) else ""
    serving = [each for each in known if (each.get("spec") or {}).get("extendedResourceName") == resource]
    newest = max((str(each["metadata"].get("creationTimestamp") or "") for each in serving), default="")
    names = [
        str(each["metadata"]["name"])
        for each in serving
        if str(each["metadata"].get("creationTimestamp") or "") == newest
    ]
    return min(names, default="")


def duplicates(classes: Iterable[Json]) -> dict[str, list[str]]:
    """Return the resources that several DeviceClasses serve, with the classes' names.

    The class that the scheduler uses is the first.
    """
    known = list(classes)
    by_resource: dict[str, list[str]] = {}
    for each in known:
        resource = (each.get("spec") or {}).get("extendedResourceName")
        if resource:
            by_resource.setdefault(str(resource), []).append(str(each["metadata"]["name"]))
    found = {}
    for resource, names in sorted(by_resource.items()):
        first = class_of_resource(resource, known)
        if len(names) > 1:
            found[resource] = [first, *sorted(set(names) - {first})]
    return found


def describe_duplicate(resource: str, names: Sequence[str]) -> str:
    """Return the effect of several DeviceClasses with one extended resource, and what to do.

    ``names`` begins with the newest class. The scheduler's cache maps each resource to one class. The deletion of a
    class, or of its ``extendedResourceName``, removes the entry of the resource, and the next event of another class
    with this resource adds it again (k8s.io/dynamic-resource-allocation, deviceclass/extendedresourcecache, 0.37).
    """
    return (
        f"The extended resource {resource} is served by several DeviceClasses: {', '.join(names)}. The scheduler uses the newest, "
        f"{names[0]}, and pods wait when that one is deleted. Remove extendedResourceName from all but one. Then update the remaining "
        f"class: kubectl annotate --overwrite deviceclass NAME dra.accelerators/updated=$(date +%s). Until then the scheduler does not know {resource}, "
        "and new pods wait."
    )


def requests_of(spec: Json, classes: Iterable[Json]) -> list[dict[str, Any]]:
    """Return the requests of the claim that the scheduler creates for this pod spec; empty for a pod without devices."""
    known = list(classes)
    found = []
    for place, container in enumerate((*(spec.get("initContainers") or ()), *(spec.get("containers") or ()))):
        for number, (device_class, count) in enumerate(_wanted(container, known)):
            exactly = {"deviceClassName": device_class, "allocationMode": "ExactCount", "count": count}
            found.append({"name": f"container-{place}-request-{number}", "exactly": exactly})
    return found


def _wanted(container: Json, classes: list[Json]) -> Iterator[tuple[str, int]]:
    limits = (container.get("resources") or {}).get("limits") or {}
    for resource in sorted(limits):
        device_class = class_of_resource(str(resource), classes) if "/" in resource else ""
        try:
            count = int(parse(limits[resource]))
        except ValueError:
            continue
        if device_class and count > 0:
            yield device_class, count


def claim_name(pod: Json) -> str:
    """Return the name of the claim that the scheduler created for a pod; empty before that."""
    return str(((pod.get("status") or {}).get("extendedResourceClaimStatus") or {}).get("resourceClaimName") or "")


def claim_for(namespace: str, name: str, spec: Json, classes: Iterable[Json]) -> dict[str, Any] | None:
    """Return the claim that the scheduler will create for a pod; None for a pod without extended resources for devices."""
    requests = requests_of(spec, classes)
    if not requests:
        return None
    metadata = {"namespace": namespace, "name": f"{name}-extended-resources"}
    return {"metadata": metadata, "spec": {"devices": {"requests": requests}}}
