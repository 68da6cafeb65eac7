# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Manifests that tests need several times or with a node's name. All others are files of ``examples/``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
IMAGE = "debian:12"
PRINT_AND_STAY = "nvidia-smi -L; trap 'exit 0' TERM; while :; do sleep 1; done"


#: For a claim that tolerates every fault. The eviction controller requires the effect by name; the scheduler also
#: accepts a toleration without one.
TOLERATED = [{"operator": "Exists", "effect": "NoExecute"}, {"operator": "Exists"}]

#: Layout rules for eight GPUs: four claims share GPU 7, virtual machines can use GPUs 5 and 6, and GPUs 4 and 6 have
#: binding conditions.
MIXED_LAYOUT: list[dict[str, Any]] = [
    {"match": {"index": 7}, "mode": "whole", "shares": 4},
    {"match": {"index": 6}, "mode": "dynamic", "passthrough": True, "prepared_before_binding": True},
    {"match": {"index": 5}, "mode": "dynamic", "passthrough": True},
    {"match": {"index": 4}, "mode": "dynamic", "prepared_before_binding": True},
    {"match": {}, "mode": "dynamic"},
]


def example(name: str, node: str | None = None) -> list[dict[str, Any]]:
    """Return the objects of a file of ``examples/``, with its pods on a node if one is named."""
    items: list[dict[str, Any]] = yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))["items"]
    for item in items:
        if node and item["kind"] == "Pod":
            item["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    return items


def claim(name: str, *, device_class: str, expression: str | None = None, count: int = 1) -> dict[str, Any]:
    """Return a ResourceClaim with one request ``device`` of the class, limited by a CEL expression."""
    exactly: dict[str, Any] = {"deviceClassName": device_class, "count": count}
    if expression:
        exactly["selectors"] = [{"cel": {"expression": expression}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"devices": {"requests": [{"name": "device", "exactly": exactly}]}},
    }


def pod(name: str, *claims: str, node: str | None = None, image: str = IMAGE, restart: str = "Never") -> dict[str, Any]:
    """Return a pod that uses existing claims, prints its NVML devices, and runs until it is deleted."""
    spec: dict[str, Any] = {
        "restartPolicy": restart,
        "terminationGracePeriodSeconds": 2,
        "dnsPolicy": "Default",
        "containers": [
            {
                "name": "probe",
                "image": image,
                "imagePullPolicy": "IfNotPresent",
                "command": ["sh", "-c", PRINT_AND_STAY],
                "resources": {"claims": [{"name": f"claim-{number}"} for number in range(len(claims))]},
            }
        ],
        "resourceClaims": [
            {"name": f"claim-{number}", "resourceClaimName": name} for number, name in enumerate(claims)
        ],
    }
    if node:
        spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": "default"}, "spec": spec}


def deployed(name: str, replicas: int, spec: dict[str, Any]) -> dict[str, Any]:
    """Return a Deployment with this number of pods and pod spec."""
    labels = {"app": name}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "replicas": replicas,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": spec},
        },
    }


def deployment(name: str, replicas: int, exactly: dict[str, Any], **container: Any) -> list[dict[str, Any]]:
    """Return a Deployment whose pods each have their own claim for exactly this, and its claim template.

    ``container`` overrides fields of the pods' container, which is that of ``pod`` by default.
    """
    template = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"spec": {"devices": {"requests": [{"name": "device", "exactly": exactly}]}}},
    }
    spec = pod(name, name, restart="Always")["spec"]
    spec["resourceClaims"] = [{"name": "claim-0", "resourceClaimTemplateName": name}]
    spec["containers"][0] |= container
    return [template, deployed(name, replicas, spec)]


def selected(device_class: str, expression: str) -> dict[str, Any]:
    """Return a request for a device of a class that matches a CEL expression."""
    return {"deviceClassName": device_class, "selectors": [{"cel": {"expression": expression}}]}


def settings(**fields: Any) -> dict[str, Any]:
    """Return a configuration that sets fields on the devices of all requests of a claim."""
    parameters = {"apiVersion": "dra.accelerators/v1alpha1", "kind": "DeviceSettings", **fields}
    return {"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}


def mps(kind: str = "GpuConfig", **fields: Any) -> dict[str, Any]:
    """Return a configuration that shares a claim's devices between its containers with MPS."""
    sharing = {"strategy": "MPS", "mpsConfig": fields}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": kind, "sharing": sharing}
    return {"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}


def dynamic(profile: str) -> str:
    """Return CEL for a partition of this profile that does not exist yet (an existing one has a ``uuid``)."""
    return (
        f"device.attributes['gpu.nvidia.com'].profile == '{profile}' && !has(device.attributes['gpu.nvidia.com'].uuid)"
    )


def static(profile: str) -> str:
    """Return CEL for an existing partition of this profile from an administrator's layout."""
    return (
        f"device.attributes['gpu.nvidia.com'].profile == '{profile}' && has(device.attributes['gpu.nvidia.com'].uuid)"
    )


def device_named(name: str) -> str:
    """Return CEL for the whole GPU with this UUID."""
    return f"device.attributes['gpu.nvidia.com'].uuid == '{name}'"
