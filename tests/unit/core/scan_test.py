# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""A scan of all devices: any exception in the read of one device is that device's fault."""

from __future__ import annotations

import time
from typing import Callable

import board_model
import pytest
from dra_driver.core.discovery.device_workers import Lanes
from dra_driver.core.discovery.scan import DeviceName, DeviceScan, findings, gather
from dra_driver.core.errors import BackendUnavailable, InUse
from dra_driver.core.model import Device, Finding
from dra_driver.core.vendors.nvidia.board_facts import DriverFacts
from dra_driver.core.vendors.nvidia.gpu_reader import read_driver
from dra_driver.core.vendors.nvidia.health import faults

FIRST, SECOND = (board_model.device("h100-80", index) for index in range(2))


def scan(*reads: Callable[[], Device]) -> DeviceScan:
    """Run these reads, each in the lane of its device."""
    lanes = Lanes("test")
    try:
        calls = {
            index: lanes.submit(str(index), read, 60.0, doing=f"Scanning GPU {index}")
            for index, read in enumerate(reads)
        }
        return gather(calls, lambda _: None, faults.as_fault, begun=time.monotonic(), deadline=60.0, patience=None)
    finally:
        lanes.close()


def found(scanned: DeviceScan, known: tuple[Device, ...] = (), missing: object = None) -> tuple[Finding, ...]:
    """Return the findings of a scan. ``missing`` is raised for a missing known device. None means a removed one."""

    def why_missing(_device: Device) -> None:
        if isinstance(missing, Exception):
            raise missing

    return findings(
        scanned,
        known,
        why_missing=why_missing,
        sign=faults.sign,
        names=lambda _known, indices: {index: DeviceName(f"GPU {index}") for index in indices},
    )[0]


def raising(error: Exception) -> Callable[[], Device]:
    def read() -> Device:
        raise error

    return read


@pytest.mark.parametrize("error", [ValueError("'x' is not a version"), KeyError(7), TypeError("bytes"), IndexError()])
def test_gather_unexpected_exception_is_the_devices_fault(error: Exception) -> None:
    well, ill = found(scan(lambda: FIRST, raising(error)), (SECOND,))
    assert (well.device, well.fault) == (FIRST, None)
    assert ill.uuid == SECOND.uuid and ill.fault is not None and ill.fault.cause == "unknown-error"
    assert f"Scanning GPU 1 failed with an unexpected {type(error).__name__}" in ill.fault.message
    assert "scan_test.py:" in ill.fault.message and "dra-driver collect" in ill.fault.message


def test_gather_unexpected_exceptions_of_all_devices_leave_the_library_available() -> None:
    both = found(scan(raising(ValueError()), raising(ValueError())))
    assert [finding.fault is not None for finding in both] == [True, True]
    with pytest.raises(BackendUnavailable):
        scan(raising(BackendUnavailable("gone")), raising(BackendUnavailable("gone")))


def test_completed_unexpected_exception_is_the_devices_fault() -> None:
    def complete(device: Device) -> Device:
        if device is SECOND:
            raise ZeroDivisionError
        return device

    scanned = scan(lambda: FIRST, lambda: SECOND).completed(complete, faults.as_fault)
    assert list(scanned.found) == [FIRST.uuid] and list(scanned.unread) == [1]


def test_findings_unexpected_exception_about_a_missing_device_keeps_it_with_a_fault() -> None:
    well, ill = found(scan(lambda: FIRST), (FIRST, SECOND), missing=UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"))
    assert well.fault is None
    assert ill.uuid == SECOND.uuid and ill.fault is not None and ill.fault.cause == "unknown-error"
    assert found(scan(lambda: FIRST), (FIRST, SECOND)) == (well,)


def test_read_driver_unreadable_version_loses_one_attribute(caplog: pytest.LogCaptureFixture) -> None:
    class Library:
        def call(self, function: str, doing: str) -> object:
            return {"nvmlSystemGetDriverVersion": "r580-internal", "nvmlSystemGetCudaDriverVersion_v2": 13000}[function]

    facts: DriverFacts = read_driver(Library())  # type: ignore[arg-type]
    assert facts.driver_version == "r580-internal"
    assert {name: str(value) for name, value in facts.attributes.items()} == {"cudaDriverVersion": "13.0.0"}
    assert "GPUs are published without driverVersion: 'r580-internal' is not a version" in caplog.text


def test_gather_error_with_a_cause_keeps_it() -> None:
    _well, ill = found(scan(lambda: FIRST, raising(InUse("A program uses it"))))
    assert ill.fault is not None and "A program uses it" in ill.fault.message
