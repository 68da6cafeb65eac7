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

FILE = "health.json"
FORM = 1


@dataclass(frozen=True)
class HardwareState:
    """The known state of the hardware. ``faults`` are the faults by device UUID.

    ``survey`` in ``snapshot`` has the offers with their taints. ``effects`` are the taint effects by severity.
    ``missing`` are the devices of prepared claims that no longer exist.
    """

    snapshot: Snapshot = field(default_factory=Snapshot)
    faults: Mapping[str, TrackedFaults] = field(default_factory=dict)
    effects: Mapping[Severity, str] = field(default_factory=lambda: health_tracker.DEFAULT_EFFECTS)
    missing: tuple[MissingDevice, ...] = ()

    def of(self, offer: Offer) -> TrackedFaults:
        """Return the faults of a published device."""
        survey = self.snapshot.survey
        return health_tracker.concerning(offer, survey.devices, self.faults) if survey is not None else ()

    def reports(self, pool: str, now: float, clock: float, expiry: float) -> tuple[DeviceReport, ...]:
        """Return the health of all published devices; unknown when the last scan is more than ``expiry`` seconds old.

        ``now`` is in seconds since the epoch, ``clock`` of the monotonic clock. The time of the last scan is in
        terms of ``now``: the kubelet compares it with the system clock, which may have been set since the scan.
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
        gone = {
            each.held.name: DeviceReport(pool, each.held.name, DeviceState.UNHEALTHY, each.sign.describe(), seen_at)
            for each in self.missing
        }
        offers = (offer for offer in snapshot.inventory.offers.values() if offer.name not in gone)
        return (*(_report(pool, offer, self.of(offer), seen_at) for offer in offers), *gone.values())


class HardwareHealth:
    """The device health for the kubelet. Health is unknown if the last scan is older than ``expiry()`` seconds."""

    def __init__(self, hardware_states: Shared[HardwareState], pool: str, expiry: Callable[[], float]) -> None:
        self._hardware_states = hardware_states
        self._pool = pool
        self._expiry = expiry

    def reports(self) -> tuple[DeviceReport, ...]:
        """Return the current health of all devices."""
        return self._hardware_states.value.reports(self._pool, time.time(), time.monotonic(), self._expiry())

    async def changed(self, seconds: float) -> None:
        """Wait until the health changes, up to ``seconds``."""
        known = self.reports()
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            await self._hardware_states.changed(left)
            if [(each.name, each.state, each.message) for each in self.reports()] != [
                (each.name, each.state, each.message) for each in known
            ]:
                return


def _report(pool: str, offer: Offer, faults: TrackedFaults, seen_at: float) -> DeviceReport:
    state = DeviceState.HEALTHY
    if (health_tracker.severity(faults) or Severity.INFORMATIVE) > Severity.INFORMATIVE:
        state = DeviceState.UNHEALTHY
    worst = sorted(faults, key=lambda each: (-each.sign.severity, each.since))
    return DeviceReport(pool, offer.name, state, " ".join(each.sign.describe() for each in worst), seen_at)


class FaultReporter(Protocol):
    """Reports the start and the end of device faults."""

    def report_fault(self, device: str, fault: TrackedFault, records: Collection[ClaimRecord]) -> None:
        """Report a new fault of a device, with the claims that hold an affected part."""

    def report_recovery(self, device: str, fault: TrackedFault, records: Collection[ClaimRecord]) -> None:
        """Report the end of a fault."""


class HealthSupervisor:
    """Track the health of one vendor's devices: read ``snapshots``, accept events (``heard``), write ``hardware_states``, and keep a file.

    ``scan_requested`` requests a scan: another scan verifies a fault that one scan found or missed.
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
        self._missing: tuple[MissingDevice, ...] = ()
        #: The names of the applied marks that are not removed yet.
        self._applied: set[str] = set()
        #: The content that was last queued for writing; None after a failure.
        self._kept: tuple[object, ...] | None = ({}, frozenset())
        #: The content to be written next, and the marks whose effect it has.
        self._due: tuple[bytes, frozenset[str]] | None = None
        self._writing: asyncio.Task[None] | None = None
        self._state, self._marks = StateLog(LOG), StateLog(LOG)
        self._is_loaded = False
        self._verifying: asyncio.TimerHandle | None = None
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
                self._keep()
        finally:
            if self._writing is not None:
                await asyncio.wait((self._writing,))

    def heard(self, notices: Collection[Notice]) -> None:
        """Record events of devices. A scan follows on its own."""
        survey = self._snapshots.value.survey
        changed = False
        for notice in notices:
            if notice.sign is None or not notice.uuid:
                continue
            device = survey.devices.get(notice.uuid) if survey is not None else None
            processes = _users(device, notice.sign.instance)
            if notice.sign.only_in_use and not processes and not self._claims_of(notice.uuid):
                continue
            before = self._faults.get(notice.uuid, ())
            after = health_tracker.apply_report(before, notice.sign, processes, self._moment())
            changed = self._settle(notice.uuid, before, after, device) or changed
        if changed:
            self._publish()
            self._keep()

    def set_missing(self, missing: tuple[MissingDevice, ...]) -> None:
        """Publish the devices of prepared claims that no longer exist."""
        self._missing = missing
        self._publish()

    def was_reset(self, uuid: str) -> None:
        """End the faults that a reset of a device ends. Call this right after a reset."""
        if self._repaired(uuid, repair_marks.RESET):
            self._publish()
            self._keep()

    def take_marks(self) -> None:
        """End the faults of devices that others have reset or repaired. Called while the vendor's library is closed.

        A mark is removed once the change is on disk. Until then its name is kept, in the file as well: a mark that cannot be removed, or
        that an interrupted driver has left, does not end a fault that was reported after it.
        """
        self._load()
        if not self._is_loaded:
            return
        try:
            marks = repair_marks.read(self._directory)
        except OSError as error:
            self._marks.report(f"marks of repaired devices cannot be read: {error}", level=logging.WARNING)
            return
        new = [each for each in marks if each.name not in self._applied]
        self._applied = {each.name for each in marks}
        changed = [self._repaired(each.uuid, each.what) for each in new]
        if any(changed):
            self._publish()
        self._keep()
        if self._due is None and (self._writing is None or self._writing.done()):
            self._remove_marks(frozenset(self._applied))

    def _remove_marks(self, names: Collection[str]) -> None:
        """Remove marks whose effect is on disk. An error affects only its mark, which is retried at the next scan."""
        errors = []
        for name in sorted(names):
            try:
                repair_marks.remove(self._directory, name)
            except OSError as error:
                errors.append(f"{name} ({error.strerror})")
        if errors:
            self._marks.report(
                f"applied marks of repaired devices cannot be removed from {self._directory}/{repair_marks.FOLDER}: "
                f"{', '.join(errors)}",
                level=logging.WARNING,
            )

    def _repaired(self, uuid: str, what: str) -> bool:
        survey = self._snapshots.value.survey
        before = self._faults.get(uuid, ())
        device = survey.devices.get(uuid) if survey is not None else None
        after = (
            health_tracker.apply_reset(before) if what == repair_marks.RESET else health_tracker.apply_repair(before)
        )
        return self._settle(uuid, before, after, device)

    def _moment(self) -> Moment:
        return Moment(self._now(), self._boot_id, self._clock())

    def _apply_scan(self, survey: Survey) -> None:
        moment = self._moment()
        found = {finding.uuid for finding in survey.findings if finding.uuid}
        for finding in survey.findings:
            if finding.uuid:
                before = self._faults.get(finding.uuid, ())
                self._settle(finding.uuid, before, health_tracker.apply_scan(before, finding, moment), finding.device)
        for uuid in [each for each in self._faults if each not in found]:
            if health_tracker.is_forgotten(self._faults[uuid], moment):
                del self._faults[uuid]
        self._scanned = (moment.clock, frozenset(found))
        if self._verifying is not None:
            self._verifying.cancel()
        self._verify()

    def _verify(self) -> None:
        """Request the scan that would confirm a fault or its end, once it is due."""
        self._verifying = None
        scanned, found = self._scanned
        due = health_tracker.verify_at((each for uuid in found for each in self._faults.get(uuid, ())), scanned)
        if due is None:
            return
        left = due - self._clock()
        if left > 0:
            self._verifying = asyncio.get_running_loop().call_later(left, self._verify)
        else:
            self._scan_requested.set()

    def _settle(self, uuid: str, before: TrackedFaults, after: TrackedFaults, device: Device | None) -> bool:
        """Store the faults of a device, and report new and ended ones. Return whether the faults changed."""
        if before == after:
            return False
        if after:
            self._faults[uuid] = after
        else:
            self._faults.pop(uuid, None)
        had, has = {each.sign.key: each for each in before}, {each.sign.key: each for each in after}
        name = device.describe() if device is not None else uuid
        for key in has.keys() - had.keys():
            LOG.warning("%s is not well: %s", name, has[key].sign.describe(), extra=self._fields(uuid, has[key]))
            self._reporter.report_fault(name, has[key], self._holders(uuid, has[key]))
        for key in had.keys() - has.keys():
            LOG.info("%s is well again: %s is over", name, had[key].sign.cause, extra=self._fields(uuid, had[key]))
            self._reporter.report_recovery(name, had[key], self._holders(uuid, had[key]))
        return True

    def _fields(self, uuid: str, fault: TrackedFault) -> dict[str, dict[str, Any]]:
        sign = fault.sign
        return fields(driver=self._driver, device=uuid, cause=sign.cause, value=sign.value, severity=sign.severity.word)

    def _claims_of(self, uuid: str) -> list[ClaimRecord]:
        """Return the claims that hold a device or a part of it."""
        return [record for record in self._claims() if any(uuid in each.device_uuids for each in record.devices)]

    def _holders(self, uuid: str, fault: TrackedFault) -> list[ClaimRecord]:
        """Return the claims that hold a part that a fault affects."""
        return [
            record
            for record in self._claims()
            if any(
                uuid in each.device_uuids and (fault.is_of_all or each.instance_id == fault.sign.instance)
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
        self._hardware_states.put(HardwareState(snapshot, faults, self._effects, self._missing))

    def _load(self) -> None:
        """Read the faults that were known when the driver ended.

        After a read error the file is not written, and the next scan reads it again: a fault that only a reset or a repair ends must
        not be forgotten. A file with invalid content is kept as ``health.json.damaged``; scans find the states of devices again.
        """
        if self._is_loaded:
            return
        try:
            found, applied = _read_file(self._system, self._directory)
        except OSError as error:
            text = f"{self._path} cannot be read, faults of an earlier process are not known: {error}. Repair the disk, or delete the file"
            self._state.report(text, level=logging.WARNING)
            return
        except ValueError as error:
            LOG.warning("cannot read the health of devices from %s (%s): starting without it", self._path, error)
            self._set_aside()
            found, applied = {}, set()
        self._is_loaded = True
        for uuid, known in found.items():
            heard = self._faults.get(uuid, ())
            keys = {each.sign.key for each in heard}
            self._faults[uuid] = (*(each for each in known if each.sign.key not in keys), *heard)
        self._applied |= applied
        self._kept = ({uuid: [_lasting(each) for each in known] for uuid, known in found.items()}, frozenset(applied))

    def _set_aside(self) -> None:
        with contextlib.suppress(OSError):
            data = self._system.read_bytes(self._path)
            self._system.write_atomic(f"{self._path}.damaged", data, mode=0o600)

    def _lasting(self) -> tuple[object, ...]:
        """Return the part of the state that is written again when it changes."""
        faults = {uuid: [_lasting(each) for each in found] for uuid, found in self._faults.items()}
        return faults, frozenset(self._applied)

    def _keep(self) -> None:
        """Write the state that outlives this process, if it has changed. Another report of the same fault is no change."""
        kept = self._lasting()
        if kept == self._kept or not self._is_loaded:
            return
        content = {
            "form": FORM,
            "devices": health_tracker.to_data(self._faults),
            "applied_marks": sorted(self._applied),
        }
        self._kept, self._due = kept, ((json.dumps(content, indent=1) + "\n").encode(), frozenset(self._applied))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write())

    async def _write(self) -> None:
        """Write the file, on a thread: a slow disk must not keep the kubelet's calls waiting. The last content wins."""
        while self._due is not None:
            (data, marks), self._due = self._due, None
            try:
                await asyncio.to_thread(self._system.write_atomic, self._path, data, mode=0o600)
            except OSError as error:
                self._kept = None  # the next scan tries again
                self._state.report(f"{self._path} cannot be written: {error}", level=logging.WARNING)
            else:
                self._state.report(f"{self._path} is kept", level=logging.DEBUG)
                self._remove_marks(marks)


def known_faults(system: System, directory: str) -> dict[str, TrackedFaults]:
    """Return the faults that a driver keeps in its state directory, by the device's UUID; none without a file.

    Raises OSError, and ValueError for a file with another content.
    """
    return _read_file(system, directory)[0]


def _read_file(system: System, directory: str) -> tuple[dict[str, TrackedFaults], set[str]]:
    """Return the faults by the device's UUID, and the names of applied marks. Raises OSError and ValueError."""
    try:
        data = json.loads(system.read_text(f"{directory}/{FILE}"))
    except FileNotFoundError:
        return {}, set()
    if not isinstance(data, dict) or data.get("form") != FORM:
        raise ValueError(f"it has another form than {FORM}")
    return health_tracker.from_data(data.get("devices")), set(map(str, data.get("applied_marks") or ()))


def _users(device: Device | None, instance: int | None) -> frozenset[int]:
    """Return the processes that use a device, or one partition of it."""
    if device is None:
        return frozenset()
    if instance is None:
        return frozenset(process.pid for process in device.processes)
    return frozenset(
        process.pid for each in device.partitions if each.instance_id == instance for process in each.processes
    )


def _lasting(fault: TrackedFault) -> object:
    """Return the part of a fault whose change must be written to the file."""
    return (
        fault.sign.key,
        fault.sign.severity,
        fault.since,
        fault.is_confirmed,
        fault.processes,
        fault.boot,
        fault.asked,
    )
