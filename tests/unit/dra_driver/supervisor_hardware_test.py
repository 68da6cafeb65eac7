# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The hardware supervisor: results of scans, its give-up time, and its effects on other parts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from backend_model import DRIVER
from claim_steps import SMALL, prepare, unprepare
from dra_driver.claims.locking import DeviceGuard
from dra_driver.core.discovery.device_locks import DeviceLocks
from dra_driver.core.errors import BackendUnavailable, InUse
from dra_driver.core.host.system import System
from dra_driver.core.model import Device, Fault, Finding, Offer, Placement
from dra_driver.core.repartition import record as records
from dra_driver.core.repartition.record import Record, Watch
from dra_driver.inventory import Survey
from dra_driver.supervisors.driver_state import Conditions, Shared, Snapshot
from dra_driver.supervisors.hardware import HardwareWatch
from dra_driver.supervisors.library_release import LibraryLock
from machine_model import POOL, Claims, Node


class Scene:
    """A hardware supervisor for a node's GPUs, and its recorded results."""

    def __init__(self, directory: Path, interval: float = 0.05) -> None:
        self.node = Node(directory, Claims())
        self.snapshots = Shared(Snapshot())
        self.conditions = Conditions("hardware")
        self.problems: list[tuple[str, str]] = []
        self.scan_requested = asyncio.Event()
        locks = DeviceLocks(str(directory / "state"), "the driver")
        self.watch = HardwareWatch(
            self.node.backend,
            driver=DRIVER,
            pool=POOL,
            rules=self.node.rules,
            interval=interval,
            full_interval=300.0,
            ownership=self.node.ownership,
            snapshots=self.snapshots,
            conditions=self.conditions,
            library_lock=LibraryLock(locks, DeviceGuard(locks)),
            scan_requested=self.scan_requested,
            report_problem=lambda reason, message: self.problems.append((reason, message)),
            repartition=Watch(str(directory / "state")),
            claims=lambda: tuple(self.node.store.claims.values()),
        )

    async def until(self, condition: Callable[[], Any]) -> None:
        deadline = asyncio.get_running_loop().time() + 8
        while not condition():
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)


def run(
    directory: Path,
    scenario: Callable[[Scene], Awaitable[None]],
    *,
    watching: bool = True,
    present: bool = True,
    interval: float = 0.05,
) -> None:
    async def main() -> None:
        scene = Scene(directory, interval)
        scene.node.backend.present = present
        work = asyncio.ensure_future(scene.watch.run()) if watching else None
        try:
            await scenario(scene)
        finally:
            if work is not None:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            scene.watch.close()
            scene.node.close()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.01)
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.02)


def test_scan_result_is_shared_with_its_time(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        assert scene.conditions.problems
        await scene.watch.scan()
        snapshot = scene.snapshots.value
        assert snapshot.survey is not None
        assert len(snapshot.inventory.offers) == 2 * 26
        assert (snapshot.given_up, scene.conditions.problems) == ("", ())
        assert snapshot.scanned_at > 0

    run(tmp_path, scenario, watching=False)


def test_scan_repeated_failures_withdraw_devices_until_recovery(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.until(lambda: scene.snapshots.value.survey)
        scene.node.backend.failures["discover"] = [BackendUnavailable("hiccup")] * 2
        await scene.until(lambda: not scene.node.backend.failures["discover"])
        assert scene.snapshots.value.survey is not None
        scene.node.backend.present = False
        await scene.until(lambda: scene.snapshots.value.given_up)
        assert scene.snapshots.value.survey is None
        assert "not loaded" in scene.conditions.problems[0]
        scene.node.backend.present = True
        await scene.until(lambda: scene.snapshots.value.survey)
        assert scene.conditions.problems == ()

    run(tmp_path, scenario)


def test_scan_slow_gpu_delays_no_other_and_is_scanned_again_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dra_driver.supervisors.hardware.FIRST_READ_SECONDS", 0.01)

    async def scenario(scene: Scene) -> None:
        scene.watch._interval = 3600.0
        gate = scene.node.backend.gates[1] = threading.Event()
        work = asyncio.ensure_future(scene.watch.run())
        await scene.until(lambda: scene.snapshots.value.survey)
        first = scene.snapshots.value
        assert first.survey is not None
        assert set(first.survey.devices) == {scene.node.gpus.template(0).uuid}
        assert len(first.inventory.offers) == 26
        assert scene.conditions.problems == ()
        assert scene.problems == [], "it has no fault yet"
        gate.set()
        await scene.until(lambda: len(scene.snapshots.value.inventory.offers) == 2 * 26)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)

    run(tmp_path, scenario, watching=False)


def test_scan_without_any_answer_shares_no_result(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        backend = scene.node.backend
        backend.gates = {0: threading.Event(), 1: threading.Event()}
        scan_task = asyncio.ensure_future(scene.watch.scan())
        await scene.until(lambda: len([name for name, _arguments in backend.calls if name == "discover"]) > 2)
        assert scene.snapshots.value.survey is None
        backend.gates[0].set()
        await scan_task
        assert len(scene.snapshots.value.inventory.offers) == 26

    run(tmp_path, scenario, watching=False)


def test_scan_fault_withdraws_no_devices_and_is_logged_once(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.until(lambda: scene.snapshots.value.survey)
        offers = set(scene.snapshots.value.inventory.offers)
        scene.node.backend.faults[1] = Fault("reset-required", "It needs a reset")
        scene.node.backend.strangers = (Finding(7, "GPU 7", "", None, Fault("no-answer", "It hangs")),)
        await scene.until(lambda: scene.snapshots.value.inventory.faults)
        inventory = scene.snapshots.value.inventory
        assert set(inventory.offers) == offers
        faulty = scene.node.gpus.template(1).uuid
        assert list(inventory.faults) == [faulty]
        survey = scene.snapshots.value.survey
        assert survey is not None and [each.uuid for each in survey.devices.values() if each.health.signs] == [faulty]
        for seconds in range(5):
            scene.node.backend.faults[1] = Fault("reset-required", f"It has needed a reset for {seconds} s")
            await asyncio.sleep(0.08)
        ((reason, message),) = scene.problems
        assert reason == "DevicesUnhealthy"
        assert "GPU 7" in message and "no-answer" in message and "reset-required" in message
        assert scene.conditions.problems == ()

    run(tmp_path, scenario)


def test_scan_partition_of_a_short_claim_is_not_foreign(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        node = scene.node
        await node.start()
        entered, scan_now, scanned, finish = (threading.Event() for _each in range(4))
        real = node.backend.discover

        def slow(full: bool = False, patience: float | None = None) -> Any:
            entered.set()
            assert scan_now.wait(10)
            found = real(full, patience)
            scanned.set()
            assert finish.wait(10)
            return found

        node.backend.discover = slow  # type: ignore[method-assign]
        scan_task = asyncio.ensure_future(scene.watch.scan())
        assert await asyncio.to_thread(entered.wait, 10)
        claim = node.claims.allocate("short", SMALL)
        assert await prepare(node, claim) == ""
        scan_now.set()
        assert await asyncio.to_thread(scanned.wait, 10)
        assert await unprepare(node, claim) == ""
        finish.set()
        await scan_task
        survey = scene.snapshots.value.survey
        assert survey is not None
        assert len(survey.devices[node.gpus.template(0).uuid].partitions) == 1, "the scan found it"
        assert "gpu-0" in scene.snapshots.value.inventory.offers

    run(tmp_path, scenario, watching=False)


def test_scan_starts_at_once_when_devices_appear(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library lists the devices at its initialization: after a change it is initialized again, once."""
    monkeypatch.setattr("dra_driver.supervisors.hardware.SURROUNDINGS_SECONDS", 0.02)
    first = Node(tmp_path, Claims())
    with first.gpus.state() as state:
        pulled = dict([state.popitem()])
    first.close()

    async def scenario(scene: Scene) -> None:
        backend = scene.node.backend
        await scene.until(lambda: scene.snapshots.value.survey is not None)
        assert len(scene.snapshots.value.survey.devices) == 1  # type: ignore[union-attr]
        await scene.until(lambda: ("driver_edits", ()) in backend.calls)
        done = len(backend.calls)
        await asyncio.sleep(0.2)
        assert len(backend.calls) == done, "without a change there is no request"
        with scene.node.gpus.state() as state:
            state.update(pulled)
        await scene.until(lambda: len(scene.snapshots.value.survey.devices) == 2)  # type: ignore[union-attr]
        assert [name for name, _arguments in backend.calls[done:]][:2] == ["renew", "discover"]

    run(tmp_path, scenario, interval=3600.0)


def test_scan_starts_at_once_when_the_driver_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.hardware.SURROUNDINGS_SECONDS", 0.02)
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 3600.0)

    async def scenario(scene: Scene) -> None:
        await asyncio.sleep(0.1)
        assert scene.snapshots.value.survey is None
        scene.node.backend.present = True
        await scene.until(lambda: scene.snapshots.value.survey is not None)
        scene.node.backend.present = False  # and unloaded, and loaded again
        await asyncio.sleep(0.2)
        scene.node.backend.present = True
        await scene.until(lambda: ("renew", ()) in scene.node.backend.calls)

    run(tmp_path, scenario, present=False)


def test_scan_hides_intermediate_steps_of_a_layout_change(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.watch.scan()
        before = scene.snapshots.value.survey
        assert before is not None
        first, second = scene.node.gpus.devices()
        record = Record("repartition-7", (first.uuid,), "applying", time.time() + 600, (), ())
        records.write(System(), str(tmp_path / "state"), record)
        for uuid in (first.uuid, second.uuid):
            scene.node.backend.set_partitioning(uuid, enabled=True)
            scene.node.backend.create_partition(uuid, 9, Placement(4, 4))
        await scene.watch.scan()
        held = scene.snapshots.value.survey
        assert held is not None

        def of(survey: Survey, uuid: str) -> list[Offer]:
            return [each for each in survey.offers if each.device_uuid == uuid]

        assert of(held, first.uuid) == of(before, first.uuid)
        assert of(held, second.uuid) != of(before, second.uuid)
        # The consumed counters come from the same scan, for each device.
        sets = {each.name: each for each in held.counter_sets}
        previous = {each.name: each for each in before.counter_sets}
        assert (
            sets[of(before, first.uuid)[0].counter_set or ""] == previous[of(before, first.uuid)[0].counter_set or ""]
        )
        records.remove(System(), str(tmp_path / "state"))
        await scene.watch.scan()
        after = scene.snapshots.value.survey
        assert after is not None and of(after, first.uuid) != of(before, first.uuid)
        assert of(after, second.uuid) == of(held, second.uuid)

    run(tmp_path, scenario, watching=False)


def test_scan_unexpected_exception_in_one_devices_offers_keeps_its_previous_ones(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.watch.scan()
        before = scene.snapshots.value
        first, second = scene.node.gpus.devices()
        real = scene.node.backend.offers

        def offers_of(device: Device, *arguments: Any) -> Any:
            if device.uuid == second.uuid:
                raise ValueError("'x580' is not a version")
            return real(device, *arguments)

        scene.node.backend.offers = offers_of  # type: ignore[method-assign]
        await scene.watch.scan()
        snapshot = scene.snapshots.value
        assert snapshot.survey is not None and before.survey is not None
        assert set(snapshot.inventory.offers) == set(before.inventory.offers)
        assert snapshot.survey.counter_sets == before.survey.counter_sets
        assert list(snapshot.inventory.faults) == [second.uuid]
        assert snapshot.survey.devices[second.uuid].health.causes == ("unknown-error",)
        assert snapshot.survey.devices[first.uuid].health.causes == ()
        ((reason, text),) = scene.problems
        assert reason == "DevicesUnhealthy" and "ValueError" in text and "supervisor_hardware_test.py" in text
        del scene.node.backend.offers  # type: ignore[attr-defined]
        await scene.watch.scan()
        assert scene.snapshots.value.inventory.faults == {}

    run(tmp_path, scenario, watching=False)


def test_first_scan_unexpected_exception_in_one_devices_offers_publishes_the_others(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        first, second = scene.node.gpus.devices()
        real = scene.node.backend.counter_set

        def counters(device: Device, *arguments: Any) -> Any:
            if device.uuid == second.uuid:
                raise KeyError("slices")
            return real(device, *arguments)

        scene.node.backend.counter_set = counters  # type: ignore[method-assign]
        await scene.watch.scan()
        offers = scene.snapshots.value.inventory.offers.values()
        assert len(offers) == 26 and {offer.device_uuid for offer in offers} == {first.uuid}

    run(tmp_path, scenario, watching=False)


@pytest.mark.parametrize("call", ["discover", "driver_edits"])
def test_scan_unexpected_exception_does_not_end_the_scans(tmp_path: Path, call: str) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.until(lambda: scene.snapshots.value.survey)
        scene.node.backend.failures[call] = [ValueError("no number")] * 5  # type: ignore[list-item]
        seen = scene.snapshots.value.scanned_at
        await scene.until(lambda: not scene.node.backend.failures[call])
        await scene.until(lambda: scene.snapshots.value.survey and scene.snapshots.value.scanned_at > seen)
        assert scene.conditions.problems == ()
        reasons = [reason for reason, _message in scene.problems]
        assert reasons == (["DriverIncomplete"] if call == "driver_edits" else [])

    run(tmp_path, scenario)


@pytest.mark.parametrize("device", ["gpu-0", SMALL])
def test_device_with_a_claim_is_not_reset_though_no_process_is_on_it(tmp_path: Path, device: str) -> None:
    """A claim was prepared after the decision for a reset, and its container has not started: no reset occurs."""

    async def scenario(scene: Scene) -> None:
        node = scene.node
        await node.start()
        uuid = node.gpus.template(0).uuid
        claim = scene.node.claims.allocate("a", device)
        assert await prepare(node, claim) == ""
        with pytest.raises(InUse, match="default/a") as refusal:
            await scene.watch.reset([uuid])
        assert refusal.value.claims
        assert not any(call[0] == "reset" for call in node.backend.calls)
        assert await unprepare(node, claim) == ""
        await scene.watch.reset([uuid])

    run(tmp_path, scenario, watching=False)


@pytest.mark.parametrize("rounds", range(6))
def test_run_cancelled_as_scan_is_requested_ends(tmp_path: Path, rounds: int) -> None:
    async def scenario(scene: Scene) -> None:
        watching = asyncio.ensure_future(scene.watch.run())
        await scene.until(lambda: scene.snapshots.value.survey)
        await asyncio.sleep(0.1)  # it waits for the next scan
        scene.scan_requested.set()
        for _round in range(rounds):
            await asyncio.sleep(0)
        watching.cancel()
        await asyncio.wait((watching,), timeout=2)
        has_ended = watching.done()
        watching.cancel()
        assert has_ended

    run(tmp_path, scenario, watching=False, interval=3600.0)
