# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Inject the Xids of NVIDIA's catalog: severity, and the end of a fault that needs a reset, by the GPU's own report."""

from __future__ import annotations

from dra_driver.core.health import tracker as health_tracker
from dra_driver.core.health.conditions import Ends
from dra_driver.core.health.tracker import Moment, TrackedFaults

from tests.simulator.backend.scenarios_of_watching import Listening
from tests.simulator.backend.stage import Stage, on
from tests.unit.core.xid_table import NEVER, REBOOT, RESET, ROWS, asks

BRANCH = 580  # of the simulated driver
GPU = 1


class Clock:
    """A clock that advances by 10 s per scan."""

    def __init__(self) -> None:
        self.now = 0.0

    def next(self) -> Moment:
        self.now += 10
        return Moment(self.now, "boot", self.now)


def scans(stage: Stage, clock: Clock, faults: TrackedFaults) -> TrackedFaults:
    """Scan the GPU three times; return its faults without the states that scans find."""
    for _scan in range(3):
        finding = stage.backend.discover()[GPU]
        faults = health_tracker.apply_scan(faults, finding, clock.next())
    return tuple(each for each in faults if each.sign.ends is not Ends.SCAN)


@on("8xH100")
def each_xid_has_the_recovery_of_the_catalog(stage: Stage) -> None:
    gpus = stage.gpus()
    listening, clock = Listening(stage), Clock()
    listening.registered(gpus)
    for number, row in ROWS.items():
        if row.severity is None or row.ends not in (RESET, REBOOT, NEVER):
            continue
        listening.notices.clear()
        stage.control("fault", str(GPU), "xid", str(number))
        listening.until(f"Xid {number}", gpus[GPU])
        (sign,) = [each.sign for each in listening.notices if each.sign is not None and each.sign.value == str(number)]
        assert sign.severity is row.severity, number
        ill = scans(stage, clock, health_tracker.apply_report((), sign, (), clock.next()))
        assert [each.sign for each in ill] == [sign], (number, "it has ended without a reset")
        assert stage.gpus()[GPU].health.needs_recovery is asks(number, BRANCH), number
        # Another program resets the GPU without a report.
        stage.control("clear", str(GPU))
        after = scans(stage, clock, ill)
        assert bool(after) == (row.ends != RESET or not asks(number, BRANCH)), (number, after)
        assert bool(health_tracker.apply_reset(after)) == (row.ends != RESET), number
    listening.ended = True


@on("8xH100")
def a_reset_is_reported_to_the_driver(stage: Stage) -> None:
    """The process that resets the GPU reports it when it returns the library."""
    from dra_driver.core.discovery.device_locks import DeviceLocks, library_alone
    from dra_driver.core.health import repair_marks

    gpus = stage.gpus()
    state = stage.root / "state"
    state.mkdir()
    locks = DeviceLocks(str(state), "a test")
    with library_alone(locks, lambda: None, 5):
        stage.backend.reset([gpus[GPU].uuid])
        assert repair_marks.read(str(state)) == ()
    marks = repair_marks.read(str(state))
    assert [(each.uuid, each.what) for each in marks] == [(gpus[GPU].uuid, repair_marks.RESET)]
    with library_alone(locks, lambda: None, 5):
        pass
    assert repair_marks.read(str(state)) == marks
