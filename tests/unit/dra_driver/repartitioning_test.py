# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The node driver reports the steps of a repartitioning: each step once, also after a restart, and an operation without an end."""

from __future__ import annotations

from pathlib import Path

import board_model
from dra_driver.core.host.system import System
from dra_driver.core.repartition import progress as steps
from dra_driver.core.repartition import record as records
from dra_driver.core.repartition.progress import StartedStep
from dra_driver.core.repartition.record import Moment, Record, Watch
from dra_driver.supervisors.driver_state import Shared
from dra_driver.supervisors.repartitioning import OLDEST_SECONDS, WORDS, StepReporter, name_of

GPU = board_model.device("h100-80")
NOW = 1_000_000.0


class Scene:
    """A step reporter, and its Events in the API server by name."""

    def __init__(self, directory: Path) -> None:
        self.folder, self.now, self.room = directory, NOW, 100
        self.events: dict[str, tuple[str, str, bool]] = {}
        self.counted: list[str] = []
        self.start()

    def start(self) -> None:
        """Start another process."""
        self.reporter = StepReporter(
            driver="gpu.nvidia.com",
            node="node-1",
            directory=str(self.folder),
            repartition=Watch(str(self.folder), lambda: Moment("boot", self.now, self.now)),
            reported=Shared(frozenset[StartedStep]()),
            devices=lambda: {GPU.uuid: GPU},
            reporter=self,
            counts=self,
            clock=lambda: self.now,
        )

    def step(self, reason: str, message: str, *, name: str, warning: bool) -> bool:
        self.room -= 1
        if self.room < 0:
            return False
        self.events.setdefault(name, (reason, message, warning))
        return True

    def repartition_step(self, step: str) -> None:
        self.counted.append(step)

    def take(self, step: str, reason: str = "") -> None:
        self.now += 1
        steps.add(System(), str(self.folder), StartedStep(self.now, "replan-1", (GPU.uuid,), step, reason))
        self.reporter.report_steps()

    @property
    def reasons(self) -> list[str]:
        return [reason for reason, _message, _warning in self.events.values()]


def test_repartition_each_step_is_reported_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    for step in (records.DRAINING, records.APPLYING, records.PUBLISHING, steps.RELEASED):
        scene.take(step)
        scene.reporter.report_steps()
    assert scene.reasons == ["RepartitionBegun", "RepartitionChanging", "RepartitionApplied", "RepartitionDone"]
    assert scene.counted == [records.DRAINING, records.APPLYING, records.PUBLISHING, steps.RELEASED]
    for _reason, message, warning in scene.events.values():
        assert message.startswith(f"{GPU.describe()}: operation replan-1: ") and not warning
    # A new process reports them again, but the API server accepts none of them.
    scene.now += 1
    scene.start()
    scene.reporter.report_steps()
    assert len(scene.events) == 4 and len(scene.counted) == 4
    scene.events.clear()
    scene.now += OLDEST_SECONDS + 1
    scene.start()
    scene.reporter.report_steps()
    assert not scene.events, "old steps are not reported"


def test_repartition_failure_is_reported_with_its_step(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.take(records.DRAINING)
    why = '"Change the layout of the GPU" failed: NVML says 19'
    scene.take(records.REVERTING, why)
    scene.take(steps.FAILED, why)
    assert scene.reasons == ["RepartitionBegun", "RepartitionFailed", "RepartitionUndone"]
    assert [warning for _reason, _message, warning in scene.events.values()] == [False, True, True]
    assert all(why in message for _reason, message, warning in scene.events.values() if warning)


def test_repartition_events_beyond_the_queue_are_reported_later_in_order(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.room = 1
    scene.take(records.DRAINING)
    scene.take(records.APPLYING)
    assert scene.reasons == ["RepartitionBegun"]
    scene.room = 5
    scene.take(records.PUBLISHING)
    assert scene.reasons == ["RepartitionBegun", "RepartitionChanging", "RepartitionApplied"]


def test_repartition_operation_without_an_end_is_reported_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    record = Record("replan-1", (GPU.uuid, "GPU-away"), records.APPLYING, scene.now + 60, (), ())
    records.write(System(), str(tmp_path), record)
    scene.reporter.report_steps()
    assert not scene.events
    scene.now += 60
    scene.reporter.report_steps()
    scene.now += 60
    scene.reporter.report_steps()
    reported = [*scene.events.values()]
    assert len(reported) == 1
    reason, message, warning = reported[0]
    assert reason == "RepartitionAbandoned" and warning and "GPU-away" in message and "run the playbook" in message
    assert scene.counted == [steps.ABANDONED]
    records.remove(System(), str(tmp_path))
    scene.start()
    scene.reporter.report_steps()
    assert len(scene.counted) == 1


def test_repartition_event_names_are_valid_and_unique() -> None:
    long = "n" * 190 + ".example-of-a-long-name.example.com"
    first = StartedStep(1.0, "a", (), records.DRAINING)
    names = {
        name_of(long, driver, each)
        for driver in ("gpu.nvidia.com", "npu.huawei.com")
        for each in (first, StartedStep(2.0, "a", (), records.DRAINING), StartedStep(1.0, "a", (), records.APPLYING))
    }
    assert len(names) == 6 and all(len(each) <= 253 and not each.startswith(".") for each in names)
    assert set(WORDS) == {*steps.STEPS, steps.ABANDONED}
