# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Plan the recovery of claims when the driver starts, and compare prepared devices with the current allocation.

The facts are from the store, the CDI directory, the hardware, and the API server. Every claim ends prepared or
completely removed. The first part does not need the API server. Incomplete claims are undone (the kubelet asks again),
prepared claims are restored, also after a reboot, and CDI files without a claim are removed. The second part runs when
the API server answers. Claims that do not exist there, or have lost this node's devices, are undone, unless processes
use them.
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
from .configs import wanted_of
from .plan import PARTITIONING_KEY, ModeChange, mode_goes_off, plan_restore, restore_is_needed
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
        if uuid not in in_use and uuid not in _touched(records, undo) and mode_goes_off(device, meta)
    ]
    return RecoveryPlan(
        undo=tuple(undo),
        restore=tuple(restore),
        stale_files=tuple(sorted(set(cdi_uids) - set(records))),
        mode_changes=tuple(modes),
    )


def _touched(records: Mapping[str, ClaimRecord], uids: Iterable[str]) -> set[str]:
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
    if wanted_of(record) or record.shared:
        return True  # not all settings can be read, and an interrupted undo may have restored some of them
    try:
        return restore_is_needed(plan_restore(record, devices, dynamic), record)
    except AcceleratorError:
        return True  # the attempt to restore reports the reason, and the claim is marked


def amended(
    stored: Mapping[str, ClaimRecord], file_records: Iterable[ClaimRecord], boot_id: str
) -> Mapping[str, ClaimRecord] | None:
    """Return the corrected content of a store that is older than the CDI files of this boot; None if the store is current.

    A claim that changes hardware is in the store before its file is written, and until after the file is removed. If
    such a claim is missing in the store, the store has lost newer data: SQLite silently truncates a damaged log, or
    an old copy was restored. If the store and the file differ about a claim, the store is older too, or has a changed
    bit, which SQLite does not detect.

    A claim without a file stays, unless the file of another claim uses the same device or partition. Then it must be
    undone, if it was prepared in this boot. Because the file is removed first, such a claim was released, and must not
    be restored.
    """
    files = {record.uid: record for record in file_records if record.boot_id == boot_id}
    holders = {place for uid, record in stored.items() if uid not in files for place in _places(record)}
    if all(
        _has_same_devices(stored[uid], record)
        if uid in stored
        else _is_files_alone(record) and not _places(record) & holders
        for uid, record in files.items()
    ):
        return None
    taken = {place for record in files.values() for place in _places(record)}
    left = {
        uid: record.as_preparing() if record.boot_id == boot_id and record.devices else record
        for uid, record in stored.items()
        if not _places(record) & taken
    }
    return {**left, **files}


def _places(record: ClaimRecord) -> set[tuple[str, tuple[int, int, int] | None]]:
    """Return the devices and partitions that only this claim can have: those without administrator access and shares."""
    return {
        (uuid, device.key)
        for device in record.devices
        if not device.admin and not device.share_id
        for uuid in device.device_uuids
    }


def _is_files_alone(record: ClaimRecord) -> bool:
    """Return whether only files were created for a claim.

    Such a claim is written to the store at the end, not before.
    """
    return not any(
        each.created or each.settings or each.sharing or each.passthrough or each.fabric for each in record.devices
    )


def _has_same_devices(stored: ClaimRecord, file_records: ClaimRecord) -> bool:
    """Return whether two records are equal in their devices.

    The file has the ID of a restored partition before the store does.
    """
    lasting = [
        [replace(device, partition_uuid=None, instance_id=None, passthrough={}) for device in record.devices]
        for record in (stored, file_records)
    ]
    names = [(record.namespace, record.name) for record in (stored, file_records)]
    return lasting[0] == lasting[1] and names[0] == names[1]


def completed(
    stored: Mapping[str, ClaimRecord], file_records: Iterable[ClaimRecord], boot_id: str
) -> tuple[ClaimRecord, ...]:
    """Return the claims whose CDI files of this boot show a complete preparation, but which are missing or incomplete in the store.

    The file is written last. The kubelet may have received the answer, so the claim is kept.
    """
    return tuple(
        record
        for record in file_records
        if record.boot_id == boot_id and not (record.uid in stored and stored[record.uid].prepared)
    )


def found_again(
    sound: Mapping[str, ClaimRecord], file_records: Iterable[ClaimRecord], boot_id: str
) -> Mapping[str, ClaimRecord]:
    """Return the content for a new store in place of a damaged one: its valid claims, and the claims from CDI files.

    The valid claims are treated like a store that can have lost others. Files of previous boots count if no other claim
    has their devices and partitions, because a damaged store is no proof that these claims ended.
    """
    file_records = tuple(file_records)
    current = amended(sound, file_records, boot_id)
    kept = dict(sound if current is None else current)
    kept.update({record.uid: record for record in completed(kept, file_records, boot_id)})
    taken = {place for record in kept.values() for place in _places(record)}
    former = {record.uid: record for record in file_records if record.uid not in kept and not _places(record) & taken}
    return {**former, **kept}


def stale_marks(devices: Mapping[str, Device], meta: Mapping[str, str]) -> dict[str, None]:
    """Return the removal of obsolete "the driver enabled partitioning" marks, as changes of the meta table."""
    return {
        f"{PARTITIONING_KEY}{uuid}": None
        for uuid, device in devices.items()
        if f"{PARTITIONING_KEY}{uuid}" in meta and not device.partitioning.enabled
    }


def droppable(record: ClaimRecord, devices: Mapping[str, Device]) -> bool:
    """Return whether no process uses the devices of a claim that does not exist in the API server.

    The kubelet unprepares a claim when its pod has ended, unless it has lost its state. Processes on the claim's
    devices show that a pod still runs.
    """
    return not users(record, devices)


def users(record: ClaimRecord, devices: Mapping[str, Device]) -> tuple[int, ...]:
    """Return the PIDs of the processes on the devices of a claim."""
    found: set[int] = set()
    for held in record.devices:
        for device in (devices[uuid] for uuid in held.device_uuids if uuid in devices):
            if held.key is None:
                found.update(process.pid for process in device.processes)
            for partition in device.partitions:
                if held.key is not None and held.has(partition):
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
                raise ValueError(f"it speaks of claim {record.uid}")
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


# Request, pool, device, and share of each device.
Given = frozenset[tuple[str, str, str, str]]


def prepared_for(record: ClaimRecord) -> Given:
    """Return the prepared devices."""
    return frozenset((held.request, held.pool, held.name, held.share_id) for held in record.devices)


def given_to(allocation: Allocation) -> Given:
    """Return the currently allocated devices."""
    return frozenset((each.request, each.pool, each.device, each.share_id) for each in allocation.devices)


def reallocated(record: ClaimRecord, allocation: Allocation) -> bool:
    """Return whether the allocation of a prepared claim has changed."""
    return prepared_for(record) != given_to(allocation)


def refuse_in_use(
    record: ClaimRecord, allocation: Allocation, devices: Mapping[str, Device], faults: Mapping[str, str]
) -> None:
    """Refuse to undo a claim with a changed allocation while its previous devices are, or may be, in use.

    Raises InUse with both allocations and the processes.
    """
    if droppable(record, devices) and not faults:
        return
    pids = users(record, devices)
    before, now = (
        ", ".join(sorted(name for _request, _pool, name, _share in each)) or "nothing"
        for each in (prepared_for(record), given_to(allocation))
    )
    why = (
        "; ".join(f"{uuid}: {text}" for uuid, text in faults.items()) or f"processes {', '.join(map(str, pids))} use it"
    )
    raise InUse(
        f"Claim {record.describe()} was prepared with {before}, and {now} is allocated now. Its previous devices cannot be unprepared: {why}",
        pids=pids,
        claims=(record.describe(),),
        hint="Delete the pods that use the claim. It is prepared again when nothing uses the previous devices.",
        code="allocation-changed",
    )
