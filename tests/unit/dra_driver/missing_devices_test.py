# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Devices and partitions that disappear under prepared claims are reported everywhere, and restored as soon as possible."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from backend_model import DRIVER
from claim_steps import SMALL
from dra_driver.core.errors import AcceleratorError, BackendUnavailable
from dra_driver.core.model import Placement
from dra_driver.protocol import dra_health_v1_pb2, dra_health_v1_pb2_grpc
from vendor_scene import Scene, run

LARGE = "gpu-0-mig-3g40gb-9-4"


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.SETTLE_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.claim_status_writer.SETTLE_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.claim_status_writer.SPREAD_SECONDS", 0.1)
    monkeypatch.setattr("dra_driver.core.health.tracker.VERIFY_SECONDS", 0.2)
    monkeypatch.setattr("dra_driver.supervisors.reporting.missing_device_events.RETRY_FIRST", 0.2)
    return tmp_path_factory.mktemp("m")


async def health_of(scene: Scene, name: str) -> tuple[int, str]:
    """Return the kubelet's information about a device: its state and the message, or (0, "") without information."""
    async with grpc.aio.insecure_channel(f"unix:{scene.paths.service}") as channel:
        stub: Any = dra_health_v1_pb2_grpc.DRAResourceHealthStub(channel)  # type: ignore[no-untyped-call]
        stream = stub.NodeWatchResources(dra_health_v1_pb2.NodeWatchResourcesRequest())
        answer = await asyncio.wait_for(stream.read(), 30)
        found = {each.device.device_name: (each.health, each.message) for each in answer.devices}
        return found.get(name, (0, ""))


async def until_health(scene: Scene, name: str, state: int) -> str:
    for _attempt in range(600):
        found, message = await health_of(scene, name)
        if found == state:
            return message
        await asyncio.sleep(0.05)
    raise AssertionError(f"{name} is {found} ({message})")


def ready_of(scene: Scene, claim: str) -> list[tuple[str, str]]:
    """Return status and reason of the condition Ready of a claim's devices."""
    return [
        (condition["status"], condition["reason"])
        for entry in scene.api.claims[claim].get("status", {}).get("devices", ())
        for condition in entry["conditions"]
        if condition["type"] == "Ready"
    ]


def events(scene: Scene, reason: str) -> set[tuple[str, str]]:
    """Return kind and name of the objects with Events of a reason."""
    return {
        (each["involvedObject"]["kind"], each["involvedObject"]["name"])
        for each in scene.api.events
        if each["reason"] == reason
    }


async def begin(scene: Scene, *devices: str) -> None:
    await scene.api.start()
    await scene.start()
    await scene.until(lambda: len(scene.devices()) == 2 * 26)
    assert await scene.prepare("a", *devices) == ""
    scene.api.claims["a"]["status"]["reservedFor"] = [{"resource": "pods", "name": "pod-a", "uid": "0uid-pod-a"}]
    await scene.until(lambda: ready_of(scene, "a") == [("True", "Prepared")] * len(devices))


def unplug(scene: Scene, index: int) -> str:
    uuid = scene.backend.gpus.template(index).uuid
    with scene.backend.gpus.state() as state:
        del state[uuid]
    return uuid


def plug_in(scene: Scene, uuid: str) -> None:
    with scene.backend.gpus.state() as state:
        state[uuid] = scene.backend.gpus._fresh()


HOLDERS = {("Node", "node-1"), ("ResourceClaim", "a"), ("Pod", "pod-a")}


@pytest.mark.parametrize("device", [SMALL, "gpu-0"])
@pytest.mark.parametrize("restarts", [False, True])
def test_gpu_unplugged_under_claim_is_reported_and_claim_restored(short: Path, device: str, restarts: bool) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene, device)
        (spec,) = scene.cdi()
        uuid = unplug(scene, 0)
        message = await until_health(scene, device, 2)
        assert uuid in message and "not on this node" in message
        await scene.until(lambda: ready_of(scene, "a") == [("False", "DeviceGone")])
        await scene.until(lambda: events(scene, "DeviceUnhealthy") >= HOLDERS)
        faults = {each["name"]: each["fault"] for each in (await scene.status())["devices"]}
        assert faults[device].startswith("device-gone: ")
        if restarts:
            await scene.stop()
            scene.api.events.clear()
            await scene.start()
            await until_health(scene, device, 2)
            await scene.until(lambda: events(scene, "DeviceUnhealthy") >= HOLDERS)
        spec.unlink()
        plug_in(scene, uuid)
        await until_health(scene, device, 1)
        assert scene.cdi() == [spec]
        assert scene.partitions() == ([(19, 0, 1)] if device == SMALL else [])
        await scene.until(lambda: ready_of(scene, "a") == [("True", "Prepared")])
        await scene.until(lambda: events(scene, "DeviceRecovered") >= HOLDERS)
        assert await scene.unprepare("a") == ""
        assert scene.partitions() == []

    run(short, scenario)


def test_partition_destroyed_by_hand_is_reported_and_created_again(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene, SMALL)
        gpu = scene.backend.gpus.devices()[0]
        scene.backend.failures["create_partition"] = [AcceleratorError("The library does not answer")]
        scene.backend.destroy_partition(gpu.uuid, gpu.partitions[0].instance_id)
        scene.driver.request_scan()
        await until_health(scene, SMALL, 2)
        await scene.until(lambda: events(scene, "DeviceUnhealthy") >= HOLDERS)
        await scene.until(lambda: events(scene, "RestoreFailed"))
        await until_health(scene, SMALL, 1)
        assert scene.partitions() == [(19, 0, 1)]
        await scene.until(lambda: ready_of(scene, "a") == [("True", "Prepared")])
        await scene.until(lambda: events(scene, "DeviceRecovered") >= HOLDERS)

    run(short, scenario)


def test_partition_of_an_administrator_is_reported_until_it_exists_again(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        uuid = scene.backend.gpus.template(0).uuid
        scene.backend.set_partitioning(uuid, True)
        made = scene.backend.create_partition(uuid, 9, Placement(4, 4))
        await scene.start()
        await scene.until(lambda: LARGE in scene.devices())
        assert await scene.prepare("a", LARGE) == ""
        scene.backend.destroy_partition(uuid, made.instance_id)
        scene.driver.request_scan()
        assert "Create it again" in await until_health(scene, LARGE, 2)
        created = sum(name == "create_partition" for name, _arguments in scene.backend.calls)
        await asyncio.sleep(1.5)
        assert sum(name == "create_partition" for name, _arguments in scene.backend.calls) == created
        assert not events(scene, "RestoreFailed")
        again = scene.backend.create_partition(uuid, 9, Placement(4, 4))
        scene.driver.request_scan()
        await until_health(scene, LARGE, 1)
        assert f"gi{again.instance_id}" in scene.cdi()[0].read_text()

    run(short, scenario)


def test_fabric_partition_is_known_from_cdi_files_after_loss_of_database(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.backend.fabric = {1: (0, 1), 2: (0,), 3: (1,)}
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        assert await scene.prepare("a", "gpu-0", "gpu-1") == "" and scene.backend.active == {1}
        await scene.stop()
        for file in (short / "kubelet" / "plugins" / DRIVER).glob("state.db*"):
            file.unlink()
        scene.api.claims["a"]["status"].pop("devices", None)
        await scene.start()
        await scene.eventually(lambda: scene.unprepare("a"))
        assert scene.backend.active == set() and scene.cdi() == []

    run(short, scenario)


@pytest.mark.prove
@pytest.mark.parametrize("is_administrators", [False, True])
def test_fabric_partition_lost_by_restart_of_fabric_manager_is_reported_and_activated_again(
    short: Path, is_administrators: bool
) -> None:
    async def scenario(scene: Scene) -> None:
        scene.backend.fabric = {1: (0, 1), 2: (0,), 3: (1,)}
        scene.backend.active = {1} if is_administrators else set()
        await begin(scene, "gpu-0", "gpu-1")
        assert scene.backend.active == scene.backend.claimed_fabric_partitions() == {1}
        scene.backend.fabric_answers = False
        scene.backend.active = set()
        scene.driver.request_scan()
        await asyncio.sleep(1)
        assert not events(scene, "DeviceUnhealthy"), (
            "a fabric manager that does not answer says nothing of its partitions"
        )
        scene.backend.failures["activate_fabric_partition"] = [BackendUnavailable("The fabric manager is starting")]
        scene.backend.fabric_answers = True
        scene.driver.request_scan()
        for device in ("gpu-0", "gpu-1"):
            message = await until_health(scene, device, 2)
            assert "partition 1 of the fabric is not active any more" in message and "Restart the pod" in message
        await scene.until(lambda: ready_of(scene, "a") == [("False", "FabricPartitionInactive")] * 2)
        faults = {each["name"]: each["fault"] for each in (await scene.status())["devices"]}
        assert faults["gpu-1"].startswith("fabric-partition-inactive: ")
        await scene.until(lambda: events(scene, "DeviceUnhealthy") >= HOLDERS)
        await scene.until(lambda: events(scene, "RestoreFailed"))
        for device in ("gpu-0", "gpu-1"):
            await until_health(scene, device, 1)
        assert scene.backend.active == {1}
        await scene.until(lambda: ready_of(scene, "a") == [("True", "Prepared")] * 2)
        await scene.until(lambda: events(scene, "DeviceRecovered") >= HOLDERS)
        assert await scene.unprepare("a") == "" and scene.backend.active == set()

    run(short, scenario)


def test_continuous_claims_report_no_missing_device(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        await scene.until(lambda: len(scene.devices()) == 2 * 26)
        for number in range(20):
            assert await scene.prepare(f"c{number}", SMALL) == ""
            scene.driver.request_scan()
            await asyncio.sleep(0.05)
            assert await scene.unprepare(f"c{number}") == ""
            scene.driver.request_scan()
        assert not events(scene, "DeviceUnhealthy") and not scene.partitions()

    run(short, scenario)


def test_claim_ended_while_its_gpu_is_missing_is_forgotten(short: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await begin(scene, SMALL)
        uuid = unplug(scene, 0)
        await until_health(scene, SMALL, 2)
        assert await scene.unprepare("a") == ""
        scene.driver.request_scan()
        await until_health(scene, SMALL, 0)
        plug_in(scene, uuid)
        await until_health(scene, SMALL, 1)
        assert scene.partitions() == [] and DRIVER in scene.driver.driver

    run(short, scenario)


def test_missing_partition_of_a_claim_that_has_ended_is_not_created_again(
    short: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The claim has ended, but is in the store, because an old copy of the store was restored: its partition is not created again."""

    async def scenario(scene: Scene) -> None:
        await begin(scene, SMALL)
        (spec,) = scene.cdi()
        spec.unlink()
        del scene.api.claims["a"]
        gpu = scene.backend.gpus.devices()[0]
        scene.backend.destroy_partition(gpu.uuid, gpu.partitions[0].instance_id)
        scene.driver.request_scan()
        await scene.until(lambda: sum("claim has ended" in each.message for each in caplog.records) > 1)
        assert scene.partitions() == [] and scene.cdi() == []

    run(short, scenario)
