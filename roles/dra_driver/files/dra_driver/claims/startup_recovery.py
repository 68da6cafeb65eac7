# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Plan the recovery of claims when the driver starts, and compare prepared devices with the current allocation.

The facts are from the store, the CDI directory, the hardware, and the API server. After the recovery, each claim is
either prepared or completely removed.

The first part does not need the API server. Incomplete claims are undone, and the kubelet calls again for them. Prepared
claims are restored, also after a reboot. CDI files without a claim are removed.

The second part runs when the API server answers. Claims that do not exist there, or that no longer have this node's
devices, are undone, unless processes use the devices.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..core.errors import AcceleratorError, InUse
from ..core.host.cdi import list_specs, spec_path
from ..core.host.system import System
from ..core.model import Device
from ..core.store.prepared_claims import CLAIM_ANNOTATION
from .allocation import Allocation
from .configs import settings_by_uuid
from .plan import PARTITIONING_KEY, ModeChange, must_disable_partitioning, plan_restore, restore_changes_devices
from .store.files import StoreError
from .store.records import ClaimRecord, record_of_document

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveryPlan:
    """The actions at start, in this order.

    ``undo`` and ``restore`` are UIDs of claims. ``stale_files`` are UIDs of CDI files without a claim. ``mode_changes``
    are devices without partitions on which the driver left partitioning enabled.
    """

    undo: tuple[str, ...]
    restore: tuple[str, ...]
    stale_files: tuple[str, ...]
    mode_changes: tuple[ModeChange, ...]


def plan_recovery(
    records: Mapping[str, ClaimRecord],
    cdi_uids: Collection[str],
    devices: Mapping[str, Device],
    meta: Mapping[str, str],
    *,
    dynamic: Collection[str],
    boot_id: str,
    invalid: Collection[str] = (),
) -> RecoveryPlan:
    """Return the recovery plan from the store, the CDI files, and the devices.

    ``invalid`` are UIDs of claims whose CDI file must be written again.
    """
    undo, restore = [], []
    for record in sorted(records.values(), key=lambda record: record.created_at):
        if not record.prepared:
            undo.append(record.uid)
        elif record.uid in invalid or _needs_restore(record, cdi_uids, devices, dynamic, boot_id):
            restore.append(record.uid)
    in_use = {uuid for record in records.values() if record.prepared for uuid in record.device_uuids}
    modes = [
        ModeChange(uuid, enabled=False)
        for uuid, device in devices.items()
        if uuid not in in_use and uuid not in _uuids_of(records, undo) and must_disable_partitioning(device, meta)
    ]
    return RecoveryPlan(
        undo=tuple(undo),
        restore=tuple(restore),
        stale_files=tuple(sorted(set(cdi_uids) - set(records))),
        mode_changes=tuple(modes),
    )


def _uuids_of(records: Mapping[str, ClaimRecord], uids: Iterable[str]) -> set[str]:
    return {uuid for uid in uids for uuid in records[uid].device_uuids}


def _needs_restore(
    record: ClaimRecord,
    cdi_uids: Collection[str],
    devices: Mapping[str, Device],
    dynamic: Collection[str],
    boot_id: str,
) -> bool:
    if record.boot_id != boot_id or (record.devices and record.uid not in cdi_uids):
        return True
    if settings_by_uuid(record) or record.shared:
        return True  # not all settings can be read, and an interrupted undo may have restored some of them
    try:
        return restore_changes_devices(plan_restore(record, devices, dynamic), record)
    except AcceleratorError:
        return True  # the attempt to restore reports the reason, and the claim is marked


def corrected_content(
    stored: Mapping[str, ClaimRecord], file_records: Iterable[ClaimRecord], boot_id: str
) -> Mapping[str, ClaimRecord] | None:
    """Return the corrected claims of a store that is older than the CDI files of this boot; None if the store is current.

    A claim that changes hardware is written to the store before its file, and is removed from it after the file. If such
    a claim has a file and is missing in the store, the store has lost newer data: SQLite truncates a damaged log without
    an error, or an administrator has restored an old copy. If the store and the file differ about a claim, the store is
    older too, or has a changed bit, which SQLite does not detect.

    A claim without a file is removed from the content if the file of another claim has the same device or partition. Else
    a claim of this boot without a file was probably released, so it becomes *preparing*, which means that it is undone.
    """
    files = {record.uid: record for record in file_records if record.boot_id == boot_id}
    places_without_file = {place for uid, record in stored.items() if uid not in files for place in _places(record)}
    if all(
        _has_same_devices(stored[uid], record)
        if uid in stored
        else _changes_only_files(record) and not _places(record) & places_without_file
        for uid, record in files.items()
    ):
        return None
    taken = {place for record in files.values() for place in _places(record)}
    kept = {
        uid: record.as_preparing() if record.boot_id == boot_id and record.devices else record
        for uid, record in stored.items()
        if not _places(record) & taken
    }
    return {**kept, **files}


def _places(record: ClaimRecord) -> set[tuple[str, tuple[int, int, int] | None]]:
    """Return the devices and partitions that only this claim can have: those without administrator access and shares."""
    return {
        (uuid, device.key)
        for device in record.devices
        if not device.admin and not device.share_id
        for uuid in device.device_uuids
    }


def _changes_only_files(record: ClaimRecord) -> bool:
    """Return whether a claim changes no hardware. Such a claim is written to the store after its file."""
    return not any(
        each.created or each.settings or each.sharing or each.passthrough or each.fabric for each in record.devices
    )


def _has_same_devices(stored: ClaimRecord, file_record: ClaimRecord) -> bool:
    """Return whether two records have the same name and devices.

    The IDs of partitions are ignored, because the file of a restored claim is written before its record.
    """
    lasting = [
        [replace(device, partition_uuid=None, instance_id=None, passthrough={}) for device in record.devices]
        for record in (stored, file_record)
    ]
    names = [(record.namespace, record.name) for record in (stored, file_record)]
    return lasting[0] == lasting[1] and names[0] == names[1]


def claims_with_complete_files(
    stored: Mapping[str, ClaimRecord], file_records: Iterable[ClaimRecord], boot_id: str
) -> tuple[ClaimRecord, ...]:
    """Return the claims with a CDI file of this boot that are missing or incomplete in the store.

    Their preparation was complete, because the file is written last. The kubelet may have received the answer.
    """
    return tuple(
        record
        for record in file_records
        if record.boot_id == boot_id and not (record.uid in stored and stored[record.uid].prepared)
    )


def rebuilt_content(
    valid_content: Mapping[str, ClaimRecord], file_records: Iterable[ClaimRecord], boot_id: str
) -> Mapping[str, ClaimRecord]:
    """Return the claims for a new store in place of a damaged one: its valid claims, and the claims from CDI files.

    The valid claims are corrected like an old copy of a store. Claims from files of previous boots are added if no other
    claim has their devices and partitions, because a damaged store does not show whether these claims have ended.
    """
    file_records = tuple(file_records)
    current = corrected_content(valid_content, file_records, boot_id)
    kept = dict(valid_content if current is None else current)
    kept.update({record.uid: record for record in claims_with_complete_files(kept, file_records, boot_id)})
    taken = {place for record in kept.values() for place in _places(record)}
    from_previous_boots = {
        record.uid: record for record in file_records if record.uid not in kept and not _places(record) & taken
    }
    return {**from_previous_boots, **kept}


def obsolete_partitioning_entries(devices: Mapping[str, Device], meta: Mapping[str, str]) -> dict[str, None]:
    """Return changes of the meta table that remove the entries of devices on which partitioning is disabled now."""
    return {
        f"{PARTITIONING_KEY}{uuid}": None
        for uuid, device in devices.items()
        if f"{PARTITIONING_KEY}{uuid}" in meta and not device.partitioning.enabled
    }


def pids_using(record: ClaimRecord, devices: Mapping[str, Device]) -> tuple[int, ...]:
    """Return the PIDs of the processes on the devices of a claim. They show that a pod still runs."""
    found: set[int] = set()
    for device_record in record.devices:
        for device in (devices[uuid] for uuid in device_record.device_uuids if uuid in devices):
            if device_record.key is None:
                found.update(process.pid for process in device.processes)
            for partition in device.partitions:
                if device_record.key is not None and device_record.describes(partition):
                    found.update(process.pid for process in partition.processes)
    return tuple(sorted(found))


def records_in_files(system: System, directory: str, kind: str) -> tuple[ClaimRecord, ...]:
    """Read the claims' records from their CDI files.

    Files without a record are logged and skipped. Raises NewerRelease, StoreError.
    """
    found = []
    for uid in list_specs(system, directory, kind):
        path = spec_path(directory, kind, uid)
        try:
            document = json.loads(system.read_text(path))
            record = record_of_document(document["annotations"][CLAIM_ANNOTATION])
            if record.uid != uid:
                raise ValueError(f"it is the record of claim {record.uid}")
        except FileNotFoundError:
            continue  # deleted since
        except OSError as error:
            raise StoreError(
                f"The CDI file {path} cannot be read: {error}. It can have a claim that the store lacks",
                hint="Check the file system. If the file stays unreadable, delete it. The store alone then has the claim.",
                code="store-unreadable",
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            LOG.warning("the CDI file %s has no readable data about its claim (%s)", path, error)
            continue
        found.append(record)
    return tuple(found)


#: Request, pool, name, and share ID of each device of a claim.
DeviceSet = frozenset[tuple[str, str, str, str]]


def prepared_devices(record: ClaimRecord) -> DeviceSet:
    """Return the prepared devices."""
    return frozenset(
        (device_record.request, device_record.pool, device_record.name, device_record.share_id)
        for device_record in record.devices
    )


def allocated_devices(allocation: Allocation) -> DeviceSet:
    """Return the currently allocated devices."""
    return frozenset((each.request, each.pool, each.device, each.share_id) for each in allocation.devices)


def reallocated(record: ClaimRecord, allocation: Allocation) -> bool:
    """Return whether the allocation of a prepared claim has changed."""
    return prepared_devices(record) != allocated_devices(allocation)


def refuse_in_use(
    record: ClaimRecord, allocation: Allocation, devices: Mapping[str, Device], faults: Mapping[str, str]
) -> None:
    """Refuse to undo a claim with a changed allocation while its previous devices are, or may be, in use.

    Raises InUse with both allocations and the processes.
    """
    pids = pids_using(record, devices)
    if not pids and not faults:
        return
    previous, current = (
        ", ".join(sorted(name for _request, _pool, name, _share in each)) or "nothing"
        for each in (prepared_devices(record), allocated_devices(allocation))
    )
    reason = (
        "; ".join(f"{uuid}: {text}" for uuid, text in faults.items()) or f"processes {', '.join(map(str, pids))} use it"
    )
    raise InUse(
        f"Claim {record.describe()} was prepared with {previous}, and {current} is allocated now. Its previous devices cannot be unprepared: {reason}",
        pids=pids,
        claims=(record.describe(),),
        hint="Delete the pods that use the claim. It is prepared again when nothing uses the previous devices.",
        code="allocation-changed",
    )
