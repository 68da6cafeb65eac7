# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Track the health of devices: combine scans and device events, and publish faults to ResourceSlices, the kubelet, and Events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Callable, Protocol

from ..claims.claim_statuses import MissingDevice
from ..claims.store.records import ClaimRecord
from ..core.health import repair_marks
from ..core.health import tracker as health_tracker
from ..core.health.conditions import Severity
from ..core.health.tracker import Moment, TrackedFault, TrackedFaults
from ..core.host.system import System
from ..core.model import Device, Notice, Offer
from ..inventory import Survey
from ..kubelet.health import DeviceReport, DeviceState
from ..logs import StateLog, fields
from .driver_state import Shared, Snapshot

LOG = logging.getLogger(__name__)

FILE = "health.json"  # in the state directory of the driver
FORMAT = 1  # the version of the file's format, as ``form`` in the file


@dataclass(frozen=True)
class HardwareState:
    """The last scan and the tracked faults, for all readers.

    ``snapshot`` is the last scan, with the taints in the offers of its survey. ``faults`` are the faults by device UUID. ``effects``
    are the taint effects by severity. ``missing`` are the devices of prepared claims that no longer exist.
    """

    snapshot: Snapshot = field(default_factory=Snapshot)
    faults: Mapping[str, TrackedFaults] = field(default_factory=dict)
    effects: Mapping[Severity, str] = field(default_factory=lambda: health_tracker.DEFAULT_EFFECTS)
    missing: tuple[MissingDevice, ...] = ()

    def faults_of(self, offer: Offer) -> TrackedFaults:
        """Return the faults of a published device."""
        survey = self.snapshot.survey
        return health_tracker.faults_of_offer(offer, survey.devices, self.faults) if survey is not None else ()

    def reports(self, pool: str, now: float, clock: float, expiry: float) -> tuple[DeviceReport, ...]:
        """Return the health of all published devices. It is unknown if the last scan is more than ``expiry`` seconds old.

        ``now`` is the current time in seconds since the epoch, and ``clock`` the current time of the monotonic clock. The kubelet compares
        the reported time of the scan with the system clock. This clock may have been set since the scan, so the time is computed from ``now``.
        """
        snapshot = self.snapshot
        age = clock - snapshot.scanned_clock
        seen_at = max(now - age, 0.0) if snapshot.scanned_at else 0.0
        unknown = snapshot.given_up
        if not unknown and age > expiry:
            unknown = f"The hardware was last scanned {age:.0f} s ago."
        if unknown:
            return tuple(
                DeviceReport(pool, name, DeviceState.UNKNOWN, unknown, seen_at) for name in snapshot.inventory.offers
            )
        missing_reports = {
            each.device_record.name: DeviceReport(
                pool, each.device_record.name, DeviceState.UNHEALTHY, each.sign.describe(), seen_at
            )
            for each in self.missing
        }
        offers = (offer for offer in snapshot.inventory.offers.values() if offer.name not in missing_reports)
        return (*(_report(pool, offer, self.faults_of(offer), seen_at) for offer in offers), *missing_reports.values())


class HardwareHealth:
    """The health of the devices for the kubelet. ``expiry`` returns the age in seconds above which a scan does not count."""

    def __init__(self, hardware_states: Shared[HardwareState], pool: str, expiry: Callable[[], float]) -> None:
        self._hardware_states = hardware_states
        self._pool = pool
        self._expiry = expiry

    def reports(self) -> tuple[DeviceReport, ...]:
        """Return the current health of all devices."""
        return self._hardware_states.value.reports(self._pool, time.time(), time.monotonic(), self._expiry())

    async def changed(self, seconds: float) -> None:
        """Wait until the health changes, up to ``seconds``."""
        known = _without_times(self.reports())
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await self._hardware_states.changed(left)
            if _without_times(self.reports()) != known:
                return


def _without_times(reports: Collection[DeviceReport]) -> list[tuple[str, DeviceState, str]]:
    return [(each.name, each.state, each.message) for each in reports]


def _report(pool: str, offer: Offer, faults: TrackedFaults, seen_at: float) -> DeviceReport:
    state = DeviceState.HEALTHY
    if (health_tracker.severity(faults) or Severity.INFORMATIVE) > Severity.INFORMATIVE:
        state = DeviceState.UNHEALTHY
    worst = sorted(faults, key=lambda each: (-each.sign.severity, each.since))
    return DeviceReport(pool, offer.name, state, " ".join(each.sign.describe() for each in worst), seen_at)


class FaultReporter(Protocol):
    """Reports the start and the end of device faults."""

    def report_fault(self, device: str, fault: TrackedFault, records: Collection[ClaimRecord]) -> None:
        """Report a new fault of a device, and the claims that use the affected device or partition."""

    def report_recovery(self, device: str, fault: TrackedFault, records: Collection[ClaimRecord]) -> None:
        """Report the end of a fault."""


class HealthSupervisor:
    """Track the faults of one vendor's devices from snapshots and device events, and write ``hardware_states`` and a file.

    ``scan_requested`` requests a scan, because a second scan verifies the start and the end of a fault. A mark is a file with which an
    administrator or another program reports that it has reset or repaired a device (core/health/repair_marks.py).
    """

    def __init__(
        self,
        *,
        driver: str,
        directory: str,
        system: System,
        boot_id: str,
        effects: Mapping[Severity, str],
        snapshots: Shared[Snapshot],
        hardware_states: Shared[HardwareState],
        scan_requested: asyncio.Event,
        reporter: FaultReporter,
        claims: Callable[[], Collection[ClaimRecord]],
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._driver = driver
        self._directory = directory
        self._path = f"{directory}/{FILE}"
        self._system = system
        self._boot_id = boot_id
        self._effects = effects
        self._snapshots = snapshots
        self._hardware_states = hardware_states
        self._scan_requested = scan_requested
        self._reporter = reporter
        self._claims = claims
        self._now = now
        self._clock = clock
        self._faults: dict[str, TrackedFaults] = {}
        self._missing_devices: tuple[MissingDevice, ...] = ()
        #: The names of applied marks whose files still exist.
        self._applied_marks: set[str] = set()
        #: The state that was last queued for writing; None after a failed write.
        self._last_saved: tuple[object, ...] | None = ({}, frozenset())
        #: The content to be written next, and the marks that are applied in it.
        self._pending_write: tuple[bytes, frozenset[str]] | None = None
        self._write_task: asyncio.Task[None] | None = None
        self._file_log, self._marks_log = StateLog(LOG), StateLog(LOG)
        self._is_loaded = False
        self._verification_timer: asyncio.TimerHandle | None = None
        #: The time of the last scan, on the monotonic clock, and the UUIDs of its devices.
        self._scanned: tuple[float, frozenset[str]] = (float("-inf"), frozenset())

    async def run(self) -> None:
        """Process each scan until canceled."""
        self._load()
        try:
            async for snapshot in self._snapshots.follow():
                self._load()
                if snapshot.survey is not None:
                    self._apply_scan(snapshot.survey)
                self._publish()
                self._save_if_changed()
        finally:
            if self._write_task is not None:
                await asyncio.wait((self._write_task,))

    def record_events(self, notices: Collection[Notice]) -> None:
        """Add the faults in these events of devices. The caller requests a scan."""
        survey = self._snapshots.value.survey
        changed = False
        for notice in notices:
            if notice.sign is None or not notice.uuid:
                continue
            device = survey.devices.get(notice.uuid) if survey is not None else None
            processes = _processes_on(device, notice.sign.instance)
            if notice.sign.only_in_use and not processes and not self._claims_on_device(notice.uuid):
                continue
            before = self._faults.get(notice.uuid, ())
            after = health_tracker.apply_report(before, notice.sign, processes, self._moment())
            changed = self._store_faults(notice.uuid, before, after, device) or changed
        if changed:
            self._publish()
            self._save_if_changed()

    def publish_missing_devices(self, missing: tuple[MissingDevice, ...]) -> None:
        """Publish these devices of prepared claims as missing. They no longer exist."""
        self._missing_devices = missing
        self._publish()

    def end_reset_faults(self, uuid: str) -> None:
        """End the faults of a device that was just reset."""
        if self._end_repaired_faults(uuid, repair_marks.RESET):
            self._publish()
            self._save_if_changed()

    def apply_repair_marks(self) -> None:
        """End the faults of devices that have a new mark. Called while the vendor's library is closed.

        A mark is removed after the new state was written to the file. Until then the file has the mark's name. So a mark that could not be
        removed does not end a later fault, also after a restart.
        """
        self._load()
        if not self._is_loaded:
            return
        try:
            marks = repair_marks.read(self._directory)
        except OSError as error:
            self._marks_log.report(f"marks of repaired devices cannot be read: {error}", level=logging.WARNING)
            return
        new = [each for each in marks if each.name not in self._applied_marks]
        self._applied_marks = {each.name for each in marks}
        changed = [self._end_repaired_faults(each.uuid, each.what) for each in new]
        if any(changed):
            self._publish()
        self._save_if_changed()
        if self._pending_write is None and (self._write_task is None or self._write_task.done()):
            self._remove_marks(frozenset(self._applied_marks))

    def _remove_marks(self, names: Collection[str]) -> None:
        """Remove marks that are applied in the file. After an error, the next scan tries again."""
        errors = []
        for name in sorted(names):
            try:
                repair_marks.remove(self._directory, name)
            except OSError as error:
                errors.append(f"{name} ({error.strerror})")
        if errors:
            self._marks_log.report(
                f"applied marks of repaired devices cannot be removed from {self._directory}/{repair_marks.FOLDER}: "
                f"{', '.join(errors)}",
                level=logging.WARNING,
            )

    def _end_repaired_faults(self, uuid: str, what: str) -> bool:
        """End the faults that a reset or repair (``what``) of a device ends. Return whether the faults changed."""
        survey = self._snapshots.value.survey
        before = self._faults.get(uuid, ())
        device = survey.devices.get(uuid) if survey is not None else None
        after = (
            health_tracker.apply_reset(before) if what == repair_marks.RESET else health_tracker.apply_repair(before)
        )
        return self._store_faults(uuid, before, after, device)

    def _moment(self) -> Moment:
        return Moment(self._now(), self._boot_id, self._clock())

    def _apply_scan(self, survey: Survey) -> None:
        moment = self._moment()
        found = {finding.uuid for finding in survey.findings if finding.uuid}
        for finding in survey.findings:
            if finding.uuid:
                before = self._faults.get(finding.uuid, ())
                self._store_faults(
                    finding.uuid, before, health_tracker.apply_scan(before, finding, moment), finding.device
                )
        for uuid in [each for each in self._faults if each not in found]:
            if health_tracker.is_forgotten(self._faults[uuid], moment):
                del self._faults[uuid]
        self._scanned = (moment.clock, frozenset(found))
        if self._verification_timer is not None:
            self._verification_timer.cancel()
        self._request_verification()

    def _request_verification(self) -> None:
        """Request the scan that verifies a fault or its end, now or at its time."""
        self._verification_timer = None
        scanned, found = self._scanned
        due = health_tracker.verify_at((each for uuid in found for each in self._faults.get(uuid, ())), scanned)
        if due is None:
            return
        left = due - self._clock()
        if left > 0:
            self._verification_timer = asyncio.get_running_loop().call_later(left, self._request_verification)
        else:
            self._scan_requested.set()

    def _store_faults(self, uuid: str, before: TrackedFaults, after: TrackedFaults, device: Device | None) -> bool:
        """Store the faults of a device, and report new and ended ones. Return whether the faults changed."""
        if before == after:
            return False
        if after:
            self._faults[uuid] = after
        else:
            self._faults.pop(uuid, None)
        faults_before, faults_after = {each.sign.key: each for each in before}, {each.sign.key: each for each in after}
        name = device.describe() if device is not None else uuid
        for key in faults_after.keys() - faults_before.keys():
            LOG.warning(
                "%s is not well: %s",
                name,
                faults_after[key].sign.describe(),
                extra=self._fields(uuid, faults_after[key]),
            )
            self._reporter.report_fault(name, faults_after[key], self._claims_affected_by(uuid, faults_after[key]))
        for key in faults_before.keys() - faults_after.keys():
            LOG.info(
                "%s is well again: %s is over",
                name,
                faults_before[key].sign.cause,
                extra=self._fields(uuid, faults_before[key]),
            )
            self._reporter.report_recovery(name, faults_before[key], self._claims_affected_by(uuid, faults_before[key]))
        return True

    def _fields(self, uuid: str, fault: TrackedFault) -> dict[str, dict[str, Any]]:
        sign = fault.sign
        return fields(driver=self._driver, device=uuid, cause=sign.cause, value=sign.value, severity=sign.severity.word)

    def _claims_on_device(self, uuid: str) -> list[ClaimRecord]:
        """Return the claims that use a device or a partition of it."""
        return [record for record in self._claims() if any(uuid in each.device_uuids for each in record.devices)]

    def _claims_affected_by(self, uuid: str, fault: TrackedFault) -> list[ClaimRecord]:
        """Return the claims that use the device or the partition that a fault affects."""
        return [
            record
            for record in self._claims()
            if any(
                uuid in each.device_uuids and (fault.affects_whole_device or each.instance_id == fault.sign.instance)
                for each in record.devices
            )
        ]

    def _publish(self) -> None:
        snapshot = self._snapshots.value
        faults = dict(self._faults)
        survey = snapshot.survey
        if survey is not None:
            offers = health_tracker.tainted(self._driver, survey.offers, survey.devices, faults, self._effects)
            snapshot = replace(snapshot, survey=replace(survey, offers=offers))
        self._hardware_states.put(HardwareState(snapshot, faults, self._effects, self._missing_devices))

    def _load(self) -> None:
        """Read the faults of the previous process from the file.

        After a read error nothing is written, and the next scan reads the file again, because a fault that only a reset or repair ends
        must not be lost. A file with invalid content is copied to ``health.json.damaged``. Scans find most faults again.
        """
        if self._is_loaded:
            return
        try:
            found, applied = _read_file(self._system, self._directory)
        except OSError as error:
            text = f"{self._path} cannot be read, faults of an earlier process are not known: {error}. Repair the disk, or delete the file"
            self._file_log.report(text, level=logging.WARNING)
            return
        except ValueError as error:
            LOG.warning("cannot read the health of devices from %s (%s): starting without it", self._path, error)
            self._save_damaged_file()
            found, applied = {}, set()
        self._is_loaded = True
        for uuid, known in found.items():
            since_start = self._faults.get(uuid, ())
            keys = {each.sign.key for each in since_start}
            self._faults[uuid] = (*(each for each in known if each.sign.key not in keys), *since_start)
        self._applied_marks |= applied
        self._last_saved = (
            {uuid: [_persistent_fields(each) for each in known] for uuid, known in found.items()},
            frozenset(applied),
        )

    def _save_damaged_file(self) -> None:
        with contextlib.suppress(OSError):
            data = self._system.read_bytes(self._path)
            self._system.write_atomic(f"{self._path}.damaged", data, mode=0o600)

    def _state_to_save(self) -> tuple[object, ...]:
        """Return the state whose changes must be written. Another report of the same fault is no change."""
        faults = {uuid: [_persistent_fields(each) for each in found] for uuid, found in self._faults.items()}
        return faults, frozenset(self._applied_marks)

    def _save_if_changed(self) -> None:
        """Queue the state for writing if it has changed."""
        kept = self._state_to_save()
        if kept == self._last_saved or not self._is_loaded:
            return
        content = {
            "form": FORMAT,
            "devices": health_tracker.to_data(self._faults),
            "applied_marks": sorted(self._applied_marks),
        }
        self._last_saved, self._pending_write = (
            kept,
            ((json.dumps(content, indent=1) + "\n").encode(), frozenset(self._applied_marks)),
        )
        if self._write_task is None or self._write_task.done():
            self._write_task = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        """Write the last queued content. A slow disk must not delay the kubelet's calls, so a thread writes it."""
        while self._pending_write is not None:
            (data, marks), self._pending_write = self._pending_write, None
            try:
                await asyncio.to_thread(self._system.write_atomic, self._path, data, mode=0o600)
            except OSError as error:
                self._last_saved = None  # the next scan tries again
                self._file_log.report(f"{self._path} cannot be written: {error}", level=logging.WARNING)
            else:
                self._file_log.report(f"{self._path} is kept", level=logging.DEBUG)
                self._remove_marks(marks)


def known_faults(system: System, directory: str) -> dict[str, TrackedFaults]:
    """Return the faults in the file of a state directory, by device UUID. Raises OSError, and ValueError for invalid content."""
    return _read_file(system, directory)[0]


def _read_file(system: System, directory: str) -> tuple[dict[str, TrackedFaults], set[str]]:
    """Return the faults by device UUID, and the names of applied marks; nothing without a file. Raises OSError and ValueError."""
    try:
        data = json.loads(system.read_text(f"{directory}/{FILE}"))
    except FileNotFoundError:
        return {}, set()
    if not isinstance(data, dict) or data.get("form") != FORMAT:
        raise ValueError(f"it has another form than {FORMAT}")
    return health_tracker.from_data(data.get("devices")), set(map(str, data.get("applied_marks") or ()))


def _processes_on(device: Device | None, instance: int | None) -> frozenset[int]:
    """Return the PIDs of the processes that use a device, or only its partition with this instance ID."""
    if device is None:
        return frozenset()
    if instance is None:
        return frozenset(process.pid for process in device.processes)
    return frozenset(
        process.pid for each in device.partitions if each.instance_id == instance for process in each.processes
    )


def _persistent_fields(fault: TrackedFault) -> object:
    """Return the fields of a fault whose changes must be written to the file."""
    return (
        fault.sign.key,
        fault.sign.severity,
        fault.since,
        fault.is_confirmed,
        fault.processes,
        fault.boot,
        fault.asked,
    )
