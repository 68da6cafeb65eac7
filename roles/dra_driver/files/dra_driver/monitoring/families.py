# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The metrics of the current state: their names, help texts, and labels, and the samples of a driver's view.

This module has no side effects.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..core.dra.consumable_capacity import IN_BYTES
from ..core.telemetry import Telemetry
from ..kubelet.attribution import PodRequests
from ..kubelet.pod_resources import ContainerDevice
from ..metrics import PREFIX
from .view import (
    DriverView,
    Holding,
    assignments,
    causes_of,
    holdings,
    is_well,
    names_of,
    offered,
    partitions_of,
    states_of,
)

GAUGE, COUNTER = "gauge", "counter"


@dataclass(frozen=True)
class Family:
    """The type, the help text, and the labels of one metric."""

    kind: str
    text: str
    labels: tuple[str, ...]


_DEVICE = ("driver", "device", "uuid", "device_uuid")
_HOLDING = (
    "driver",
    "namespace",
    "claim",
    "claim_uid",
    "request",
    "pool",
    "device",
    "kind",
    "profile",
    "uuid",
    "device_uuid",
)
_CONSUMING = (
    "driver",
    "namespace",
    "claim",
    "claim_uid",
    "request",
    "pool",
    "device",
    "uuid",
    "share_id",
    "capacity",
)
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "ready": Family(GAUGE, "Whether claims are served", ("driver",)),
        "part_ready": Family(GAUGE, "Whether a part of the driver works", ("driver", "part")),
        "inventory_timestamp_seconds": Family(GAUGE, "Time of the last scan; 0 for never", ("driver",)),
        "devices": Family(GAUGE, "Physical devices by state", ("driver", "state")),
        "layout_differing_devices": Family(
            GAUGE, "Physical devices that have differed from the node's layout for some time", ("driver",)
        ),
        "published_devices": Family(
            GAUGE,
            "Devices in the pool: whole devices, existing partitions, and possible partitions",
            ("driver", "pool", "kind", "profile"),
        ),
        "pool_published": Family(GAUGE, "Whether the API server has the result of the last scan", ("driver", "pool")),
        "pool_behind_seconds": Family(GAUGE, "How long the published devices have been outdated", ("driver", "pool")),
        "device_info": Family(
            GAUGE,
            "A physical device",
            ("driver", "device", "uuid", "index", "product", "pci_bus_id", "numa_node"),
        ),
        "device_healthy": Family(GAUGE, "Whether a physical device has no fault", ("driver", "device", "uuid")),
        "device_fault": Family(
            GAUGE,
            "A fault of a physical device, and its effect on claims",
            ("driver", "device", "uuid", "cause", "effect"),
        ),
        "device_owing": Family(
            GAUGE,
            "Whether cleanup of a previous claim is pending on a physical device",
            ("driver", "device", "uuid"),
        ),
        "partitions": Family(
            GAUGE, "Existing partitions by owner", ("driver", "device", "device_uuid", "profile", "owner")
        ),
        "claims": Family(GAUGE, "Claims of the driver by state", ("driver", "state")),
        "operations_under_way": Family(GAUGE, "Claims with a call of the kubelet in progress", ("driver",)),
        "claim_device_info": Family(
            GAUGE,
            "A device or partition that is prepared for a claim now; uuid is what exporters of the vendor call it",
            (*_HOLDING, "partition_id", "share_id", "admin"),
        ),
        "claim_consumed_capacity": Family(
            GAUGE, "What a claim consumes of a device that it shares with other claims, by number", _CONSUMING
        ),
        "claim_consumed_capacity_bytes": Family(
            GAUGE, "What a claim consumes of the memory of a device that it shares with other claims", _CONSUMING
        ),
        "container_device_info": Family(
            GAUGE,
            "A device or partition of a claim that a container has now; container is empty if only the pod is known",
            (
                "driver",
                "namespace",
                "pod",
                "container",
                "claim",
                "claim_uid",
                "device",
                "uuid",
                "device_uuid",
                "partition_id",
                "share_id",
            ),
        ),
        "plugin_devices": Family(
            GAUGE,
            "Devices that pods can have without a claim, by what they ask for and by how the devices are",
            ("driver", "resource", "state"),
        ),
        "plugin_connected": Family(
            GAUGE, "Whether the kubelet follows the devices of a resource", ("driver", "resource")
        ),
        "identity_token_expiry_timestamp_seconds": Family(
            GAUGE,
            "Expiry of the driver's token for the API server; none for a token without expiry",
            (),
        ),
        "collection_success": Family(GAUGE, "Whether a source of these metrics answered in time", ("driver", "source")),
        "collection_duration_seconds": Family(GAUGE, "How long a source of these metrics took", ("driver", "source")),
        "device_power_watts": Family(GAUGE, "Power that a device draws", _DEVICE),
        "device_power_limit_watts": Family(GAUGE, "Power limit of a device", _DEVICE),
        "device_energy_joules": Family(COUNTER, "Energy that a device has drawn since its driver was loaded", _DEVICE),
        "device_temperature_celsius": Family(GAUGE, "Temperature of a device", _DEVICE),
        "device_memory_used_bytes": Family(GAUGE, "Memory of a device or partition that is in use", _DEVICE),
        "device_memory_total_bytes": Family(GAUGE, "Memory that a device or partition has", _DEVICE),
        "device_utilization_ratio": Family(GAUGE, "Fraction of time in which a device was busy", _DEVICE),
        "device_clock_hertz": Family(GAUGE, "Clock of a device", (*_DEVICE, "clock")),
    }
)


@dataclass
class Samples:
    """Values by metric and labels. A second value for the same labels replaces the first."""

    values: dict[str, dict[tuple[str, ...], float]] = field(default_factory=dict)

    def add(self, name: str, value: float | None, *labels: object) -> None:
        """Add a value; None is ignored. The number of labels must be that of the family. Raises ValueError."""
        if value is None:
            return
        texts = tuple(str(each) for each in labels)
        if len(texts) != len(FAMILIES[name].labels):
            raise ValueError(f"{PREFIX}_{name} has the labels {FAMILIES[name].labels}; found {texts}")
        self.values.setdefault(name, {})[texts] = float(value)


def add_view(
    samples: Samples,
    view: DriverView,
    containers: Iterable[ContainerDevice],
    pods: Mapping[tuple[str, str], PodRequests],
) -> None:
    """Add the state of one driver, its devices, and the users of its devices."""
    driver, survey = view.driver, view.snapshot.survey
    samples.add("ready", not view.problems, driver)
    for part in sorted({*view.parts, *view.problems}):
        samples.add("part_ready", part not in view.problems, driver, part)
    samples.add("inventory_timestamp_seconds", view.snapshot.scanned_at, driver)
    samples.add("pool_published", view.published, driver, view.pool)
    samples.add("pool_behind_seconds", view.behind_seconds, driver, view.pool)
    for state in ("prepared", "preparing"):
        samples.add("claims", sum(record.state == state for record in view.records), driver, state)
    samples.add("operations_under_way", view.under_way, driver)
    samples.add("layout_differing_devices", view.differing, driver)
    for resource in view.resources:
        samples.add("plugin_devices", resource.healthy, driver, resource.resource, "healthy")
        samples.add("plugin_devices", resource.devices - resource.healthy, driver, resource.resource, "unhealthy")
        samples.add("plugin_connected", resource.connected, driver, resource.resource)
    for each in holdings(view.records):
        add_holding(samples, driver, each)
    for user, each in assignments(driver, view.records, containers, pods):
        samples.add(
            "container_device_info",
            1,
            *(driver, user.namespace, user.pod, user.container, each.claim.name, each.claim.uid),
            *(each.device.name, each.uuid, each.device_uuid, each.partition_id, each.device.share_id),
        )
    if survey is None:
        return
    names, causes = names_of(survey), causes_of(view.hardware_state)
    for state, number in states_of(survey).items():
        samples.add("devices", number, driver, state)
    for (kind, profile), number in offered(survey).items():
        samples.add("published_devices", number, driver, view.pool, kind, profile)
    for finding in survey.findings:
        uuid, known = finding.uuid or finding.name, finding.device
        name = names.get(uuid, "")
        samples.add("device_healthy", is_well(view.hardware_state, finding), driver, name, uuid)
        samples.add("device_owing", uuid in view.pending, driver, name, uuid)
        for cause, effect in causes.get(uuid, {}).items():
            samples.add("device_fault", 1, driver, name, uuid, cause, effect)
        if known is not None:
            node = "" if known.numa_node is None else known.numa_node
            samples.add("device_info", 1, driver, name, uuid, known.index, known.product, known.pci_address, node)
    for (uuid, profile, owner), number in partitions_of(survey, view.records).items():
        samples.add("partitions", number, driver, names.get(uuid, ""), uuid, profile, owner)


def add_holding(samples: Samples, driver: str, each: Holding) -> None:
    """Add the claim that uses a device, and the consumed capacity of a shared device."""
    device, claim = each.device, each.claim
    samples.add(
        "claim_device_info",
        1,
        *(driver, claim.namespace, claim.name, claim.uid, device.request, device.pool, device.name, device.kind),
        *(device.profile or "", each.uuid, each.device_uuid, each.partition_id),
        *(device.share_id, str(device.admin).lower()),
    )
    for capacity, amount in device.consumed.items():
        samples.add(
            "claim_consumed_capacity_bytes" if capacity in IN_BYTES else "claim_consumed_capacity",
            amount,
            *(driver, claim.namespace, claim.name, claim.uid, device.request, device.pool, device.name),
            *(each.uuid, device.share_id, capacity),
        )


def add_telemetry(samples: Samples, view: DriverView, readings: Iterable[Telemetry]) -> None:
    """Add the telemetry of the devices of one driver."""
    survey = view.snapshot.survey
    names = names_of(survey) if survey is not None else {}
    if survey is not None:
        names.update({offer.partition_uuid: offer.name for offer in survey.offers if offer.partition_uuid})
    names.update(
        {each.uuid: each.device.name for each in holdings(view.records) if each.uuid and not each.device.members}
    )
    for each in readings:
        labels = (view.driver, names.get(each.uuid, ""), each.uuid, each.device_uuid)
        samples.add("device_power_watts", each.power, *labels)
        samples.add("device_power_limit_watts", each.power_limit, *labels)
        samples.add("device_energy_joules", each.energy, *labels)
        samples.add("device_temperature_celsius", each.temperature, *labels)
        samples.add("device_memory_used_bytes", each.memory_used, *labels)
        samples.add("device_memory_total_bytes", each.memory_total, *labels)
        samples.add("device_utilization_ratio", each.utilization, *labels)
        for clock, hertz in each.clocks.items():
            samples.add("device_clock_hertz", hertz, *labels, clock)
