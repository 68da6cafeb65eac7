# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Each Xid of NVIDIA's catalog: its severity, and the only event that ends its fault."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from board_model import device
from dra_driver.core.health import tracker as health_tracker
from dra_driver.core.health.conditions import Severity
from dra_driver.core.health.tracker import Moment, TrackedFaults
from dra_driver.core.model import Fault, Finding, Health, Process
from dra_driver.core.vendors.nvidia.health import xids
from xid_table import _ROWS, NEVER, PROCESS, RECOVERY, RESET, ROWS, asks, branches_of, numbers

GPU = device("h100-80")
PID = 7
CASES = [(number, branch) for number in sorted(ROWS) for branch in branches_of(number)]


def scans(
    faults: TrackedFaults, start: float, *, boot: str = "boot", used: bool = True, asking: bool | None = False
) -> TrackedFaults:
    """Scan the GPU three times. ``asking`` is whether it requests a reset, or None if it does not report that."""
    processes = (Process(PID),) if used else ()
    gpu = replace(GPU, health=Health((), needs_recovery=asking, needs_reset=asking), processes=processes)
    for number in range(3):
        now = start + 10 * number
        faults = health_tracker.apply_scan(faults, Finding(0, "GPU 0", GPU.uuid, gpu), Moment(now, boot, now))
    return faults


def reported(number: int, branch: int) -> TrackedFaults:
    """Return the faults of a GPU in use that has reported an Xid and was scanned afterwards."""
    sign = xids.sign_of_xid(number, None)
    assert sign is not None
    return scans(health_tracker.apply_report((), sign, {PID}, Moment(0, "boot", 0)), 1, asking=asks(number, branch))


@pytest.mark.parametrize(("number", "branch"), CASES)
def test_xid_fault_ends_only_by_event_of_its_row(number: int, branch: int) -> None:
    row, sign, is_asking = ROWS[number], xids.sign_of_xid(number, None), asks(number, branch)
    if row.severity is None:
        assert sign is None
        return
    assert sign is not None and (sign.severity, sign.is_mended_by_reset) == (row.severity, row.mended)
    assert sign.remedy
    ill = reported(number, branch)
    if row.ends == RECOVERY:
        assert not ill, "the GPU reports that it needs no recovery"
        ill = scans(health_tracker.apply_report((), sign, {PID}, Moment(0, "boot", 0)), 1, asking=True)
    (fault,) = ill
    ends = {
        "the processes end": not scans(ill, 100, used=False, asking=is_asking or row.ends == RECOVERY),
        "the driver does not report its state": not scans(ill, 100, asking=None),
        "a known reset": not health_tracker.apply_reset(ill),
        "the GPU stops asking": not scans(ill, 100, asking=False),
        "a reboot": not scans(ill, 100, boot="next"),
        "a reported repair": not health_tracker.apply_repair(ill),
        "a fault of the scan": not health_tracker.apply_scan(
            ill, Finding(0, "GPU 0", GPU.uuid, GPU, Fault("no-answer", "It hangs")), Moment(500, "boot", 500)
        ),
    }
    assert ends == {
        "the processes end": row.ends == PROCESS,
        "the driver does not report its state": False,
        "a known reset": row.ends in (PROCESS, RESET, RECOVERY),
        "the GPU stops asking": row.ends == RECOVERY or (row.ends == RESET and is_asking),
        "a reboot": row.ends != NEVER,
        "a reported repair": True,
        "a fault of the scan": False,
    }, fault


@pytest.mark.parametrize("branch", [560, 580])
@pytest.mark.parametrize("number", sorted(ROWS))
def test_xid_reset_remedy_resets_only_gpus_that_need_it(number: int, branch: int) -> None:
    if ROWS[number].severity is None or ROWS[number].ends == RECOVERY:
        return
    asking = asks(number, branch)
    gpu = replace(GPU, health=Health((), needs_recovery=asking, needs_reset=asking))
    assert health_tracker.needs_reset(gpu, reported(number, branch)) == ROWS[number].mended


def test_table_has_each_number_once() -> None:
    counts = Counter(number for _row, text in _ROWS for number in numbers(text))
    assert set(counts.values()) == {1}
    assert set(counts) == {*range(1, 177), 185}
    buckets = Counter(
        number
        for _kind, entries in xids._BUCKETS
        for entry in entries
        for number in (entry if isinstance(entry, range) else (entry,))
    )
    assert set(buckets.values()) == {1} and set(buckets) == set(counts) - {175, 185}


def test_xid_45_counts_only_without_other_xid() -> None:
    cleanup, error = xids.sign_of_xid(45, None), xids.sign_of_xid(94, None)
    assert cleanup is not None and error is not None and "restart nvidia-fabricmanager" in cleanup.remedy

    def faults_after(*signs: object) -> list[str]:
        faults: TrackedFaults = ()
        for second, sign in enumerate(signs):
            faults = health_tracker.apply_report(faults, sign, {PID}, Moment(second, "boot", second))  # type: ignore[arg-type]
        return [each.sign.value for each in faults]

    assert faults_after(cleanup) == faults_after(cleanup, cleanup) == ["45"]
    assert faults_after(error, cleanup) == faults_after(cleanup, error) == ["94"]


def test_xid_159_counts_only_while_gpu_is_in_use() -> None:
    sign = xids.sign_of_xid(159, None)
    assert sign is not None and sign.only_in_use
    assert {number for number in ROWS if getattr(xids.sign_of_xid(number, None), "only_in_use", False)} == {159}


def test_unknown_xid_is_informative_and_names_the_catalog() -> None:
    sign = xids.sign_of_xid(999, 3)
    assert sign is not None and (sign.severity, sign.instance) == (Severity.INFORMATIVE, 3)
    assert "Xid catalog" in sign.remedy


def test_fault_after_driver_restart_keeps_the_recovery_action() -> None:
    (before,) = reported(95, 580)
    assert before.asked
    after = health_tracker.from_data(health_tracker.to_data({"u": (before,)}))["u"]
    assert not scans(after, 100, asking=False)
    again = health_tracker.apply_report(after, before.sign, {PID}, Moment(90, "boot", 90))
    assert scans(again, 100, asking=False), "it was reported again since the reset"
