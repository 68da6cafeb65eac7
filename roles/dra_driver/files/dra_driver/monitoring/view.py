# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The state of one driver at one moment, and values derived from it for metrics.

This module has no side effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..claims.store.records import ClaimRecord, DeviceRecord
from ..core.dra.device_plugin_model import ResourceStatus
from ..core.health.conditions import Severity
from ..core.health.tracker import severity
from ..core.model import DEVICE, PARTITION, Finding
from ..inventory import Survey
from ..kubelet.attribution import Assignment, PodRequests, assign_devices
from ..kubelet.pod_resources import ContainerDevice
from ..supervisors.driver_state import Snapshot
from ..supervisors.health import HardwareState


@dataclass(frozen=True)
class DriverView:
    """The state of one driver.

    ``problems`` are the problems by part. ``pending`` are the UUIDs of devices with pending cleanup. ``resources`` are
    the device-plugin resources, if the kubelet interface is device-plugin. ``differing`` is the number of devices that
    have differed from the layout for a long time.
    """

    driver: str
    pool: str
    hardware_state: HardwareState
    records: tuple[ClaimRecord, ...]
    parts: tuple[str, ...]
    problems: Mapping[str, str]
    published: bool
    behind_seconds: float
    pending: frozenset[str]
    under_way: int = 0
    resources: tuple[ResourceStatus, ...] = ()
    differing: int = 0

    @property
    def snapshot(self) -> Snapshot:
        """The state of the hardware."""
        return self.hardware_state.snapshot


@dataclass(frozen=True)
class Holding:
    """One physical device that a prepared claim uses in whole or in part, with the values that identify it in metrics."""

    claim: ClaimRecord
    device: DeviceRecord
    device_uuid: str

    @property
    def uuid(self) -> str:
        """The UUID that vendor tools show: that of the partition, or of the whole device."""
        if self.device.kind == PARTITION:
            return self.device.partition_uuid or ""
        return self.device_uuid

    @property
    def partition_id(self) -> str:
        """The partition's ID on its device; "" for a whole device."""
        number = self.device.instance_id
        return str(number) if self.device.kind == PARTITION and number is not None else ""


def holdings(records: Iterable[ClaimRecord]) -> tuple[Holding, ...]:
    """Return each device of each prepared claim; for a group each member."""
    return tuple(
        Holding(record, device, uuid)
        for record in records
        if record.prepared
        for device in record.devices
        for uuid in device.device_uuids
    )


def assignments(
    driver: str,
    records: Iterable[ClaimRecord],
    containers: Iterable[ContainerDevice],
    pods: Mapping[tuple[str, str], PodRequests],
) -> tuple[tuple[Assignment, Holding], ...]:
    """Return the containers or pods that use devices of prepared claims, with each physical device.

    See ``assign_devices``.
    """
    prepared = [record for record in records if record.prepared]
    return tuple(
        (each, Holding(each.claim, each.device, uuid))
        for each in assign_devices(driver, prepared, containers, pods)
        for uuid in each.device.device_uuids
    )


def causes_of(hardware_state: HardwareState) -> dict[str, dict[str, str]]:
    """Return the faults of physical devices: by UUID, or by name if the UUID is unknown, a mapping of cause to effect.

    A cause with a value has the form "cause-value". The effect is that of the taint, "None" for no taint, and
    "NotPublished" for a device that is not published.
    """
    found: dict[str, dict[str, str]] = {}
    survey = hardware_state.snapshot.survey
    for finding in survey.findings if survey is not None else ():
        if finding.fault is not None and not finding.is_first_read_pending and finding.device is None:
            found.setdefault(finding.uuid or finding.name, {})[finding.fault.cause] = "NotPublished"
            continue
        for fault in hardware_state.faults.get(finding.uuid, ()):
            cause = "-".join(part for part in (fault.sign.cause, fault.sign.value) if part)
            found.setdefault(finding.uuid, {})[cause] = fault.effect(hardware_state.effects) or "None"
    return found


def is_well(hardware_state: HardwareState, finding: Finding) -> bool:
    """Return whether a physical device has no fault that prevents its allocation."""
    worst = severity(hardware_state.faults.get(finding.uuid, ()))
    return finding.fault is None and worst in (None, Severity.INFORMATIVE)


def names_of(survey: Survey) -> dict[str, str]:
    """Return the published name of each whole device by UUID; for a device published as partitions only, product and index."""
    return {
        **{device.uuid: f"{device.product} {device.index}" for device in survey.devices.values()},
        **{offer.device_uuid: offer.name for offer in survey.offers if offer.kind == DEVICE},
    }


def states_of(survey: Survey) -> Counter[str]:
    """Return the number of physical devices in each state: well, faulty, or awaited."""
    counts = Counter({"well": 0, "faulty": 0, "awaited": 0})
    for finding in survey.findings:
        counts["awaited" if finding.is_first_read_pending else "faulty" if finding.fault is not None else "well"] += 1
    return counts


def offered(survey: Survey) -> Counter[tuple[str, str]]:
    """Return the number of published devices by kind and profile; the profile is "" for a device without one."""
    return Counter((offer.kind, offer.profile or "") for offer in survey.offers)


def partitions_of(survey: Survey, records: Iterable[ClaimRecord]) -> Counter[tuple[str, str, str]]:
    """Return the number of existing partitions by device UUID, profile, and owner: "claim" or "administrator"."""
    ours = {(device.device_uuid, device.key) for record in records for device in record.devices if device.created}
    return Counter(
        (device.uuid, partition.profile, "claim" if (device.uuid, partition.key) in ours else "administrator")
        for device in survey.devices.values()
        for partition in device.partitions
    )
