# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""One driver at one moment, as data, and what follows from it for whoever watches. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..claims.records import ClaimRecord, DeviceRecord
from ..core.health import severity
from ..core.model import DEVICE, PARTITION, Finding
from ..core.plugin_devices import ResourceStatus
from ..core.signs import Severity
from ..inventory import Survey
from ..kubelet.attribution import Assignment, PodRequests, assign_devices
from ..kubelet.pod_resources import ContainerDevice
from ..supervisors.health import Picture
from ..supervisors.shared import Snapshot


@dataclass(frozen=True)
class View:
    """How one driver is. ``problems`` says by part what is wrong; ``owing`` are devices on which something is to be undone.

    ``resources`` are what pods can ask for without a claim, where the kubelet's device-plugin API is the node's way. ``differing`` is how many
    devices have for long not been as the layout wants.
    """

    driver: str
    pool: str
    picture: Picture
    records: tuple[ClaimRecord, ...]
    parts: tuple[str, ...]
    problems: Mapping[str, str]
    published: bool
    behind_seconds: float
    owing: frozenset[str]
    under_way: int = 0
    resources: tuple[ResourceStatus, ...] = ()
    differing: int = 0

    @property
    def snapshot(self) -> Snapshot:
        """What is known of the hardware."""
        return self.picture.snapshot


@dataclass(frozen=True)
class Holding:
    """One physical device that a prepared claim has, whole or a part of it: what of the record identifies it, outside."""

    claim: ClaimRecord
    device: DeviceRecord
    device_uuid: str

    @property
    def uuid(self) -> str:
        """What a program that watches devices calls it: the partition's UUID, or the whole device's."""
        if self.device.kind == PARTITION:
            return self.device.partition_uuid or ""
        return self.device_uuid

    @property
    def partition_id(self) -> str:
        """The number that the partition has on its device; "" for a whole one."""
        number = self.device.instance_id
        return str(number) if self.device.kind == PARTITION and number is not None else ""


def holdings(records: Iterable[ClaimRecord]) -> tuple[Holding, ...]:
    """Return every device of every prepared claim, of a group each member."""
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
    """Return the pods and containers that have devices of prepared claims, with each physical device. See ``assign_devices``."""
    prepared = [record for record in records if record.prepared]
    return tuple(
        (each, Holding(each.claim, each.device, uuid))
        for each in assign_devices(driver, prepared, containers, pods)
        for uuid in each.device.device_uuids
    )


def causes_of(picture: Picture) -> dict[str, dict[str, str]]:
    """Return what is wrong with each physical device: by its UUID, or its name where it never told one, cause and effect.

    Causes that have a value are told with it ("cause-value"). The effect is that of the taint, "None" where there is none; a device
    that is not published has the effect "NotPublished".
    """
    found: dict[str, dict[str, str]] = {}
    survey = picture.snapshot.survey
    for finding in survey.findings if survey is not None else ():
        if finding.fault is not None and not finding.awaited and finding.device is None:
            found.setdefault(finding.uuid or finding.name, {})[finding.fault.cause] = "NotPublished"
            continue
        for ailment in picture.ailments.get(finding.uuid, ()):
            cause = "-".join(part for part in (ailment.sign.cause, ailment.sign.value) if part)
            found.setdefault(finding.uuid, {})[cause] = ailment.effect(picture.effects) or "None"
    return found


def is_well(picture: Picture, finding: Finding) -> bool:
    """Whether nothing keeps a physical device from being given away."""
    worst = severity(picture.ailments.get(finding.uuid, ()))
    return finding.fault is None and worst in (None, Severity.INFORMATIVE)


def names_of(survey: Survey) -> dict[str, str]:
    """Return the published name of each whole device by its UUID; of one that is published in parts alone, product and index."""
    return {
        **{device.uuid: f"{device.product} {device.index}" for device in survey.devices.values()},
        **{offer.device_uuid: offer.name for offer in survey.offers if offer.kind == DEVICE},
    }


def states_of(survey: Survey) -> Counter[str]:
    """Count physical devices by how they are: well, faulty, or awaited."""
    counts = Counter({"well": 0, "faulty": 0, "awaited": 0})
    for finding in survey.findings:
        counts["awaited" if finding.awaited else "faulty" if finding.fault is not None else "well"] += 1
    return counts


def offered(survey: Survey) -> Counter[tuple[str, str]]:
    """Count published devices by kind, and by profile where they have one."""
    return Counter((offer.kind, offer.profile or "") for offer in survey.offers)


def partitions_of(survey: Survey, records: Iterable[ClaimRecord]) -> Counter[tuple[str, str, str]]:
    """Count partitions that exist by device, profile and who made them: a claim, or an administrator."""
    ours = {(device.device_uuid, device.key) for record in records for device in record.devices if device.created}
    return Counter(
        (device.uuid, partition.profile, "claim" if (device.uuid, partition.key) in ours else "administrator")
        for device in survey.devices.values()
        for partition in device.partitions
    )
