# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The node driver reports devices that differ from the layout: after a minimum time, once, and not during a layout change."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import board_model
from dra_driver.claims.store.records import ClaimRecord, DeviceRecord
from dra_driver.core.host.system import System
from dra_driver.core.model import Device, Fault, Finding
from dra_driver.core.partitioning.layout_differences import ANNOTATION, parse_annotation
from dra_driver.core.partitioning.rules import parse_rules
from dra_driver.core.repartition import record as repartition_record
from dra_driver.core.repartition.record import Record, Watch
from dra_driver.inventory import Survey
from dra_driver.supervisors.driver_state import Shared, Snapshot
from dra_driver.supervisors.layout import (
    EVENT_AGREES,
    EVENT_DIFFERS,
    LayoutDifferences,
    LayoutSupervisor,
    differences,
    pause,
    track,
)
from hypothesis import given
from hypothesis import strategies as st

SMALL, LARGE = 19, 9
RULES = parse_rules(
    [
        {"match": {"index": [0, 1]}, "mode": "static", "partitions": {"3g.40gb": 1, "1g.10gb": 1}},
        {"match": {}, "mode": "dynamic"},
    ]
)
SECONDS = 300.0


def gpu(index: int, *places: tuple[int, int]) -> Device:
    return board_model.device("h100-80", index, places=places)


def survey(*devices: Device, faulty: tuple[int, ...] = ()) -> Survey:
    findings = tuple(
        Finding(
            each.index,
            each.describe(),
            each.uuid,
            each,
            Fault("gpu-lost", "it is lost") if each.index in faulty else None,
        )
        for each in devices
    )
    return Survey(findings, {each.uuid: each for each in devices}, (), (), frozenset())


def claim(device: Device, number: int, *, created: bool = True) -> ClaimRecord:
    part = device.partitions[number]
    held = DeviceRecord(
        request="r",
        pool="node-1",
        name="gpu",
        device_uuid=device.uuid,
        kind="partition",
        profile_id=part.profile_id,
        placement_start=part.placement.start,
        placement_size=part.placement.size,
        partition_uuid=part.uuid,
        created=created,
    )
    return ClaimRecord("uid", "team-a", "training", "prepared", "boot", 0.0, (held,))


class Scene:
    """A layout checker with a test clock, and its reports."""

    def __init__(self, directory: Path, known: Shared[LayoutDifferences] | None = None) -> None:
        self.folder, self.now = directory, 0.0
        self.notes: list[Mapping[str, str]] = []
        self.events: list[tuple[str, str]] = []
        self.records: tuple[ClaimRecord, ...] = ()
        self.known = known or Shared(LayoutDifferences())
        self.supervisor = LayoutSupervisor(
            driver="gpu.nvidia.com",
            rules=RULES,
            seconds=SECONDS,
            snapshots=Shared(Snapshot()),
            known=self.known,
            claims=lambda: self.records,
            repartition=Watch(str(directory)),
            annotate=self.notes.append,
            reporter=self,
            clock=lambda: self.now,
        )

    def problem(self, reason: str, message: str) -> None:
        self.events.append((reason, message))

    def done(self, reason: str, message: str, action: str) -> None:
        self.events.append((reason, message))

    def compare(self, at: float, *devices: Device, faulty: tuple[int, ...] = ()) -> None:
        self.now = at
        asyncio.run(self.supervisor.compare(Snapshot(survey=survey(*devices, faulty=faulty))))

    @property
    def noted(self) -> set[int]:
        """Return the devices in the last note."""
        return {each["index"] for each in parse_annotation(self.notes[-1][ANNOTATION]).values()}


GOOD, OTHER = gpu(0, (LARGE, 0), (SMALL, 4)), gpu(0, (LARGE, 0))


def test_lasting_difference_and_its_end_are_reported_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.compare(0, GOOD)
    assert scene.notes == [{ANNOTATION: ""}] and not scene.events
    scene.compare(30, OTHER)
    scene.compare(300, OTHER)
    assert scene.noted == set() and scene.known.value.number == 0, "it may be about to be changed"
    for at in (330, 360, 390):
        scene.compare(at, OTHER)
        assert scene.noted == {0} and scene.known.value.number == 1
    ((reason, message),) = scene.events
    assert reason == EVENT_DIFFERS and "missing: 1g.10gb at 6" in message and "repartition" in message
    scene.compare(400, OTHER, gpu(1))
    scene.compare(700, OTHER, gpu(1))
    assert scene.noted == {0, 1} and [each for each, _text in scene.events] == [EVENT_DIFFERS, EVENT_DIFFERS]
    scene.compare(701, GOOD, gpu(1))
    assert scene.noted == {1} and scene.events[2][1].startswith("1 device differs")
    scene.compare(702, GOOD, gpu(1, (SMALL, 0), (LARGE, 4)))
    assert scene.notes[-1] == {ANNOTATION: ""} and scene.events[-1][0] == EVENT_AGREES and scene.known.value.number == 0


def test_annotation_of_the_previous_process_stays_until_the_next_result(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.compare(0, OTHER)
    scene.compare(299, OTHER)
    assert not scene.notes and not scene.events, "the note of the process before stands"
    scene.compare(300, OTHER)
    assert scene.noted == {0} and len(scene.events) == 1
    # After a configuration change the known differences continue, and their end is reported.
    after = Scene(tmp_path, scene.known)
    after.compare(310, OTHER)
    assert after.noted == {0} and not after.events
    after.compare(311, GOOD)
    assert [each for each, _text in after.events] == [EVENT_AGREES]


def test_dynamic_layout_accepts_partitions_of_claims(tmp_path: Path) -> None:
    device = gpu(2, (SMALL, 0), (SMALL, 1))
    mine = claim(device, 0)
    assert [each["surplus"][0]["placement"]["start"] for each in differences(survey(device), RULES, (mine,))] == [1]
    both = (mine, claim(device, 1))
    assert differences(survey(device), RULES, both) == []
    # An administrator's partition that a claim holds is still not in the layout.
    assert len(differences(survey(device), RULES, (mine, claim(device, 1, created=False)))) == 1


def test_repartitioned_devices_are_not_compared(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.compare(0, GOOD)
    record = Record("replan", (GOOD.uuid,), repartition_record.DRAINING, time.time() + 3600, (), ())
    repartition_record.write(System(), str(tmp_path), record)
    for at in (10, 400, 800):
        scene.compare(at, OTHER, gpu(1))
    assert len(scene.notes) == 1 and not scene.events
    repartition_record.remove(System(), str(tmp_path))
    scene.compare(801, OTHER)
    scene.compare(1100, OTHER)
    assert not scene.events, "from the end of the operation on it counts"
    scene.compare(1101, OTHER)
    assert scene.noted == {0}
    repartition_record.write(System(), str(tmp_path), record)
    scene.compare(1200, GOOD)
    assert scene.noted == {0}
    repartition_record.remove(System(), str(tmp_path))
    scene.compare(1201, GOOD)
    assert scene.events[-1][0] == EVENT_AGREES


def test_unreadable_devices_are_not_compared(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.compare(0, OTHER, faulty=(0,))
    scene.compare(900, OTHER, faulty=(0,))
    assert scene.notes[-1] == {ANNOTATION: ""} and not scene.events
    asyncio.run(scene.supervisor.compare(Snapshot(given_up="no driver")))
    assert len(scene.notes) == 2


seen = st.lists(st.tuples(st.sets(st.integers(0, 3)), st.integers(1, 200), st.booleans()), max_size=12)


@given(seen)
def test_lasting_differences_were_found_in_every_scan(scans: list[tuple[set[int], int, bool]]) -> None:
    """Compare with a model that keeps all scans. A scan without a judgment drops the differences that were not reported yet."""
    known, now, begun = LayoutDifferences(), 0, dict[int, int]()
    decided, output = False, set[int]()
    for found, seconds, judged in scans:
        now += seconds
        if not judged:
            known = pause(known)
            begun = {number: at for number, at in begun.items() if number in output}
            continue
        entries: list[dict[str, Any]] = [{"uuid": str(number)} for number in sorted(found)]
        known = track(known, entries, now, SECONDS)
        begun = {number: begun.get(number, now) for number in found}
        long = {number for number, at in begun.items() if now - at >= SECONDS}
        decided = decided or long == found
        output = long if decided else set()
        assert known.lasting == (None if not decided else tuple({"uuid": str(number)} for number in sorted(output)))
        assert known.number == len(output)
