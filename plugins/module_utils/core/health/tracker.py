# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Track the health of devices with one state machine per device, fed by scans and by device reports. No side effects.

A *sign* is a backend's report at one moment. A *fault* is a sign from its first report until its recovery is
verified. A device can have several at a time. States (a pending repair, a device that does not answer) are found by
every scan, and end when scans no longer find them. A fault that was reported once (an error number) ends as its sign
defines. In both cases the end is verified by two scans, ``VERIFY_SECONDS`` apart, that do not find it. A reset or
repair that the driver knows of ends faults at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ..model import Device, Finding, Offer, Taint
from .conditions import Ends, Severity, Sign

#: The interval, in seconds, between the two scans that confirm the end of a state, or a state before it evicts pods.
VERIFY_SECONDS = 3.0
#: Seconds from the last report of an informative fault to the scan that verifies its end: a program that fails repeatedly causes no scans.
QUIET_SECONDS = 10.0
#: A removed device's faults are deleted after this time, in seconds.
FORGET_SECONDS = 30 * 86400.0
#: The maximum number of faults per device. Above it the least severe and oldest are dropped.
MOST_FAULTS = 32
#: The maximum number of taints per device. The API server accepts 16, servers before 1.35 accept 4.
MOST_TAINTS = 4

NOT_PUBLISHED = ""
EFFECTS = (NOT_PUBLISHED, "None", "NoSchedule", "NoExecute")
#: The default effects of the severities on a published device.
DEFAULT_EFFECTS: Mapping[Severity, str] = MappingProxyType(
    {Severity.INFORMATIVE: NOT_PUBLISHED, Severity.DEGRADED: "NoSchedule", Severity.FAILED: "NoExecute"}
)


@dataclass(frozen=True)
class TrackedFault:
    """One fault of a device, over time.

    ``since`` and ``seen`` are the times when it was found first and last, in seconds since the epoch. They are for display,
    and for comparison with another boot: the system clock can be set at any time. Durations within this process use the
    monotonic clock: ``found_at`` and ``seen_at`` (None: not in this process), and ``well_since``, when a scan first missed
    the fault. ``times`` counts the reports. ``is_confirmed`` is set once a second scan or a report confirms the fault.
    ``processes`` are the processes that used the device at the last report with a known process. ``boot`` is the ID of the boot in which
    the fault was found last. ``asked`` is set once the device has requested a reset since the fault.
    """

    sign: Sign
    since: float
    seen: float
    times: int = 1
    is_confirmed: bool = False
    well_since: float | None = None
    processes: frozenset[int] = frozenset()
    boot: str = ""
    found_at: float | None = None
    seen_at: float | None = None
    asked: bool = False

    def effect(self, effects: Mapping[Severity, str] = DEFAULT_EFFECTS) -> str:
        """Return the effect of its taint. A fault from a single scan evicts no pods."""
        effect = effects[self.sign.severity]
        return "NoSchedule" if effect == "NoExecute" and not self.is_confirmed else effect

    @property
    def affects_whole_device(self) -> bool:
        """Return whether the fault affects the whole physical device.

        Only states and faults that end with processes can affect one partition.
        """
        return self.sign.instance is None or self.sign.ends not in (Ends.SCAN, Ends.PROCESSES)

    def applies_to(self, offer: Offer, device: Device | None) -> bool:
        """Return whether a published device has the fault: as part of the faulty device, or as the faulty partition."""
        if self.affects_whole_device:
            return True
        if offer.profile_id is None or offer.placement is None or device is None:
            return False
        if offer.dynamic and offer.placement.is_number:
            return False  # only the claim knows the number of a partition that is created on demand
        key = (offer.profile_id, offer.placement.start, offer.placement.size)
        return any(each.instance_id == self.sign.instance and each.key == key for each in device.partitions)


TrackedFaults = tuple[TrackedFault, ...]


@dataclass(frozen=True)
class Moment:
    """The time of a scan or report: ``now`` in seconds since the epoch, ``clock`` of the monotonic clock, and the boot."""

    now: float
    boot: str
    clock: float


def apply_report(before: TrackedFaults, sign: Sign, processes: Collection[int], moment: Moment) -> TrackedFaults:
    """Return the faults of a device after it has reported one, while these processes use it."""
    same_cause = [each.sign for each in before if each.sign.cause == sign.cause]
    if sign.is_consequence and not all(each.is_consequence for each in same_cause):
        return before
    if not sign.is_consequence:
        before = tuple(each for each in before if not (each.sign.cause == sign.cause and each.sign.is_consequence))
    for fault in before:
        if fault.sign.key == sign.key:
            again = replace(
                fault,
                sign=sign,
                seen=moment.now,
                seen_at=moment.clock,
                times=fault.times + 1,
                well_since=None,
                is_confirmed=True,
                processes=frozenset(processes) or (fault.processes if fault.boot == moment.boot else frozenset()),
                boot=moment.boot,
                asked=False,
            )
            return _most_severe(again if each is fault else each for each in before)
    return _most_severe([*before, replace(_new(sign, moment), is_confirmed=True, processes=frozenset(processes))])


def apply_scan(before: TrackedFaults, finding: Finding, moment: Moment) -> TrackedFaults:
    """Return the faults of a device after a scan.

    A scan that ended with a fault reports only this fault, and ends no other.
    """
    if finding.is_first_read_pending:
        return before
    signs = finding.device.health.signs if finding.device is not None else ()
    found = {sign.key: sign for sign in signs}
    after = []
    for fault in before:
        sign = found.pop(fault.sign.key, None)
        if sign is not None:
            found_at = fault.found_at if fault.found_at is not None else moment.clock
            after.append(
                replace(
                    fault,
                    sign=sign,
                    seen=moment.now,
                    seen_at=moment.clock,
                    found_at=found_at,
                    well_since=None,
                    is_confirmed=fault.is_confirmed or moment.clock - found_at >= VERIFY_SECONDS,
                    boot=moment.boot,
                )
            )
            continue
        if finding.fault is not None or finding.device is None or not _is_over(fault, finding.device, moment):
            asked = fault.asked or bool(finding.device is not None and finding.device.health.needs_reset)
            after.append(replace(fault, well_since=None, asked=asked))
            continue
        well_since = fault.well_since if fault.well_since is not None else moment.clock
        if moment.clock - well_since < VERIFY_SECONDS:
            after.append(replace(fault, well_since=well_since))
    after.extend(_new(sign, moment) for sign in found.values())
    return _most_severe(after)


def apply_reset(before: TrackedFaults) -> TrackedFaults:
    """Return the faults that a device keeps after a reset. The next scans find the states that stay."""
    return tuple(each for each in before if each.sign.ends in (Ends.SCAN, Ends.RESTART, Ends.REPLACEMENT))


def apply_repair(before: TrackedFaults) -> TrackedFaults:
    """Return the faults that a device keeps after an administrator has reported its repair: the states that scans find."""
    return tuple(each for each in before if each.sign.ends is Ends.SCAN)


def needs_reset(device: Device, faults: Iterable[TrackedFault]) -> bool:
    """Return whether a device needs a reset, by its own report or by a fault that nothing but a reset ends."""
    return any(
        each.is_confirmed
        and each.sign.is_mended_by_reset
        and (bool(device.health.needs_recovery) or each.sign.ends is Ends.RESET)
        for each in faults
    )


def verify_at(faults: Iterable[TrackedFault], scanned: float) -> float | None:
    """Return when another scan would confirm a fault or its end; None when it would do neither.

    Both are times of the monotonic clock; ``scanned`` is that of the last scan.
    """
    times = []
    for each in faults:
        if each.well_since is not None:
            due = each.well_since + VERIFY_SECONDS
            if each.sign.severity is Severity.INFORMATIVE and each.seen_at is not None:
                due = max(due, each.seen_at + QUIET_SECONDS)
            times.append(due)
        elif not each.is_confirmed and each.seen_at == scanned:
            times.append(scanned + VERIFY_SECONDS)
    return min(times, default=None)


def is_forgotten(faults: TrackedFaults, moment: Moment) -> bool:
    """Return whether all faults of a removed device were last seen more than ``FORGET_SECONDS`` ago."""
    return all(_age(each, moment) > FORGET_SECONDS for each in faults)


def severity(faults: Iterable[TrackedFault]) -> Severity | None:
    """Return the worst severity, or None without faults."""
    return max((each.sign.severity for each in faults), default=None)


def taints(
    driver: str, faults: Iterable[TrackedFault], effects: Mapping[Severity, str] = DEFAULT_EFFECTS
) -> tuple[Taint, ...]:
    """Return the taints of a published device with these faults, most severe first.

    Keys consist of the driver's name and the cause. There is one taint for each key and effect. If several faults have
    the same cause and effect, the first one gives the value. The order is stable while the faults stay.
    """
    chosen: dict[tuple[str, str], Taint] = {}
    for fault in sorted(faults, key=lambda each: (-each.sign.severity, each.sign.cause, each.since, each.sign.value)):
        effect = fault.effect(effects)
        if effect != NOT_PUBLISHED:
            key = f"{driver}/{fault.sign.cause}"
            chosen.setdefault((key, effect), Taint(key, effect, fault.sign.value))
    by_effect = sorted(chosen.values(), key=lambda each: -EFFECTS.index(each.effect))
    return tuple(by_effect[:MOST_TAINTS])


def tainted(
    driver: str,
    offers: Iterable[Offer],
    devices: Mapping[str, Device],
    faults: Mapping[str, TrackedFaults],
    effects: Mapping[Severity, str] = DEFAULT_EFFECTS,
) -> tuple[Offer, ...]:
    """Return the published devices, each with the taints of its faults before its own taints.

    ``faults`` and ``devices`` are by UUID.
    """
    return tuple(
        replace(
            offer,
            taints=(*taints(driver, faults_of_offer(offer, devices, faults), effects), *offer.taints)[:MOST_TAINTS],
        )
        if any(faults.get(uuid) for uuid in offer.device_uuids)
        else offer
        for offer in offers
    )


def faults_of_offer(offer: Offer, devices: Mapping[str, Device], faults: Mapping[str, TrackedFaults]) -> TrackedFaults:
    """Return the faults of its physical devices that apply to a published device."""
    return tuple(
        each
        for uuid in offer.device_uuids
        for each in faults.get(uuid, ())
        if each.applies_to(offer, devices.get(uuid))
    )


def faults_of_single_scan(findings: Iterable[Finding]) -> dict[str, TrackedFaults]:
    """Return the faults by UUID from a single scan without history."""
    moment = Moment(0.0, "", 0.0)
    return {
        finding.device.uuid: apply_scan((), finding, moment)
        for finding in findings
        if finding.device is not None and finding.device.health.signs
    }


def to_data(faults: Mapping[str, TrackedFaults]) -> dict[str, Any]:
    """Return faults as data for JSON."""
    return {
        uuid: [
            {
                "cause": each.sign.cause,
                "severity": each.sign.severity.word,
                "message": each.sign.message,
                "remedy": each.sign.remedy,
                "ends": each.sign.ends.value,
                "value": each.sign.value,
                "instance": each.sign.instance,
                "is_mended_by_reset": each.sign.is_mended_by_reset,
                "is_consequence": each.sign.is_consequence,
                "asked": each.asked,
                "since": each.since,
                "seen": each.seen,
                "times": each.times,
                "is_confirmed": each.is_confirmed,
                "processes": sorted(each.processes),
                "boot": each.boot,
            }
            for each in found
        ]
        for uuid, found in sorted(faults.items())
        if found
    }


def from_data(data: Any) -> dict[str, TrackedFaults]:
    """Parse the result of ``to_data``. Raises ValueError for other data."""
    try:
        return {str(uuid): tuple(_to_fault(each) for each in found) for uuid, found in data.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"invalid device faults: {error!r}") from error


def _to_fault(data: Mapping[str, Any]) -> TrackedFault:
    instance = data["instance"]
    sign = Sign(
        cause=str(data["cause"]),
        severity=Severity[str(data["severity"]).upper()],
        message=str(data["message"]),
        remedy=str(data["remedy"]),
        ends=Ends(data["ends"]),
        value=str(data["value"]),
        instance=None if instance is None else int(instance),
        is_mended_by_reset=bool(data["is_mended_by_reset"]),
        is_consequence=bool(data.get("is_consequence")),
    )
    return TrackedFault(
        sign=sign,
        since=float(data["since"]),
        seen=float(data["seen"]),
        times=int(data["times"]),
        is_confirmed=bool(data["is_confirmed"]),
        processes=frozenset(int(pid) for pid in data["processes"]),
        boot=str(data["boot"]),
        asked=bool(data.get("asked")),
    )


def _new(sign: Sign, moment: Moment) -> TrackedFault:
    """Return the fault that this scan or report found first."""
    return TrackedFault(sign, moment.now, moment.now, boot=moment.boot, found_at=moment.clock, seen_at=moment.clock)


def _age(fault: TrackedFault, moment: Moment) -> float:
    """Return the seconds since a fault was last seen; by the system clock where that was in an earlier process."""
    if fault.seen_at is not None:
        return moment.clock - fault.seen_at
    return moment.now - fault.seen


def _is_over(fault: TrackedFault, device: Device, moment: Moment) -> bool:
    """Return whether a scan without this fault indicates its end."""
    if fault.sign.cause in device.health.unchecked_causes or fault.sign.ends is Ends.REPLACEMENT:
        return False
    if fault.sign.ends is Ends.SCAN or fault.boot != moment.boot:
        return True
    if fault.sign.ends is Ends.PROCESSES:
        return fault.processes.isdisjoint(process.pid for process in device.processes)
    if fault.sign.ends is Ends.RESTART:
        return False
    return device.health.needs_recovery is False and (fault.sign.ends is Ends.RECOVERY or fault.asked)


def _most_severe(faults: Iterable[TrackedFault]) -> TrackedFaults:
    """Return the most severe and newest faults, in a stable order."""
    worst = sorted(faults, key=lambda each: (-each.sign.severity, -each.seen))[:MOST_FAULTS]
    return tuple(
        sorted(worst, key=lambda each: (each.since, each.sign.cause, each.sign.value, str(each.sign.instance)))
    )
