# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A look at all devices of a vendor side by side, each on its lane: what came back, what did not, and what was there before."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Callable

from .errors import AcceleratorError, BackendUnavailable, DeviceFaulty, unexpected
from .lanes import Call, DeviceBusy
from .model import AWAITED, NO_ANSWER, UNKNOWN_ERROR, Device, Fault, Finding, Health
from .signs import Sign


@dataclass(frozen=True)
class Looked:
    """The devices that a look has found, by UUID, and those that it met with a fault, by index."""

    found: Mapping[str, Device]
    silent: Mapping[int, DeviceFaulty]

    def completed(
        self, complete: Callable[[Device], Device], faulty: Callable[[AcceleratorError], DeviceFaulty]
    ) -> Looked:
        """Return the devices after ``complete``; a device for which that raises has a fault."""
        found, silent = {}, dict(self.silent)
        for uuid, device in self.found.items():
            try:
                found[uuid] = complete(device)
            except Exception as error:  # noqa: BLE001  one device's defect is not the other devices'
                silent[device.index] = faulty(unexpected(error, f"Reading {device.describe()}"))
        return Looked(found, silent)


@dataclass(frozen=True)
class Name:
    """How a device is called of which nothing was learnt but its index: for a person, and by its UUID where that is known."""

    text: str
    uuid: str = ""


def gather(
    looks: Mapping[int, Call[Device]],
    last: Callable[[int], Device | None],
    faulty: Callable[[AcceleratorError], DeviceFaulty],
    *,
    begun: float,
    deadline: float,
    patience: float | None,
) -> Looked:
    """Wait for the looks, by index, that began at this time of ``time.monotonic``, each for so many seconds at most.

    ``last`` is what was read last of the device with an index: of one that is being changed that is what is found. One that
    was never read is not waited for longer than ``patience``. Any exception of one look is that device's fault. Raises
    BackendUnavailable where that is what all of them say.
    """
    found: dict[str, Device] = {}
    silent: dict[int, DeviceFaulty] = {}
    unavailable: list[BackendUnavailable] = []
    for index, call in looks.items():
        known = last(index)
        patient = deadline if patience is None or known is not None else min(patience, deadline)
        try:
            device = _answer(call, begun + patient, known)
            found[device.uuid] = device
        except DeviceBusy as error:
            code = AWAITED if patient < deadline else NO_ANSWER
            silent[index] = DeviceFaulty(error.message, hint=error.hint, code=code)
        except AcceleratorError as error:
            if isinstance(error, BackendUnavailable):
                unavailable.append(error)
            silent[index] = faulty(error)
        except Exception as error:  # noqa: BLE001  one device's defect is not the other devices'
            silent[index] = faulty(unexpected(error, call.doing))
    if unavailable and len(unavailable) == len(looks):
        raise unavailable[0]
    return Looked(found, silent)


def findings(
    looked: Looked,
    known: Iterable[Device],
    *,
    why_missing: Callable[[Device], DeviceFaulty | None],
    sign: Callable[[DeviceFaulty], Sign],
    names: Callable[[Collection[str], Sequence[int]], Mapping[int, Name]],
) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Put together what a look found, what it met with a fault, and what was there before and is not now.

    ``known`` is what was read last of every device, ``why_missing`` why one of them was not found (None: it was taken away),
    ``names`` what devices are called that nothing was ever read of, by their indices, given the PCI addresses of all others.
    Returned are the findings in the order of their indices, and the UUIDs of what was taken away.
    """
    silent = dict(looked.silent)
    found = [Finding(device.index, device.describe(), device.uuid, device) for device in looked.found.values()]
    gone = []
    for device in known:
        if device.uuid in looked.found:
            continue
        reason = silent.pop(device.index, None) or _reason(device, why_missing)
        if reason is None:
            gone.append(device.uuid)
        elif reason.code == AWAITED:  # it came back at this very moment
            found.append(Finding(device.index, device.describe(), device.uuid, device))
        else:
            ill = replace(device, processes=(), health=Health((sign(reason),)))
            found.append(Finding(device.index, device.describe(), device.uuid, ill, Fault(reason.code, str(reason))))
    addresses = {finding.device.pci_address for finding in found if finding.device is not None}
    called = names(addresses, sorted(silent)) if silent else {}
    for index, error in silent.items():
        name = called.get(index, Name(f"device {index}"))
        found.append(Finding(index, name.text, name.uuid, None, Fault(error.code, str(error))))
    return tuple(sorted(found, key=lambda finding: finding.index)), tuple(gone)


def _reason(device: Device, why_missing: Callable[[Device], DeviceFaulty | None]) -> DeviceFaulty | None:
    """Return why a known device was not found; an exception that no code expects keeps the device, with a fault."""
    try:
        return why_missing(device)
    except Exception as error:  # noqa: BLE001  one device's defect is not the other devices'
        failed = unexpected(error, f"Finding {device.describe()}")
        return DeviceFaulty(failed.message, hint=failed.hint, code=UNKNOWN_ERROR)


def _answer(call: Call[Device], until: float, known: Device | None) -> Device:
    """Return what a look tells; of a device that is being changed, what the look before told."""
    try:
        return call.result(until)
    except DeviceBusy:
        if known is None:
            raise
        return known
