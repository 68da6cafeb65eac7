# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""``claims`` and ``devices``: list the prepared claims with their users, and the devices with their faults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..claims.pending_cleanups import cleanups_in, fabric_cleanups_in
from ..claims.store.records import ClaimRecord, DeviceRecord
from ..core.errors import AcceleratorError
from ..core.host.companions import device_owners
from ..core.times import text_of
from ..kubelet.attribution import PodRequests, ambiguous_pods, assign_devices
from ..kubelet.pod_resources import ContainerDevice, container_devices, socket_path
from ..status_command import companion_units, fault_texts
from .node import Node, query_api
from .output import table

# The timeout, in seconds, of the query of the kubelet.
KUBELET_SECONDS = 2.0


def claims(node: Node) -> list[dict[str, Any]]:
    """Return every claim in the stores, with its devices, its companion units, and the containers that use it."""
    companions, containers = companion_units(node.system), containers_of(node)
    pods = requests_by_pod(node, containers)
    return [
        {
            "driver": driver.name,
            "namespace": record.namespace,
            "name": record.name,
            "uid": record.uid,
            "state": record.state,
            "since": text_of(record.created_at),
            "devices": [
                {
                    **device_of(device),
                    "containers": sorted(each.describe() for each in assigned if each.device is device),
                }
                for device in record.devices
            ],
            "companions": companions_for(companions, record),
            "containers": containers_using(containers, record),
        }
        for driver in node.drivers
        for record in driver.stored.records
        for assigned in (assign_devices(driver.name, [record], containers, pods),)
    ]


def companions_for(companions: Mapping[str, list[dict[str, str]]], record: ClaimRecord) -> list[dict[str, str]]:
    """Return the companion units that run for a claim, including those shared with other claims.

    ``companions`` is the result of ``companion_units``.
    """
    owners = (record.uid, *sorted(device_owners(record.shared)))
    return [each for owner in owners for each in companions.get(owner, [])]


def claims_text(found: list[dict[str, Any]], problems: list[str]) -> str:
    """Return claims as a table, after a line for each problem."""
    rows: list[list[object]] = [["CLAIM", "STATE", "REQUEST", "DEVICE", "UUID", "COMPANIONS", "CONTAINERS"]]
    for claim in found:
        name = f"{claim['namespace']}/{claim['name']}"
        programs = ", ".join(f"{each['unit']} ({each['state']})" for each in claim["companions"])
        rows += [
            [
                name,
                claim["state"],
                each["request"],
                each["name"],
                each["uuid"],
                programs,
                ", ".join(each["containers"]),
            ]
            for each in claim["devices"]
        ] or [[name, claim["state"], "", "", "", programs, ", ".join(claim["containers"])]]
    return "".join(f"{problem}\n" for problem in problems) + (table(rows) or "no claim is prepared\n")


def device_of(device: DeviceRecord) -> dict[str, Any]:
    """Return the recorded allocation of one device as a mapping, for text and JSON output."""
    return {
        "request": device.request,
        "pool": device.pool,
        "name": device.name,
        "kind": device.kind,
        "uuid": device.partition_uuid or device.device_uuid,
        "device_uuid": device.device_uuid,
        "members": list(device.members),
        "profile": device.profile or "",
        "placement": str(device.placement or ""),
        "instance": device.instance_id,
        "made_for_the_claim": device.created,
        "share_id": device.share_id,
        "admin": device.admin,
        "settings": dict(device.settings),
        "sharing": dict(device.sharing),
        "consumed": dict(device.consumed),
        "cdi": device.cdi_id,
    }


def devices(node: Node) -> list[dict[str, Any]]:
    """Return the physical devices that the drivers report, and, for a driver that does not run, those that claims use."""
    found: list[dict[str, Any]] = []
    for driver in node.drivers:
        known = {entry["uuid"] or entry["name"]: entry for entry in driver.status["devices"]}
        held = {uuid for record in driver.stored.records for uuid in record.device_uuids}
        lasting = driver.backend.partitions_outlive_boot
        fabric = fabric_cleanups_in(driver.stored.meta, node.system.boot_id())
        destructions = cleanups_in(driver.stored.meta, None if lasting else node.system.boot_id())
        for uuid in (*known, *sorted(held - set(known))):
            entry = known.get(uuid, {})
            found.append(
                {
                    "driver": driver.name,
                    "uuid": uuid,
                    "name": entry.get("name", ""),
                    "fault": entry.get("fault", "" if driver.runs else "not known: the driver does not run"),
                    "ailments": list(entry.get("ailments", ())),
                    "claims": sorted(
                        f"{record.describe()} ({device.name})"
                        for record in driver.stored.records
                        for device in record.devices
                        if uuid in device.device_uuids
                    ),
                    "owed": [
                        *(f"partition {cleanup.partition}" for cleanup in destructions if cleanup.device_uuid == uuid),
                        *(f"fabric partition {cleanup.number}" for cleanup in fabric if uuid in cleanup.device_uuids),
                    ],
                }
            )
    return found


def devices_text(found: list[dict[str, Any]]) -> str:
    """Return devices as a table."""
    rows: list[list[object]] = [["DEVICE", "UUID", "FAULT", "CLAIMS", "TO BE UNDONE"]]
    rows += [
        [each["name"], each["uuid"], "; ".join(faults) or "none", ", ".join(each["claims"]), ", ".join(each["owed"])]
        for each, faults in ((each, fault_texts(each)) for each in found)
    ]
    return table(rows) or "no device is known\n"


def containers_of(node: Node) -> tuple[ContainerDevice, ...]:
    """Return the containers with devices, from the kubelet. Empty if the kubelet does not answer."""
    try:
        return container_devices(socket_path(node.configuration.kubelet_root), KUBELET_SECONDS)
    except AcceleratorError:
        return ()


def containers_using(containers: Iterable[ContainerDevice], record: ClaimRecord) -> list[str]:
    """Return the containers that refer to a claim, sorted and unique, as namespace/pod/container."""
    return sorted(
        {
            f"{each.namespace}/{each.pod}/{each.container}"
            for each in containers
            if (each.namespace, each.claim) == (record.namespace, record.name)
        }
    )


def requests_by_pod(node: Node, containers: Sequence[ContainerDevice]) -> Mapping[tuple[str, str], PodRequests]:
    """Return the requests of the pods for which the kubelet's list is ambiguous.

    Empty without ``read_pods`` or if the API server does not answer.
    """
    if not node.configuration.read_pods:
        return {}
    pods = {pod for driver in node.drivers for pod in ambiguous_pods(driver.name, driver.stored.records, containers)}
    if not pods:
        return {}
    # Load the API client only if it is needed.
    from ..monitoring.pods import read_requests

    found, _problem = query_api(node.configuration.kubeconfig, lambda api: read_requests(api, pods))
    return found or {}
