# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""What to do about claims when the driver starts, decided from the store, the CDI folder, the hardware and the API.

Every claim ends prepared or cleanly gone. First, without the API server: what was being prepared is undone (the kubelet
asks again), what was prepared exists again, also after a reboot, and CDI files of no claim are removed. Later, when the
API server answers: claims that are gone from it or have lost this node's devices are undone, unless processes use them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from ..core.cdi import list_specs, spec_path
from ..core.errors import AcceleratorError
from ..core.model import Device
from ..core.prepared import CLAIM_ANNOTATION
from ..core.system import System
from .plan import PARTITIONING_KEY, ModeChange, mode_goes_off, plan_restore, restore_is_needed
from .records import ClaimRecord, record_of_document
from .settings import wanted_of

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class RecoveryPlan:
    """What to do at start, in this order.

    ``undo`` and ``restore`` are UIDs of claims, ``stale_files`` UIDs whose CDI file belongs to no claim, and
    ``mode_changes`` devices on which the driver left partitioning on with nothing on them.
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
    """Compare the store with the CDI files and the devices. ``invalid`` are UIDs whose CDI file has to be written again."""
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
        return True  # not all settings can be read, and a run that was ended may have set some of them back
    try:
        return restore_is_needed(plan_restore(record, devices, dynamic), record)
    except AcceleratorError:
        return True  # the attempt to restore says why, and the claim is marked


def amended(
    stored: Mapping[str, ClaimRecord], told: Iterable[ClaimRecord], boot_id: str
) -> Mapping[str, ClaimRecord] | None:
    """Return what a store has to hold that is older than the CDI files of this boot; None for one that is not.

    A claim for which hardware is changed is in the store before its file is written, and until after the file is gone. Where the
    store lacks one it has lost what came since: SQLite cuts a damaged log without a word, and somebody may have put a copy back.
    Where it says something else of a claim it is older as well, or a bit of it has turned, which SQLite does not notice. What it
    holds without a file stays, unless a file tells of another claim in the same place: to be undone, if it was prepared in this
    boot. Its file goes first, so it has been given back since, and to make it again would bring back what nobody has.
    """
    files = {record.uid: record for record in told if record.boot_id == boot_id}
    holders = {place for uid, record in stored.items() if uid not in files for place in _places(record)}
    if all(
        _tell_the_same(stored[uid], record)
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
    """What a claim has that no other claim can have; administrators look on."""
    return {
        (uuid, device.key)
        for device in record.devices
        if not device.admin and not device.share_id
        for uuid in device.device_uuids
    }


def _is_files_alone(record: ClaimRecord) -> bool:
    """Whether nothing but files was made for a claim: it is in the store when all is done, and not before."""
    return not any(
        each.created or each.settings or each.sharing or each.passthrough or each.fabric for each in record.devices
    )


def _tell_the_same(stored: ClaimRecord, told: ClaimRecord) -> bool:
    """Whether two records are of the same devices. What a restored partition is called is in the file before it is in the store."""
    lasting = [
        [replace(device, partition_uuid=None, instance_id=None, passthrough={}) for device in record.devices]
        for record in (stored, told)
    ]
    names = [(record.namespace, record.name) for record in (stored, told)]
    return lasting[0] == lasting[1] and names[0] == names[1]


def completed(stored: Mapping[str, ClaimRecord], told: Iterable[ClaimRecord], boot_id: str) -> tuple[ClaimRecord, ...]:
    """Return the claims that the store lacks or has as being prepared, and whose CDI files of this boot tell that all was done.

    The file is written last. Whether the kubelet was answered before the record was lost nobody knows: it is kept.
    """
    return tuple(
        record
        for record in told
        if record.boot_id == boot_id and not (record.uid in stored and stored[record.uid].prepared)
    )


def found_again(
    sound: Mapping[str, ClaimRecord], told: Iterable[ClaimRecord], boot_id: str
) -> Mapping[str, ClaimRecord]:
    """Return what a store has to hold whose file is damaged: the claims of which it is sound, and those that CDI files tell of.

    The sound ones are taken for a store that may have lost others. Of former boots' files, which such a store says nothing
    of, those count that stand in nobody's way.
    """
    told = tuple(told)
    current = amended(sound, told, boot_id)
    kept = dict(sound if current is None else current)
    kept.update({record.uid: record for record in completed(kept, told, boot_id)})
    taken = {place for record in kept.values() for place in _places(record)}
    former = {record.uid: record for record in told if record.uid not in kept and not _places(record) & taken}
    return {**former, **kept}


def stale_marks(devices: Mapping[str, Device], meta: Mapping[str, str]) -> dict[str, None]:
    """Return the marks "the driver switched partitioning on" of devices where it is off, as changes of the meta table."""
    return {
        f"{PARTITIONING_KEY}{uuid}": None
        for uuid, device in devices.items()
        if f"{PARTITIONING_KEY}{uuid}" in meta and not device.partitioning.enabled
    }


def droppable(record: ClaimRecord, devices: Mapping[str, Device]) -> bool:
    """Whether nothing uses the devices of a claim that is gone from the API.

    The kubelet unprepares a claim when its pod has ended, unless it has forgotten it; processes on the claim's devices
    show that a pod has not ended.
    """
    return not users(record, devices)


def users(record: ClaimRecord, devices: Mapping[str, Device]) -> tuple[int, ...]:
    """Return the processes on the devices of a claim."""
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
    """Read the claims' records back out of their CDI files; a file without one is logged and passed over. Raises NewerRelease."""
    found = []
    for uid in list_specs(system, directory, kind):
        path = spec_path(directory, kind, uid)
        try:
            document = json.loads(system.read_text(path))
            record = record_of_document(document["annotations"][CLAIM_ANNOTATION])
            if record.uid != uid:
                raise ValueError(f"it speaks of claim {record.uid}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            LOG.warning("the CDI file %s tells nothing about its claim (%s)", path, error)
            continue
        found.append(record)
    return tuple(found)
