# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The whole driver of one vendor with hardware that other programs change, and that hangs, disappears, and returns."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest
from backend_model import DRIVER
from claim_steps import SMALL
from dra_driver.claims.store.store import Store
from dra_driver.claims.store.tables import Change
from dra_driver.core.discovery.device_locks import LIBRARY, REQUEST, DeviceLocks
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.model import Fault, Finding, Placement
from vendor_scene import Scene, run


def test_hand_made_partition_appears_and_is_never_destroyed(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        gpu = scene.backend.gpus.template(0).uuid
        scene.backend.set_partitioning(gpu, True)
        scene.backend.create_partition(gpu, 9, Placement(4, 4))
        scene.driver.request_scan()
        await scene.until(lambda: "gpu-0" not in scene.devices())
        assert "gpu-0-mig-3g40gb-9-4" in scene.devices()
        assert await scene.prepare("a", "gpu-0-mig-3g40gb-9-4") == ""
        assert await scene.unprepare("a") == ""
        assert scene.partitions() == [(9, 4, 4)]

    run(short, scenario)


def test_lost_gpu_is_tainted_and_reported_until_it_returns(short: Path) -> None:
    def tainted(scene: Scene) -> set[str]:
        published = (device for item in scene.api.slices.values() for device in item["spec"].get("devices", ()))
        return {device["name"] for device in published if device.get("taints")}

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)  # slices arrive one after the other
        before = scene.devices()
        scene.backend.faults[1] = Fault("gpu-lost", "It has fallen off the bus")
        await scene.until(lambda: tainted(scene) == {name for name in before if name.startswith("gpu-1")})
        await scene.until(lambda: any(event["reason"] == "DevicesUnhealthy" for event in scene.api.events))
        scene.backend.faults.clear()
        scene.backend.strangers = (Finding(7, "GPU 7", "", None, Fault("gpu-lost", "It has fallen off the bus")),)
        await scene.until(lambda: not tainted(scene))
        await scene.until(lambda: any("GPU 7" in event["message"] for event in scene.api.events))
        assert sorted(scene.devices()) == sorted(before)

    run(short, scenario)


def test_lost_hardware_is_withdrawn_and_published_again(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        scene.backend.present = False
        await scene.until(lambda: scene.devices() == [])
        assert "not loaded" in await scene.prepare("a", SMALL)
        scene.backend.present = True
        await scene.until(lambda: "gpu-0" in scene.devices())
        assert await scene.prepare("a", SMALL) == ""
        scene.backend.failures["discover"] = [AcceleratorError("NVML timed out")]  # one failure is not enough
        await asyncio.sleep(1.3)
        assert "gpu-0" in scene.devices()

    run(short, scenario)


@pytest.mark.parametrize("end", ["returned", "died"])
def test_library_is_released_for_a_reset_and_opened_again(
    short: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr("dra_driver.claims.locking.LENT_SECONDS", 0.1)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.register()
        await scene.until(scene.devices)
        assert await scene.prepare("before", SMALL) == ""
        closed: list[str] = []
        real = scene.backend.close
        scene.backend.close = lambda: (closed.append("closed"), real())[1]  # type: ignore[method-assign]
        directory = str(short / f"kubelet/plugins/{DRIVER}")
        module = DeviceLocks(directory, "a module")
        assert not module.take(LIBRARY)
        assert module.take(REQUEST)
        scene.driver.request_scan()
        await scene.until(lambda: module.take(LIBRARY))
        assert closed == ["closed"]
        devices, scans = scene.devices(), sum(name == "discover" for name, _arguments in scene.backend.calls)
        assert "a module" in await scene.prepare("late", "gpu-1")
        assert any("a module" in problem for problem in (await scene.status())["problems"])
        assert await scene.prepare("before") == ""  # a prepared claim needs no library
        assert sum(name == "discover" for name, _arguments in scene.backend.calls) == scans
        assert scene.devices() == devices
        if end == "returned":
            module.drop(LIBRARY)
            module.drop(REQUEST)
        else:
            module.drop_all()  # as the kernel does
        assert await scene.eventually(lambda: scene.prepare("late", "gpu-1")) == ""
        assert not module.take(LIBRARY)
        assert await scene.unprepare("before") == ""

    run(short, scenario)


def published(scene: Scene) -> set[str]:
    """Return the GPUs with published devices."""
    return {"-".join(name.split("-")[:2]) for name in scene.devices()}


def test_claims_of_other_gpus_are_served_while_one_hangs_from_the_start(
    short: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims of other GPUs are prepared, published, and unprepared while one GPU hangs. Its claim is restored afterwards."""
    monkeypatch.setattr("dra_driver.supervisors.hardware.FIRST_READ_SECONDS", 0.01)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        assert await scene.eventually(lambda: scene.prepare("before", "gpu-1-mig-1g10gb-19-0")) == ""
        await scene.until(lambda: published(scene) == {"gpu-0", "gpu-1"})
        await scene.stop()
        scene.backend.gpus.reboot()
        scene.boot = "boot-2"
        gate = scene.backend.gates[1] = threading.Event()
        await scene.start()
        assert await scene.eventually(lambda: scene.prepare("well", SMALL)) == ""
        await scene.until(lambda: published(scene) == {"gpu-0"})
        assert await scene.unprepare("well") == ""
        assert not gate.is_set()
        gate.set()
        await scene.until(lambda: published(scene) == {"gpu-0", "gpu-1"})
        await scene.until(lambda: scene.partitions() == [(19, 0, 1)])  # the claim from before the reboot

    run(short, scenario)


def test_partitioning_left_on_is_disabled_on_a_late_gpu(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dra_driver.supervisors.hardware.FIRST_READ_SECONDS", 0.01)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        assert await scene.eventually(lambda: scene.prepare("a", "gpu-1-mig-1g10gb-19-0")) == ""
        await scene.until(lambda: published(scene) == {"gpu-0", "gpu-1"})
        await scene.stop()
        store = Store.open(f"{short}/kubelet/plugins/{DRIVER}/state.db")
        await store.commit(Change(delete="0uid-a"))
        store.close()
        for path in scene.cdi():
            path.unlink()
        with scene.backend.gpus.state() as state:
            for entry in state.values():
                entry["partitions"] = []
        gate = scene.backend.gates[1] = threading.Event()
        await scene.start()
        await scene.until(lambda: published(scene) == {"gpu-0"})
        assert scene.backend.gpus.devices()[1].partitioning.enabled
        gate.set()
        await scene.until(lambda: not scene.backend.gpus.devices()[1].partitioning.enabled)

    run(short, scenario)


def test_partitioning_not_disabled_with_the_last_claim_is_disabled_later(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        assert await scene.prepare("a", SMALL) == ""
        real = scene.backend.set_partitioning

        def fails(uuid: str, enabled: bool) -> None:
            raise AcceleratorError(f"the driver met an error that it has no name for (999) on {uuid}, {enabled}")

        scene.backend.set_partitioning = fails  # type: ignore[method-assign]
        assert await scene.unprepare("a") == ""
        scene.driver.request_scan()
        await asyncio.sleep(0.3)
        assert scene.backend.gpus.devices()[0].partitioning.enabled
        scene.backend.set_partitioning = real  # type: ignore[method-assign]
        scene.driver.request_scan()
        await scene.until(lambda: not scene.backend.gpus.devices()[0].partitioning.enabled)
        # The record of the driver's switch is deleted with it: when an administrator enables partitioning now, it
        # stays.
        scene.backend.set_partitioning(scene.backend.gpus.template(0).uuid, True)
        scene.driver.request_scan()
        await asyncio.sleep(0.3)
        assert scene.backend.gpus.devices()[0].partitioning.enabled

    run(short, scenario)


def test_devices_keep_their_numbers_while_claims_or_rules_refer_to_them(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        def reported() -> list[tuple[bool, bool]]:
            return [arguments[1:] for name, arguments in scene.backend.calls if name == "number_by"]

        await scene.api.start()
        await scene.start()
        await scene.until(scene.devices)
        assert reported() == [(True, False)]
        assert await scene.prepare("a", SMALL) == ""
        await scene.stop()
        await scene.start()
        await scene.until(lambda: len(reported()) == 2)
        assert reported()[1] == (True, True), "a claim is prepared"
        assert await scene.eventually(lambda: scene.unprepare("a")) == ""
        await scene.stop()
        scene.settings["layout"] = [{"match": {"index": 0}, "mode": "dynamic"}]
        await scene.start()
        await scene.until(lambda: len(reported()) == 3)
        assert reported()[2] == (True, True), "a rule has an index"

    run(short, scenario)
