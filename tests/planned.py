# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Simulate a small fleet for tests of plans: reports of its nodes, published devices, and the result of planned layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import NodeScan
from ansible_collections.dra.accelerators.plugins.module_utils._report import node_report
from ansible_collections.dra.accelerators.plugins.module_utils.core.dra.resource_slices import build_pool, plan_pool
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Device
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.layout_plan import (
    CreatePartition,
    DestroyPartition,
    plan_layout,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules, wanted_for
from ansible_collections.dra.accelerators.plugins.module_utils.core.vendors.nvidia import offers

from tests.fleets import with_module_versions
from tests.unit.core import board_model

Json = dict[str, Any]
DRIVER, BOARD = "gpu.nvidia.com", "h100-80"
VERSIONS = {"kernel": "6.1", "release": "0.1.0-1a2b3c4d", "environment": "0123456789ab"}
Devices = Mapping[str, Sequence[Device]]
#: The DeviceClasses that the role device_classes creates, with their selectors.
CLASSES: list[Json] = [
    {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceClass",
        "metadata": {"name": name},
        "spec": {
            "selectors": [
                {
                    "cel": {
                        "expression": f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == '{kind}'"
                    }
                }
            ]
        },
    }
    for name, kind in ((DRIVER, "gpu"), ("mig.nvidia.com", "mig"))
]


def gpu(number: int, minor: int, **options: Any) -> Device:
    """Return a GPU. ``number`` is unique in the fleet, ``minor`` on its node."""
    return replace(with_module_versions(board_model.device(BOARD, number, minor=minor, **options)), index=minor)


def fleet(nodes: int = 2, each: int = 2) -> dict[str, list[Device]]:
    """Return the devices of nodes by name: ``nodes`` nodes (gpu-1, gpu-2, …) with ``each`` whole H100. All UUIDs are different."""
    return {
        f"gpu-{number + 1}": [gpu(number * each + place, place, enabled=False) for place in range(each)]
        for number in range(nodes)
    }


def answers(devices: Devices) -> dict[str, Json]:
    """Return the result of the module accelerator_report by node."""
    return {
        node: node_report.node_report(
            [node_report.Answer("nvidia", DRIVER, NodeScan(tuple(those), (), ()))], None, "test", VERSIONS
        )
        for node, those in devices.items()
    }


def slices(devices: Devices) -> list[Json]:
    """Return the ResourceSlices of the nodes with their existing partitions."""
    found = []
    for node, those in devices.items():
        published = [one for device in those for one in offers.offers(device, dynamic=False)]
        pool = build_pool(driver=DRIVER, pool=node, node_name=node, offers=published, counter_sets=[])
        bodies = [each.body for each in plan_pool(pool, ()).writes if each.body is not None]
        found += [
            {**body, "kind": "ResourceSlice", "metadata": {"name": f"{node}-{number}"}}
            for number, body in enumerate(bodies)
        ]
    return found


def applied(devices: Devices, layouts: Iterable[Json]) -> dict[str, list[Device]]:
    """Return the fleet after the steps that the core plans for these layouts."""
    rules = {entry["hosts"]: parse_rules(entry["layout"]) for entry in layouts}
    found: dict[str, list[Device]] = {}
    for node, those in devices.items():
        found[node] = []
        for device in those:
            rule = wanted_for(device, rules.get(node, ()))
            places = {(each.profile_id, each.placement.start) for each in device.partitions}
            steps = plan_layout(device, rule).steps if rule is not None else ()
            for step in steps:
                if isinstance(step, DestroyPartition):
                    places.discard((step.partition.profile_id, step.partition.placement.start))
                if isinstance(step, CreatePartition):
                    places.add((step.profile_id, step.placement.start))
            found[node].append(
                gpu(
                    int(device.uuid[4:12], 16),
                    device.minor,
                    places=tuple(sorted(places)),
                    enabled=rule is not None and rule.mode == "static",
                )
            )
    return found


def claim(name: str, profile: str = "", *, count: int = 1, namespace: str = "default") -> Json:
    """Return a claim for partitions of a profile, or for whole GPUs."""
    exactly: Json = {"deviceClassName": "mig.nvidia.com" if profile else DRIVER, "count": count}
    if profile:
        exactly["selectors"] = [{"cel": {"expression": f"device.attributes['{DRIVER}'].profile == '{profile}'"}}]
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"devices": {"requests": [{"name": "device", "exactly": exactly}]}},
    }


def pod(name: str, *claims: str, since: str = "", **spec: Any) -> Json:
    """Return a pod with these claims. With ``since`` it is pending from this time on."""
    made = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", **({"creationTimestamp": since} if since else {})},
        "spec": {
            "containers": [{"name": "main", "image": "busybox"}],
            "resourceClaims": [{"name": f"c{at}", "resourceClaimName": each} for at, each in enumerate(claims)],
            **spec,
        },
    }
    return {**made, "status": {"phase": "Pending"}} if since else made
