# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The state machine of device health: start, confirmation, and end of faults, and the published state."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from board_model import device
from dra_driver.core.health import tracker as health_tracker
from dra_driver.core.health.conditions import Ends, Severity, Sign
from dra_driver.core.health.tracker import Moment, TrackedFault, TrackedFaults
from dra_driver.core.model import Device, Fault, Finding, Health, Process, Taint
from dra_driver.core.vendors.nvidia import offers
from dra_driver.core.vendors.nvidia.health.condition import _of_fabric, _of_fields
from hypothesis import given
from hypothesis import strategies as st

BOARD = "h100-80"
GPU = device(BOARD, enabled=True, places=((19, 0), (9, 4)))
PENDING = Sign("repair-pending", Severity.DEGRADED, "A repair is pending.", "Reset it.")
BROKEN = Sign("broken", Severity.FAILED, "It is broken.", "Replace it.")
ERROR = Sign("error", Severity.FAILED, "It reported error 9.", "Reset it.", Ends.RESET, "9", is_mended_by_reset=True)
CRASH = Sign("error", Severity.INFORMATIVE, "It reported error 5.", "Look at it.", Ends.PROCESSES, "5")
STOP = Sign("error", Severity.FAILED, "It reported error 7.", "Restart.", Ends.RESTART, "7")
WORN = Sign("error", Severity.FAILED, "It reported error 3.", "Replace it.", Ends.REPLACEMENT, "3")
ASKED = Sign("error", Severity.DEGRADED, "It reported error 4.", "Look at it.", Ends.RECOVERY, "4")
SIGNS = (PENDING, BROKEN, ERROR, CRASH, STOP, ASKED, replace(CRASH, instance=1), replace(ERROR, instance=2))


def at(now: float, boot: str = "boot", wall: float = 0.0) -> Moment:
    """Return a time. ``wall`` is the system clock's deviation from the monotonic clock."""
    return Moment(now + wall, boot, now)


def found(*signs: Sign, fault: Fault | None = None, pids: tuple[int, ...] = (), **readings: Any) -> Finding:
    """Return the finding of a scan of the GPU."""
    gpu = replace(GPU, health=Health(signs, **readings), processes=tuple(Process(pid) for pid in pids))
    return Finding(0, "GPU 0", GPU.uuid, gpu, fault)


def unfinished(faults: TrackedFaults) -> bool:
    """Return whether another scan would confirm a fault or its end."""
    return health_tracker.verify_at(faults, max(each.seen_at or 0.0 for each in faults)) is not None


def names(faults: TrackedFaults) -> set[str]:
    return {f"{each.sign.cause} {each.sign.value}".strip() for each in faults}


def test_tracker_evicts_only_after_second_scan() -> None:
    first = health_tracker.apply_scan((), found(BROKEN), at(10))
    assert [each.effect() for each in first] == ["NoSchedule"] and unfinished(first)
    at_once = health_tracker.apply_scan(first, found(BROKEN), at(10.5))
    assert [each.effect() for each in at_once] == ["NoSchedule"]
    sure = health_tracker.apply_scan(at_once, found(BROKEN), at(10 + health_tracker.VERIFY_SECONDS))
    assert [each.effect() for each in sure] == ["NoExecute"] and not unfinished(sure)
    assert (sure[0].since, sure[0].seen) == (10, 10 + health_tracker.VERIFY_SECONDS)


@pytest.mark.parametrize("wall", [-7200.0, 7200.0, 1e9])
def test_tracker_clock_step_changes_no_duration(wall: float) -> None:
    first = health_tracker.apply_scan((), found(BROKEN), at(10))
    soon = health_tracker.apply_scan(first, found(BROKEN), at(10.5, wall=wall))
    assert unfinished(soon), "confirmed although only 0.5 s have passed"
    sure = health_tracker.apply_scan(soon, found(BROKEN), at(10 + health_tracker.VERIFY_SECONDS, wall=wall))
    assert not unfinished(sure), "not confirmed although VERIFY_SECONDS have passed"
    missed = health_tracker.apply_scan(sure, found(), at(20))
    assert health_tracker.apply_scan(missed, found(), at(20.5, wall=wall)), "ended although only 0.5 s have passed"
    assert health_tracker.apply_scan(missed, found(), at(20 + health_tracker.VERIFY_SECONDS, wall=wall)) == ()


@pytest.mark.parametrize("wall", [-1e9, 1e9])
def test_tracker_clock_step_keeps_removed_device(wall: float) -> None:
    ill = health_tracker.apply_report((), STOP, (), at(10))
    assert not health_tracker.is_forgotten(ill, at(20, wall=wall))
    assert health_tracker.is_forgotten(ill, at(20 + health_tracker.FORGET_SECONDS, wall=wall))
    earlier = health_tracker.from_data(health_tracker.to_data({"u": ill}))["u"]
    assert not health_tracker.is_forgotten(earlier, at(5, "next", wall=10)), "by the system clock, across processes"
    assert health_tracker.is_forgotten(earlier, at(5, "next", wall=health_tracker.FORGET_SECONDS + 10))


def test_tracker_fault_of_earlier_process_is_confirmed_by_monotonic_clock() -> None:
    before = health_tracker.from_data(
        health_tracker.to_data({"u": health_tracker.apply_scan((), found(BROKEN), at(1e6))})
    )["u"]
    again = health_tracker.apply_scan(before, found(BROKEN), at(5, "next"))
    assert unfinished(again)
    assert not unfinished(
        health_tracker.apply_scan(again, found(BROKEN), at(5 + health_tracker.VERIFY_SECONDS, "next"))
    )


def test_tracker_fault_end_is_verified() -> None:
    ill = health_tracker.apply_scan((), found(PENDING), at(10))
    missed = health_tracker.apply_scan(ill, found(), at(20))
    assert names(missed) == {"repair-pending"} and unfinished(missed)
    assert health_tracker.apply_scan(missed, found(), at(20 + health_tracker.VERIFY_SECONDS - 0.1)) != ()
    again = health_tracker.apply_scan(missed, found(PENDING), at(21))
    assert names(health_tracker.apply_scan(again, found(), at(30))) == {"repair-pending"}, (
        "the confirmation starts again"
    )
    assert health_tracker.apply_scan(missed, found(), at(20 + health_tracker.VERIFY_SECONDS)) == ()


def test_verify_at_severe_faults_at_once_informative_after_quiet() -> None:
    crashed = health_tracker.apply_scan(health_tracker.apply_report((), CRASH, (), at(10)), found(), at(10.5))
    assert health_tracker.verify_at(crashed, 10.5) == 10 + health_tracker.QUIET_SECONDS
    again = health_tracker.apply_scan(health_tracker.apply_report(crashed, CRASH, (), at(12)), found(), at(12.5))
    assert health_tracker.verify_at(again, 12.5) == 12 + health_tracker.QUIET_SECONDS
    worse = health_tracker.apply_scan(
        health_tracker.apply_report(crashed, ERROR, (), at(12)), found(needs_recovery=True, needs_reset=True), at(12.2)
    )
    failed = health_tracker.apply_scan(worse, found(needs_recovery=False), at(12.5))
    assert health_tracker.verify_at(failed, 12.5) == 12.5 + health_tracker.VERIFY_SECONDS
    assert health_tracker.verify_at(health_tracker.apply_report((), STOP, (), at(1)), 2) is None, "no scan can end it"
    once = health_tracker.apply_scan((), found(BROKEN), at(10))
    assert health_tracker.verify_at(once, 10) == 10 + health_tracker.VERIFY_SECONDS
    faulty = health_tracker.apply_scan(once, found(fault=Fault("x", "x")), at(20))
    assert health_tracker.verify_at(faulty, 20) is None, "scans do not find it while the device has another fault"


def test_tracker_failed_scan_keeps_unread_faults() -> None:
    lost = found(BROKEN, fault=Fault("broken", "It does not answer"))
    ill = health_tracker.apply_scan((), found(PENDING), at(10))
    both = health_tracker.apply_scan(health_tracker.apply_scan(ill, lost, at(20)), lost, at(30))
    assert names(both) == {"broken", "repair-pending"}
    cannot = found(unchecked_causes=frozenset({"repair-pending"}))
    assert names(health_tracker.apply_scan(health_tracker.apply_scan(ill, cannot, at(20)), cannot, at(30))) == {
        "repair-pending"
    }
    awaited = Finding(0, "GPU 0", GPU.uuid, None, Fault("awaited", "It is being read"))
    assert health_tracker.apply_scan(ill, awaited, at(20)) == ill


def test_tracker_reported_fault_ends_only_by_its_end_event() -> None:
    before: TrackedFaults = ()
    for sign in (ERROR, CRASH, STOP, WORN):
        before = health_tracker.apply_report(before, sign, (41, 42), at(10))
    assert [each.effect() for each in before if each.sign == ERROR] == ["NoExecute"]

    def later(faults: TrackedFaults, boot: str = "boot", **readings: Any) -> set[str]:
        for now in (20, 30):
            faults = health_tracker.apply_scan(faults, found(**readings), at(now, boot))
        return names(faults)

    assert later(before, pids=(42,)) == {"error 9", "error 5", "error 7", "error 3"}, (
        "no device reports that it needs no reset"
    )
    assert later(before, pids=(42,), needs_recovery=True) == {"error 9", "error 5", "error 7", "error 3"}
    assert later(before, pids=(42,), needs_recovery=False) == {"error 9", "error 5", "error 7", "error 3"}, (
        "it asked for no reset"
    )
    asked = health_tracker.apply_scan(before, found(pids=(42,), needs_recovery=True, needs_reset=True), at(11))
    assert later(asked, pids=(42,), needs_recovery=False) == {"error 5", "error 7", "error 3"}
    drained = health_tracker.apply_scan(before, found(pids=(42,), needs_recovery=True, needs_reset=False), at(11))
    assert later(drained, pids=(42,), needs_recovery=False) == {"error 9", "error 5", "error 7", "error 3"}
    assert later(before, pids=(43,)) == {"error 9", "error 7", "error 3"}
    assert later(before, boot="next", pids=(42,)) == {"error 3"}
    assert names(health_tracker.apply_reset(before)) == {"error 7", "error 3"}
    assert health_tracker.apply_repair(before) == ()


def test_tracker_repeated_report_is_one_fault() -> None:
    before = health_tracker.apply_report((), CRASH, (1,), at(10))
    for second in range(1000):
        before = health_tracker.apply_report(before, CRASH, (2 + second, 5000), at(11 + second))
    (one,) = before
    assert (one.since, one.seen, one.times) == (10, 1010, 1001)
    assert one.processes == frozenset({1001, 5000}), "the processes of earlier reports do not use the device any more"
    assert health_tracker.apply_report(before, CRASH, (), at(1011))[0].processes == one.processes, (
        "no process is known for this report"
    )
    assert health_tracker.apply_report(before, CRASH, (), at(1011, "next"))[0].processes == frozenset()
    many = before
    for number in range(1000):
        many = health_tracker.apply_report(many, replace(CRASH, value=str(number)), (), at(2000 + number))
    many = health_tracker.apply_report(many, STOP, (), at(1))
    assert len(many) == health_tracker.MOST_FAULTS and STOP in {each.sign for each in many}


def test_taints_most_severe_first_within_limit() -> None:
    faults: TrackedFaults = ()
    for number in range(9):
        faults = health_tracker.apply_report(faults, replace(PENDING, cause=f"cause-{number}"), (), at(number))
    faults = health_tracker.apply_report(faults, STOP, (), at(20))
    faults = health_tracker.apply_report(faults, ERROR, (), at(21))
    faults = health_tracker.apply_report(faults, CRASH, (), at(22))
    published = health_tracker.taints("gpu.example.com", faults)
    assert published[0] == Taint("gpu.example.com/error", "NoExecute", "7"), "the first reported fault"
    assert len(published) == 4 and {each.effect for each in published[1:]} == {"NoSchedule"}
    lenient = {**health_tracker.DEFAULT_EFFECTS, Severity.FAILED: "NoSchedule", Severity.INFORMATIVE: "None"}
    assert "NoExecute" not in {each.effect for each in health_tracker.taints("gpu.example.com", faults, lenient)}
    (crash,) = health_tracker.taints("d", [each for each in faults if each.sign == CRASH], lenient)
    assert crash == Taint("d/error", "None", "5")


def test_tainted_partition_error_affects_only_partition_unless_reset() -> None:
    one, other = GPU.partitions
    offered = offers.offers(GPU, dynamic=False)
    devices = {GPU.uuid: GPU}

    def concerned(sign: Sign) -> set[str | None]:
        faults = {GPU.uuid: health_tracker.apply_report((), replace(sign, severity=Severity.DEGRADED), (), at(1))}
        return {each.partition_uuid for each in health_tracker.tainted("d", offered, devices, faults) if each.taints}

    assert concerned(replace(CRASH, instance=one.instance_id)) == {one.uuid}
    assert concerned(replace(CRASH, instance=99)) == set()
    assert concerned(CRASH) == {one.uuid, other.uuid}
    assert concerned(replace(ERROR, instance=one.instance_id)) == {one.uuid, other.uuid}


def test_tainted_healthy_device_is_unchanged() -> None:
    offered = offers.offers(GPU, dynamic=True)
    assert health_tracker.tainted("d", offered, {GPU.uuid: GPU}, {GPU.uuid: ()}) == offered
    assert (
        health_tracker.tainted(
            "d", offered, {GPU.uuid: GPU}, {"other": health_tracker.apply_report((), STOP, (), at(1))}
        )
        == offered
    )


STEPS = st.lists(
    st.tuples(
        st.sampled_from(("report", "scan", "fault", "reset")),
        st.lists(st.sampled_from(SIGNS), max_size=3),
        st.floats(0.1, 20),
        st.sampled_from(("boot", "boot", "next")),
        st.sampled_from((None, False, True)),
    ),
    max_size=30,
)


def walk(steps: Any) -> tuple[TrackedFaults, float]:
    """Run a history of scans. Return the final faults and the time."""
    faults, now = (), 0.0
    for kind, signs, seconds, boot, needs in steps:
        now += seconds
        if kind == "report":
            for sign in signs:
                faults = health_tracker.apply_report(faults, sign, (7,), at(now, boot))
        elif kind == "reset":
            faults = health_tracker.apply_reset(faults)
        else:
            states = [sign for sign in signs if sign.ends is Ends.SCAN]
            fault = Fault("x", "x") if kind == "fault" else None
            faults = health_tracker.apply_scan(
                faults, found(*states, fault=fault, pids=(7,), needs_recovery=needs), at(now, boot)
            )
    return faults, now


@given(STEPS)
def test_tracker_healthy_machine_after_reboot_has_no_faults(steps: Any) -> None:
    faults, now = walk(steps)
    for _scan in range(2):
        now += health_tracker.VERIFY_SECONDS + 0.1
        faults = health_tracker.apply_scan(faults, found(needs_recovery=False), at(now, "anew"))
    assert faults == ()


@given(STEPS)
def test_history_round_trips_without_duplicate_signs(steps: Any) -> None:
    faults, now = walk(steps)
    again = health_tracker.from_data(json.loads(json.dumps(health_tracker.to_data({"u": faults})))).get("u", ())
    assert [replace(each, well_since=None, found_at=None, seen_at=None) for each in faults] == list(again)
    keys = [each.sign.key for each in faults]
    assert len(keys) == len(set(keys)) and all(each.since <= each.seen <= now for each in faults)
    assert len(health_tracker.taints("d", faults)) <= health_tracker.MOST_TAINTS


@given(STEPS, st.sampled_from([sign for sign in SIGNS if sign.ends is not Ends.SCAN]))
def test_tracker_only_end_event_ends_an_error(steps: Any, sign: Sign) -> None:
    quiet = [(kind, signs, seconds, "boot", True) for kind, signs, seconds, _boot, _needs in steps if kind != "reset"]
    faults, now = walk([("report", [sign], 1.0, "boot", None), *quiet])
    assert sign.key in {each.sign.key for each in faults}, now


@pytest.mark.parametrize("text", ["[]", '{"u": [{}]}', '{"u": 3}', '{"u": [{"cause": "x"}]}', "null"])
def test_from_data_unknown_format_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="invalid device faults"):
        health_tracker.from_data(json.loads(text))


def test_signs_of_fields_and_fabric() -> None:
    assert list(_of_fields({230: 0, 144: 0, 145: 0})) == []
    (reset,) = _of_fields({230: 1})
    assert (reset.value, reset.severity, reset.is_mended_by_reset) == ("reset", Severity.FAILED, True)
    assert [sign.value for sign in _of_fields({230: 42})] == ["42"]
    pending, failure = _of_fields({144: 1, 145: 1})
    assert (pending.severity, failure.severity) == (Severity.INFORMATIVE, Severity.DEGRADED)
    well = 0b10_10_10_10
    assert list(_of_fabric(3, 0, well)) == [] and list(_of_fabric(3, 0, 0)) == []
    assert [sign.value for sign in _of_fabric(1, 0, 0)] == ["not-joined"]
    assert [sign.value for sign in _of_fabric(3, 999, 0)] == ["failed"]
    assert [sign.value for sign in _of_fabric(3, 0, 0b01_10_10)] == ["routes"]
    (degraded,) = _of_fabric(3, 0, 0b10_10_10_01)
    assert (degraded.value, degraded.severity) == ("bandwidth", Severity.INFORMATIVE)


def test_at_first_sight_returns_states() -> None:
    gpu: Device = replace(GPU, health=Health((BROKEN,)))
    once = health_tracker.faults_of_single_scan(
        [Finding(0, "GPU 0", GPU.uuid, gpu), Finding(1, "GPU 1", "", None, Fault("x", "x"))]
    )
    assert [each.sign for each in once[GPU.uuid]] == [BROKEN]
    assert isinstance(once[GPU.uuid][0], TrackedFault)
