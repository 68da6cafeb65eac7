# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Scan all devices of a vendor in parallel, each on its own lane, and combine the results with the previous scan."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Callable

from ..errors import AcceleratorError, BackendUnavailable, DeviceFaulty, unexpected
from ..health.conditions import Sign
from ..model import FIRST_READ_PENDING, NO_ANSWER, UNKNOWN_ERROR, Device, Fault, Finding, Health
from .device_workers import Call, DeviceBusy


@dataclass(frozen=True)
class DeviceScan:
    """The devices that a scan read, by UUID, and the devices that it could not read, by index."""

    found: Mapping[str, Device]
    unread: Mapping[int, DeviceFaulty]

    def completed(
        self, complete: Callable[[Device], Device], faulty: Callable[[AcceleratorError], DeviceFaulty]
    ) -> DeviceScan:
        """Return the result after ``complete`` was applied to each device.

        If it raises for a device, the device gets a fault.
        """
        found, unread = {}, dict(self.unread)
        for uuid, device in self.found.items():
            try:
                found[uuid] = complete(device)
            except Exception as error:  # noqa: BLE001  one device's defect is not the other devices'
                unread[device.index] = faulty(unexpected(error, f"Reading {device.describe()}"))
        return DeviceScan(found, unread)


@dataclass(frozen=True)
class DeviceName:
    """The name and, if known, the UUID of a device of which only the index is known."""

    text: str
    uuid: str = ""


def gather(
    calls: Mapping[int, Call[Device]],
    last: Callable[[int], Device | None],
    faulty: Callable[[AcceleratorError], DeviceFaulty],
    *,
    begun: float,
    deadline: float,
    patience: float | None,
) -> DeviceScan:
    """Wait for the scans of all devices, by index.

    ``begun`` is their start time (``time.monotonic``), ``deadline`` the maximum wait for each, in seconds. ``last``
    returns the last known facts of a device; they are the result if another program is changing the device. A device
    that was never read has a time limit of ``patience`` seconds. Any exception becomes a fault of its device. Raises
    BackendUnavailable if all scans raise it.
    """
    found: dict[str, Device] = {}
    unread: dict[int, DeviceFaulty] = {}
    unavailable: list[BackendUnavailable] = []
    for index, call in calls.items():
        known = last(index)
        time_limit = deadline if patience is None or known is not None else min(patience, deadline)
        try:
            device = _scan_result(call, begun + time_limit, known)
            found[device.uuid] = device
        except DeviceBusy as error:
            code = FIRST_READ_PENDING if time_limit < deadline else NO_ANSWER
            unread[index] = DeviceFaulty(error.message, hint=error.hint, code=code)
        except AcceleratorError as error:
            if isinstance(error, BackendUnavailable):
                unavailable.append(error)
            unread[index] = faulty(error)
        except Exception as error:  # noqa: BLE001  one device's defect is not the other devices'
            unread[index] = faulty(unexpected(error, call.doing))
    if unavailable and len(unavailable) == len(calls):
        raise unavailable[0]
    return DeviceScan(found, unread)


def findings(
    scan: DeviceScan,
    known: Iterable[Device],
    *,
    why_missing: Callable[[Device], DeviceFaulty | None],
    sign: Callable[[DeviceFaulty], Sign],
    names: Callable[[Collection[str], Sequence[int]], Mapping[int, DeviceName]],
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Combine the scanned devices, the devices with a fault, and the devices that are missing since the last scan.

    ``known`` are the last known facts of all devices. ``why_missing`` returns why one of them was not found, or None if
    it was removed. ``names`` returns the names of devices that were never read, by their indices, given the PCI
    addresses of all others. Returns the findings, sorted by index, and the UUIDs of removed devices.
    """
    unread = dict(scan.unread)
    found = [Finding(device.index, device.describe(), device.uuid, device) for device in scan.found.values()]
    removed = []
    for device in known:
        if device.uuid in scan.found:
            continue
        reason = unread.pop(device.index, None) or _missing_reason(device, why_missing)
        if reason is None:
            removed.append(device.uuid)
        elif reason.code == FIRST_READ_PENDING:  # the device answered again after its deadline
            found.append(Finding(device.index, device.describe(), device.uuid, device))
        else:
            faulty_device = replace(device, processes=(), health=Health((sign(reason),)))
            found.append(
                Finding(device.index, device.describe(), device.uuid, faulty_device, Fault(reason.code, str(reason)))
            )
    addresses = {finding.device.pci_address for finding in found if finding.device is not None}
    device_names = names(addresses, sorted(unread)) if unread else {}
    for index, error in unread.items():
        name = device_names.get(index, DeviceName(f"device {index}"))
        found.append(Finding(index, name.text, name.uuid, None, Fault(error.code, str(error))))
    return tuple(sorted(found, key=lambda finding: finding.index)), tuple(removed)


def _missing_reason(device: Device, why_missing: Callable[[Device], DeviceFaulty | None]) -> DeviceFaulty | None:
    """Return why a known device was not found, or None if it was removed. An unexpected exception becomes a fault."""
    try:
        return why_missing(device)
    except Exception as error:  # noqa: BLE001  one device's defect is not the other devices'
        failed = unexpected(error, f"Finding {device.describe()}")
        return DeviceFaulty(failed.message, hint=failed.hint, code=UNKNOWN_ERROR)


def _scan_result(call: Call[Device], until: float, known: Device | None) -> Device:
    """Return the result of a scan, or the last known facts while the device is being changed."""
    try:
        return call.result(until)
    except DeviceBusy:
        if known is None:
            raise
        return known
