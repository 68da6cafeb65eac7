# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Write metadata files for containers, and list devices in environment variables for a vendor's container runtime.

There is one metadata file for each request of a claim. The functions that write block. The files are removed with the
claim. A reboot removes them too, and they are written again after it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..core.dra import device_metadata
from ..core.dra.consumable_capacity import attributes_of_share
from ..core.errors import NotFound
from ..core.host.cdi import ContainerEdits
from ..core.host.system import System
from ..core.model import PARTITION, AttributeValue, Device, Partition
from ..core.vendors.protocol import Backend
from .allocation import ClaimError
from .store.records import ClaimRecord, DeviceRecord


def refuse_unlistable(record: ClaimRecord, common: ContainerEdits) -> None:
    """Refuse a claim whose containers would see fewer devices than they have, if variables list them.

    A variable has one value in a container, but the kubelet may add the devices of several requests to the container.
    Raises ClaimError.
    """
    if not common.lists:
        return
    names = " and ".join(name for name, _values in common.lists)
    requests = sorted({device_record.base_request for device_record in record.devices})
    if len(requests) > 1:
        raise ClaimError(
            f"Claim {record.describe()} has devices by {len(requests)} requests ({', '.join(requests)}), but the vendor's container "
            f"runtime reads the devices from {names}, which has one value in a container",
            hint="Request all of them in one request, or in claims of different containers; or remove the vendor from the "
            "driver's vendor_runtimes.",
            code="one-request",
        )
    if len({device_record.kind == PARTITION for device_record in record.devices}) > 1:
        raise ClaimError(
            f"Claim {record.describe()} has whole devices and partitions, and the vendor's container runtime takes one kind at a time",
            hint="Ask for one kind; or leave the vendor out of the driver's vendor_runtimes.",
            code="one-kind",
        )


def with_lists_joined(edits: Mapping[str, ContainerEdits]) -> Mapping[str, ContainerEdits]:
    """Return the edits of one request's devices, so that each edit lists all of them if variables list devices."""
    if not any(each.lists for each in edits.values()):
        return edits
    joined = ContainerEdits.merge(*(ContainerEdits(lists=each.lists) for each in edits.values()))
    return {name: replace(each, lists=joined.lists) for name, each in edits.items()}


@dataclass(frozen=True)
class ContainerFiles:
    """The files of one vendor, below ``directory``. ``previous`` is the directory that earlier releases used, or ""."""

    backend: Backend
    driver: str
    system: System
    directory: str
    previous: str = ""

    def write(
        self,
        record: ClaimRecord,
        facts: Mapping[str, Device],
        created: Mapping[str, Partition],
        pod_claim: str | None,
    ) -> Mapping[str, ContainerEdits]:
        """Write a claim's files. Return the mount of each with the request's first device, by CDI name.

        ``facts`` are from before partitions were created; ``created`` are the created ones, by CDI name. ``pod_claim`` is
        the pod's name for the claim. With None, it is taken from the existing files.
        """
        requests: dict[str, list[DeviceRecord]] = {}
        for device_record in record.devices:
            requests.setdefault(device_record.base_request, []).append(device_record)
        pod_claim_name = pod_claim if pod_claim is not None else self._written_pod_claim(record) or ""
        claim = device_metadata.ClaimName(record.namespace, record.name, record.uid, pod_claim_name)
        found: dict[str, ContainerEdits] = {}
        for request, devices in requests.items():
            path = f"{self.path(record.uid)}/{request}.json"
            mount = device_metadata.mount(
                self.driver, claim, request, path
            )  # checks the names before a file is written
            described = [
                device_metadata.DeviceMetadata(
                    each.request,
                    self.driver,
                    each.pool,
                    each.name,
                    {**self._attributes(each, facts, created), **attributes_of_share(each.share_id, each.consumed)},
                )
                for each in devices
            ]
            data = device_metadata.content(claim, described)
            if not self.system.make_file(path, data, in_new_folder=not found):
                self.system.remove_temporaries(path)
                self.system.write_atomic(path, data, durable=False)
            found[devices[0].cdi_name] = ContainerEdits(mounts=(mount,))
        return found

    def has_pod_claim(self, record: ClaimRecord, pod_claim: str) -> bool:
        """Return whether the files of a claim exist with this name, which is the pod's name for the claim."""
        return not record.devices or self._written_pod_claim(record) == pod_claim

    def path(self, claim_uid: str) -> str:
        """Return the directory of a claim's files."""
        return f"{self.directory}/{claim_uid}"

    def uids(self) -> tuple[str, ...]:
        """Return the UIDs of the claims that have files."""
        folders = filter(None, (self.directory, self.previous))
        return tuple(sorted({uid for each in folders for uid in self.system.list_directory(each)}))

    def remove(self, claim_uid: str) -> None:
        """Remove a claim's files, if they exist. Raises OSError."""
        for folder in self._paths(claim_uid):
            self.system.remove_tree(folder, durable=False)

    def _paths(self, claim_uid: str) -> tuple[str, ...]:
        return (self.path(claim_uid), *([f"{self.previous}/{claim_uid}"] if self.previous else []))

    def _written_pod_claim(self, record: ClaimRecord) -> str | None:
        """Return the pod's name for the claim from the existing files; None without files."""
        for folder in self._paths(record.uid):
            with contextlib.suppress(OSError):
                return device_metadata.pod_claim_in(
                    self.system.read_bytes(f"{folder}/{record.devices[0].base_request}.json")
                )
        return None

    def _attributes(
        self, device_record: DeviceRecord, facts: Mapping[str, Device], created: Mapping[str, Partition]
    ) -> Mapping[str, AttributeValue]:
        if device_record.facts is not None:
            return self.backend.device_attributes(device_record.facts, None, is_for_machine=True)
        if device_record.members and self.backend.grouping is not None:
            return self.backend.grouping.attributes_of(
                device_record.profile or "", [facts[uuid] for uuid in device_record.members]
            )
        device = facts[device_record.device_uuid]
        return self.backend.device_attributes(device, held_partition(device_record, device, created))


def held_partition(device_record: DeviceRecord, device: Device, created: Mapping[str, Partition]) -> Partition | None:
    """Return the partition of a claim, created just now or before; None for a whole device. Raises NotFound."""
    return (
        (created.get(device_record.cdi_name) or existing_partition(device_record, device))
        if device_record.kind == PARTITION
        else None
    )


def existing_partition(device_record: DeviceRecord, device: Device) -> Partition:
    """Return the existing partition of a claim on a device. Raises NotFound."""
    for partition in device.partitions:
        if device_record.describes(partition) and partition.uuid == device_record.partition_uuid:
            return partition
    raise NotFound(f"Partition {device_record.name} ({device_record.partition_uuid}) is not on {device.describe()}")
