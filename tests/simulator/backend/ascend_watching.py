# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the events of chips, and their telemetry."""

from __future__ import annotations

import os
import threading
import time

from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.model import Notice
from dra_driver.core.vendors.ascend.health.watch import OWN_CHANGE_SECONDS

from tests.simulator.backend.ascend_stage import Stage, on, until
from tests.simulator.backend.stage import assert_refused

LONG = 120.0


class Listening:
    """A thread that waits for changes all the time, like the driver."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.notices: list[Notice] = []
        self.ended = False
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        try:
            while True:
                self.notices += self.stage.backend.wait_for_change(LONG)
        except BackendUnavailable:
            self.ended = True

    def until(self, words: str, uuid: str = "") -> None:
        until(lambda: any(words in each.message and each.uuid == uuid for each in self.notices), LONG)


@on("8x310P-Pro")
def faults_and_foreign_vnpus_are_reported(stage: Stage) -> None:
    npus = stage.npus()
    listening = Listening(stage)
    stage.control("fault", "2", "error", "0x80E01801")
    listening.until("reports error 0x80e01801", npus[2].uuid)
    stage.control("clear", "2")
    # Changes of vNPUs by other processes are reported, those by this process are not.
    made = stage.make(npus[0], "vir01", 0)
    stage.backend.destroy_partition(npus[0].uuid, made.instance_id)
    time.sleep(OWN_CHANGE_SECONDS)
    assert not any("Another program" in each.message for each in listening.notices), listening.notices
    stage.by_hand("create-vnpu", "-i", "1", "-c", "0", "-f", "vir02")
    listening.until("Another program")
    assert stage.by_slices(npus[1]) == [("vir02", 0)]
    # A wait ends when the backend is closed, and continues when it is open again.
    stage.backend.close()
    until(lambda: listening.ended, LONG)
    assert_refused(BackendUnavailable, stage.backend.wait_for_change, 1.0)
    stage.backend.open()
    stage.npus()
    again = Listening(stage)
    stage.control("fault", "5", "error", "0x80E01801")
    again.until("reports error", npus[5].uuid)


@on("8x910B3")
def chips_and_vnpus_report_telemetry(stage: Stage) -> None:
    npus = stage.npus()
    found = {each.uuid: each for each in stage.backend.telemetry(20)}
    assert set(found) == {npu.uuid for npu in npus}
    first = found[npus[0].uuid]
    assert first.memory_total == npus[0].memory_bytes and first.memory_used
    assert first.power is not None and first.temperature is not None and first.utilization == 0
    assert first.clocks["aicore"] and first.clocks["memory"]
    made = stage.make(npus[0], "vir05_1c_16g", 0)
    stage.control("fault", "0", "process", str(os.getpid()), str(made.instance_id), "memory", "1000")
    stage.npus()
    found = {each.uuid: each for each in stage.backend.telemetry(20, {made.uuid}) if each.device_uuid == npus[0].uuid}
    assert set(found) == {npus[0].uuid, made.uuid}
    # A partitioned chip reports no AI Core load.
    assert found[npus[0].uuid].utilization is None
    assert (found[made.uuid].memory_total, found[made.uuid].memory_used) == (made.memory_bytes, 1000 * 1024 * 1024)
    stage.control("clear")
    stage.backend.destroy_partition(npus[0].uuid, made.instance_id)
    assert made.uuid not in {each.uuid for each in stage.backend.telemetry(20, {made.uuid})}


@on("8x310P-Pro")
def faulty_chip_is_omitted_and_delays_no_other_chip(stage: Stage) -> None:
    backend = stage.fresh(scan=3600, full_scan=3600)
    npus = stage.npus()
    backend.discover()
    stage.control("fault", "2", "call", "dcmi_get_device_temperature", "hang")
    found = {each.uuid for each in backend.telemetry(3.0)}
    assert npus[2].uuid not in found and found <= {npu.uuid for npu in npus}
    stage.control("clear", "2")
