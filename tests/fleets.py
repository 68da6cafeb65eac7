# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Generate fleets for tests of the report: reports of nodes, ResourceSlices, and claims, from simulated boards with the product's code."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.dra.accelerators.plugins.module_utils._layout.apply_layout import NodeScan
from ansible_collections.dra.accelerators.plugins.module_utils._report import node_report
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.claims import facts_by
from ansible_collections.dra.accelerators.plugins.module_utils.core.cluster.inventory import (
    devices as published_devices,
)
from ansible_collections.dra.accelerators.plugins.module_utils.core.health.conditions import Severity, Sign
from ansible_collections.dra.accelerators.plugins.module_utils.core.model import Device, Health, Version
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.answers import fleet_report
from ansible_collections.dra.accelerators.plugins.module_utils.core.picture.fleet import picture

from tests.unit.core import board_model

Json = dict[str, Any]
DRIVER = "gpu.nvidia.com"
VERSIONS = {"kernel": "6.1", "release": "0.1.0-1a2b3c4d", "environment": "0123456789ab"}
BROKEN = Health((Sign("lost", Severity.FAILED, "It has fallen off the bus.", "Start the machine again."),))


def with_module_versions(device: Device) -> Device:
    """Return a device whose versions are instances of the modules' ``Version``. The modules' code does not recognize those of the driver's copy."""
    attributes = {
        name: Version(value.text) if hasattr(value, "text") else value for name, value in device.attributes.items()
    }
    return replace(device, attributes=attributes)


@dataclass
class Fleet:
    """The reports of nodes and the objects of a cluster, from which the report is created."""

    answers: dict[str, Json] = field(default_factory=dict)
    slices: list[Json] = field(default_factory=list)
    claims: list[Json] = field(default_factory=list)
    pending: list[Json] = field(default_factory=list)
    rules: list[Json] = field(default_factory=list)

    def node(
        self, name: str, devices: Sequence[Device], layout: Sequence[Json] | None = None, *, publish: bool = True
    ) -> None:
        """Add a node with a report. It publishes its devices and the partitions that can be created on demand."""
        answer = node_report.Answer("nvidia", DRIVER, NodeScan(tuple(map(with_module_versions, devices)), (), ()))
        rules = None if layout is None else parse_rules(layout)
        self.answers[name] = node_report.node_report([answer], rules, "/etc/dra-accelerators/layout.json", VERSIONS)
        for number, body in enumerate(board_model.slices_of(devices, DRIVER, name) if publish else ()):
            # The API server generates the name from the prefix in generateName.
            self.slices.append({**body, "metadata": {**body["metadata"], "name": f"{name}-{number}"}})

    def claim(self, name: str, node: str = "", *devices: str, namespace: str = "research", pods: Any = ()) -> None:
        """Add a claim. It is allocated if the caller names ``devices`` of a node."""
        results = [{"request": "r", "driver": DRIVER, "pool": node, "device": each} for each in devices]
        status: Json = {"reservedFor": [{"resource": "pods", "name": each, "uid": each} for each in pods]}
        if results:
            status["allocation"] = {"devices": {"results": results}}
        spec = {"devices": {"requests": [{"name": "r", "exactly": {"deviceClassName": "mig.nvidia.com"}}]}}
        metadata = {"name": name, "namespace": namespace, "creationTimestamp": "2026-11-24T08:00:00Z"}
        self.claims.append({"metadata": metadata, "spec": spec, "status": status})

    def pending_pod(self, pod: str, claim: str, message: str, since: str = "2026-11-24T09:00:00Z") -> None:
        """Add a claim without an allocation, and a pending pod that references it."""
        self.claim(claim)
        condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
        self.pending.append(
            {
                "metadata": {"name": pod, "namespace": "research", "creationTimestamp": since},
                "spec": {"resourceClaims": [{"name": "c", "resourceClaimName": claim}]},
                "status": {"conditions": [{**condition, "lastTransitionTime": since}]},
            }
        )

    def picture(self, *, cluster: bool = True, **more: Any) -> Json:
        """Return the picture of the fleet after a round trip through JSON."""
        published = published_devices(self.slices, self.claims) if cluster else None
        facts = facts_by(self.claims, published or (), {})
        report = fleet_report(self.answers, published, facts)
        options: Json = {"pending": self.pending, "rules": self.rules, "generated": "2026-11-24T10:00:00Z", **more}
        found: Json = json.loads(json.dumps(picture(report, published, **options)))
        return found


def boards(count: int = 8, name: str = "h100-80", number: int = 0) -> list[Device]:
    """Return the boards of a machine with two sockets and two PCIe switches for each. ``number``: the machine's number in the UUIDs."""
    found = []
    for index in range(count):
        root, numa = f"pci0000:{index * 4 // count * 16 + 16:02x}", index * 2 // count
        board = board_model.device(name, index)
        attributes = {
            **board.attributes,
            "resource.kubernetes.io/pcieRoot": root,
            "resource.kubernetes.io/numaNode": numa,
        }
        uuid = f"GPU-{number:08x}-0000-0000-0000-{index:012x}"
        found.append(replace(board, uuid=uuid, numa_node=numa, pcie_root=root, attributes=attributes))
    return found


def partition_names(devices: Sequence[Json], index: int, profile: str) -> list[str]:
    """Return the published names of the partitions of a profile on one board, in the scheduler's order."""
    return [each["name"] for each in devices if each["name"].startswith(f"gpu-{index}-mig-{profile}-")]


def generate_fleet(nodes: int, *, seed: int = 1, first: int = 1) -> Fleet:
    """Return a fleet of random nodes with claims on GPUs and partitions, unhealthy GPUs, layout drift, nodes without reports,
    and pending pods.
    """
    fleet, rng = Fleet(), random.Random(seed)
    for number in range(first, first + nodes):
        name = f"gpu-{number:04d}"
        devices = boards(number=number)
        unhealthy = rng.random() < 0.02
        if unhealthy:
            lost = rng.randrange(8)
            devices[lost] = replace(devices[lost], health=BROKEN)
        drifts, first_slice = rng.random() < 0.03, len(fleet.slices)
        fleet.node(
            name, devices, [{"match": {"index": 0}, "mode": "static", "partitions": {"3g.40gb": 2}}] if drifts else None
        )
        if rng.random() < 0.01:
            fleet.answers[name] = {}
        published = [each for one in fleet.slices[first_slice:] for each in one["spec"].get("devices", ())]
        for index in range(8):
            draw = rng.random()
            claim = f"job-{number}-{index}"
            if draw < 0.45:
                fleet.claim(claim, name, f"gpu-{index}", pods=(f"{claim}-0",))
            elif draw < 0.8:
                used: set[int] = set()
                for each in rng.sample(partition_names(published, index, "1g10gb"), rng.randint(1, 6)):
                    place = int(each.rsplit("-", 1)[1])
                    if place not in used:
                        used.add(place)
                        fleet.claim(f"{claim}-{place}", name, each, pods=(f"{claim}-{place}-0",))
    for number in range(max(nodes // 25, 1)):
        fleet.pending_pod(
            f"large-{number}-0",
            f"large-{number}",
            f"0/{nodes} nodes are available: {nodes} cannot allocate all claims.",
            f"2026-11-24T0{rng.randint(1, 9)}:{rng.randint(10, 59)}:00Z",
        )
    return fleet
