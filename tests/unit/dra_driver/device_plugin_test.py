# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Run the whole driver as a device plugin with real sockets and a kubelet's calls. Only the hardware is a model."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from backend_model import ModelGpus
from claim_steps import SMALL
from dra_driver.core.dra.device_plugin_model import socket_name
from dra_driver.core.model import Fault
from dra_driver.kubelet.device_plugin import ResourceServer
from dra_driver.monitoring.families import Samples, add_view
from dra_driver.protocol import device_plugin_pb2 as messages
from dra_driver.status_command import _table
from plugin_kubelet import PluginKubelet
from vendor_scene import Scene
from vendor_scene import run as run_scene

GPUS = "nvidia.com/gpu"
SLICES = "nvidia.com/mig-1g.10gb"
FIRST, SECOND = ModelGpus.uuids(2)
KIND = "k8s.gpu.nvidia.com/device"
PLUGIN = {"kubelet_interface": "device-plugin", "layout": []}
Scenario = Callable[[Scene, PluginKubelet], Awaitable[None]]


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.driver_state.RETRY_LIMIT", 0.1)
    monkeypatch.setattr("dra_driver.supervisors.device_plugin.CHECK_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.supervisors.device_plugin.RETRY_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.vendor.REMAINING_CLAIMS_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.RETRY_FIRST", 0.05)
    monkeypatch.setattr("dra_driver.publish.publisher.SETTLE_SECONDS", 0.05)
    monkeypatch.setattr("dra_driver.core.health.tracker.VERIFY_SECONDS", 0.1)
    return tmp_path_factory.mktemp("p")


def run(directory: Path, scenario: Scenario, **settings: Any) -> None:
    """Run a scenario with an API server, a kubelet, and a driver that is not started."""

    async def main(scene: Scene) -> None:
        kubelet = PluginKubelet(directory / "kubelet")
        scene.settings = {**PLUGIN, **settings}
        await scene.api.start()
        try:
            await scenario(scene, kubelet)
        finally:
            await kubelet.kill()

    run_scene(directory, main)


def cdi_devices(scene: Scene) -> set[str]:
    """Return the names of the devices in the CDI file that belongs to no claim."""
    (path,) = scene.cdi()
    assert path.name == "k8s.gpu.nvidia.com-device_plugin.json"
    spec = json.loads(path.read_text())
    return {f"{spec['kind']}={each['name']}" for each in spec["devices"]}


def test_device_plugin_serves_pods_and_publishes_no_slices(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await scene.start()
        await asyncio.sleep(0.3)
        assert not (await scene.status())["ready"], "there is no kubelet yet"
        await kubelet.start()
        await scene.until(lambda: kubelet.lists.get(GPUS))
        assert kubelet.lists[GPUS] == {FIRST: ("Healthy", [0]), SECOND: ("Healthy", [0])}
        assert await kubelet.prefers(GPUS, [SECOND, FIRST], [SECOND], 1) == [SECOND]
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be chosen"):
            await kubelet.prefers(GPUS, [FIRST], [], 2)
        one, both = await kubelet.allocate(GPUS, [SECOND], [FIRST, SECOND])
        assert one == ([f"{KIND}={SECOND}"], {})
        assert set(both[0]) == cdi_devices(scene) == {f"{KIND}={FIRST}", f"{KIND}={SECOND}"}
        status = await scene.status()
        assert status["ready"] and status["published"] and status["registered"], status["problems"]
        assert status["resources"] == [{"resource": GPUS, "devices": 2, "healthy": 2, "connected": True}]
        # No claims interface: no slice, no socket, no registration.
        assert scene.api.slices == {} and scene.api.slice_writes() == []
        assert not Path(scene.paths.service).exists() and not Path(scene.paths.registration).exists()
        await scene.stop()
        assert [each.name for each in kubelet.folder.iterdir()] == ["kubelet.sock"], "nothing stays of the driver"
        await scene.until(lambda: not kubelet.lists)

    run(short, scenario)


def test_device_plugin_reports_a_fault_and_its_end(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: kubelet.states(GPUS) == {FIRST: "Healthy", SECOND: "Healthy"})
        scene.backend.faults[1] = Fault("gpu-lost", "It has fallen off the bus")
        scene.driver.request_scan()
        await scene.until(lambda: kubelet.states(GPUS) == {FIRST: "Healthy", SECOND: "Unhealthy"})
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be allocated: gpu-lost"):
            await kubelet.allocate(GPUS, [SECOND])
        assert (await scene.status())["ready"], "a device's fault is not the driver's"
        samples = Samples()
        add_view(samples, scene.driver.view(), (), {})
        assert samples.values["plugin_devices"] == {
            (scene.driver.driver, GPUS, "healthy"): 1,
            (scene.driver.driver, GPUS, "unhealthy"): 1,
        }
        assert samples.values["plugin_connected"] == {(scene.driver.driver, GPUS): 1}
        del scene.backend.faults[1]
        scene.driver.request_scan()
        await scene.until(lambda: kubelet.states(GPUS) == {FIRST: "Healthy", SECOND: "Healthy"})
        scene.backend.present = False
        await scene.until(lambda: kubelet.states(GPUS) == {FIRST: "Unhealthy", SECOND: "Unhealthy"})

    run(short, scenario)


def test_device_plugin_registers_again_after_a_kubelet_restart(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: kubelet.lists.get(GPUS))
        await kubelet.kill()
        await scene.until(lambda: not scene.driver.status().registered)
        for _time in range(2):
            await kubelet.start()
            await scene.until(lambda: kubelet.lists.get(GPUS))
            await kubelet.kill()
        assert kubelet.registrations == [GPUS] * 3, "a connected plugin does not register again"

    run(short, scenario)


def test_device_plugin_removed_socket_is_created_again(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: kubelet.lists.get(GPUS))
        path = kubelet.folder / socket_name(GPUS)
        path.unlink()
        await scene.until(lambda: path.exists() and kubelet.lists.get(GPUS))
        await scene.until(lambda: len(kubelet.registrations) == 2)

    run(short, scenario)


def test_device_plugin_rejected_registration_is_retried(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        kubelet.refuses = "not today"
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: any("not today" in each for each in scene.driver.status().problems))
        kubelet.refuses = ""
        await scene.until(lambda: scene.driver.status().ready)

    run(short, scenario)


def test_device_plugin_existing_partitions_have_separate_resources(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: len(kubelet.states(GPUS)) == 2)
        scene.backend.set_partitioning(SECOND, True)
        placement = next(each for each in scene.backend.device(SECOND).profiles if each.profile_id == 19).placements[0]
        made = scene.backend.create_partition(SECOND, 19, placement)
        scene.driver.request_scan()
        await scene.until(lambda: kubelet.states(SLICES) == {made.uuid: "Healthy"})
        assert kubelet.states(GPUS) == {FIRST: "Healthy"}
        assert await kubelet.allocate(SLICES, [made.uuid]) == [([f"{KIND}={made.uuid}"], {})]
        # The partition is deleted, and a pod requests it before the next scan.
        scene.backend.destroy_partition(SECOND, made.instance_id)
        with pytest.raises(grpc.aio.AioRpcError, match="any more"):
            await kubelet.allocate(SLICES, [made.uuid])
        scene.driver.request_scan()
        await scene.until(lambda: kubelet.lists.get(SLICES) == {})
        with pytest.raises(grpc.aio.AioRpcError, match="no longer a device"):
            await kubelet.allocate(SLICES, [made.uuid])

    run(short, scenario)


def test_device_plugin_deletes_slices_before_it_offers_devices(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        scene.settings = {"layout": [{"match": {}, "mode": "dynamic"}]}
        await scene.start()
        await scene.until(lambda: "gpu-1" in scene.devices())
        assert await scene.prepare("a", SMALL) == ""
        await scene.stop()
        scene.settings = PLUGIN
        scene.api.failures = [("DELETE", 500, "not now")]
        await scene.start()
        await scene.until(lambda: kubelet.lists.get(GPUS))
        assert scene.api.slices == {}
        # The claim is served until its end, and its device is not offered to other pods.
        assert kubelet.states(GPUS) == {SECOND: "Healthy"}
        await scene.until(lambda: Path(scene.paths.registration).exists())
        assert "device-plugin" in await scene.prepare("b", "gpu-1")
        assert await scene.prepare("a") == "", "a container of its pod is started again"
        await scene.until(lambda: scene.driver.status().ready)
        assert kubelet.registrations == [GPUS], "the claim's partition is no resource"
        assert await scene.unprepare("a") == ""
        await scene.until(lambda: set(kubelet.states(GPUS)) == {FIRST, SECOND})
        await scene.until(lambda: not Path(scene.paths.registration).exists())
        assert scene.driver.status().ready

    run(short, scenario)


def test_device_plugin_device_in_use_blocks_publication(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: kubelet.lists.get(GPUS))
        await scene.stop()
        kubelet.held = [("trainer", GPUS, [FIRST]), ("other", "example.com/fpga", ["7"])]
        scene.settings = {"layout": []}
        await scene.start()
        await scene.until(lambda: any("default/trainer" in each for each in scene.driver.status().problems))
        assert scene.devices() == []
        kubelet.held = kubelet.held[1:]
        await scene.until(lambda: {"gpu-0", "gpu-1"} <= set(scene.devices()))
        assert GPUS not in kubelet.lists
        # And it is not requested again.
        await scene.stop()
        await kubelet.kill()
        await scene.start()
        await scene.register()
        await scene.until(lambda: scene.driver.status().ready)

    run(short, scenario)


def test_device_plugin_serves_a_cluster_without_the_resource_api(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        scene.api.versions = ()
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: kubelet.lists.get(GPUS))
        await scene.until(lambda: scene.driver.status().ready)
        # From then on the API server is not needed for it.
        await scene.stop()
        await scene.api.stop()
        scene.api.url = ""
        await scene.start()
        await scene.until(lambda: kubelet.lists.get(GPUS))

    run(short, scenario)


def test_device_plugin_socket_of_the_vendors_plugin_stops_the_offer(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
            other.bind(str(kubelet.folder / "nvidia-gpu.sock"))
            other.listen()
            await scene.start()
            await scene.until(
                lambda: any("nvidia-gpu.sock is served by" in each for each in scene.driver.status().problems)
            )
            assert kubelet.registrations == []
        await scene.until(lambda: kubelet.lists.get(GPUS))

    run(short, scenario)


def test_device_plugin_unwritable_cdi_directory_rejects_pods(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        directory = short / "root/var/run"
        directory.mkdir(parents=True)
        (directory / "cdi").write_text("no directory")
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: kubelet.states(GPUS) == {FIRST: "Unhealthy", SECOND: "Unhealthy"})
        assert not scene.driver.status().ready
        (directory / "cdi").unlink()
        await scene.until(lambda: kubelet.states(GPUS) == {FIRST: "Healthy", SECOND: "Healthy"})
        await scene.until(lambda: scene.driver.status().ready)

    run(short, scenario)


def test_device_plugin_another_instance_takes_over(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: kubelet.lists.get(GPUS))
        other = scene.beside("0f0f0f0f")
        await other.start()
        try:
            await scene.until(lambda: other.driver.status().ready and kubelet.lists.get(GPUS))
            assert await kubelet.allocate(GPUS, [FIRST]) == [([f"{KIND}={FIRST}"], {})]
        finally:
            await other.stop()

    run(short, scenario)


def test_status_lists_resources_for_pods(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        await scene.start()
        await scene.until(lambda: scene.driver.status().ready)
        reported = await scene.status()
        text = _table({**reported, "answer": {"message": "no DRA"}, "claims": []})
        assert "2 devices, offered by the device plugin" in text and "no DRA" not in text
        assert f"  {GPUS}: 2 of 2 can be allocated to pods, the kubelet is connected\n" in text

    run(short, scenario)


def test_status_names_gpu_in_mig_mode_without_partitions(short: Path) -> None:
    async def scenario(scene: Scene, kubelet: PluginKubelet) -> None:
        await kubelet.start()
        scene.backend.set_partitioning(SECOND, True)
        await scene.start()
        await scene.until(lambda: kubelet.states(GPUS) == {FIRST: "Healthy"})
        await scene.until(lambda: scene.driver.status().ready)
        reported = await scene.status()
        text = _table({**reported, "answer": {"message": ""}, "claims": []})
        assert f"({SECOND}, 0000:11:00.0) is not offered: the partitioning mode is on" in text, text
        scene.backend.set_partitioning(SECOND, False)
        scene.driver.request_scan()
        await scene.until(lambda: len(kubelet.states(GPUS)) == 2)
        assert (await scene.status())["not_offered"] == {}

    run(short, scenario, layout=[{"match": {}, "mode": "dynamic"}])


def test_field_numbers_are_the_kubelets() -> None:
    """The encoded fields are compared with the names and numbers of the public protocol description."""
    request = messages.RegisterRequest(
        version="v1beta1",
        endpoint="e",
        resource_name="r",
        options=messages.DevicePluginOptions(pre_start_required=True, get_preferred_allocation_available=True),
    )
    assert request.SerializeToString() == b"\x0a\x07v1beta1" + b"\x12\x01e" + b"\x1a\x01r" + b"\x22\x04\x08\x01\x10\x01"
    device = messages.Device(ID="d", health="Healthy", topology=messages.TopologyInfo(nodes=[messages.NUMANode(ID=1)]))
    assert device.SerializeToString() == b"\x0a\x01d" + b"\x12\x07Healthy" + b"\x1a\x04\x0a\x02\x08\x01"
    requested = messages.ContainerPreferredAllocationRequest(
        available_deviceIDs=["a"], must_include_deviceIDs=["m"], allocation_size=2
    )
    assert requested.SerializeToString() == b"\x0a\x01a" + b"\x12\x01m" + b"\x18\x02"
    answer = messages.ContainerAllocateResponse(
        envs={"k": "v"},
        mounts=[messages.Mount(container_path="c", host_path="h", read_only=True)],
        devices=[messages.DeviceSpec(container_path="c", host_path="h", permissions="rw")],
        annotations={"k": "v"},
        cdi_devices=[messages.CDIDevice(name="n")],
    )
    assert answer.SerializeToString() == (
        b"\x0a\x06\x0a\x01k\x12\x01v"
        b"\x12\x08\x0a\x01c\x12\x01h\x18\x01"
        b"\x1a\x0a\x0a\x01c\x12\x01h\x1a\x02rw"
        b"\x22\x06\x0a\x01k\x12\x01v"
        b"\x2a\x03\x0a\x01n"
    )
    service = messages.DESCRIPTOR.services_by_name
    assert {name: [each.name for each in found.methods] for name, found in service.items()} == {
        "Registration": ["Register"],
        "DevicePlugin": [
            "GetDevicePluginOptions",
            "ListAndWatch",
            "GetPreferredAllocation",
            "Allocate",
            "PreStartContainer",
        ],
    }
    assert {found.full_name for found in service.values()} == {"v1beta1.Registration", "v1beta1.DevicePlugin"}


def test_device_plugin_too_long_path_is_rejected_by_setting_name(short: Path) -> None:
    from dra_driver.kubelet.sockets import SocketError
    from dra_driver.metrics import Metrics

    with pytest.raises(SocketError, match="kubelet_root"):
        ResourceServer(None, resource=GPUS, folder="/" + "f" * 90, metrics=Metrics())  # type: ignore[arg-type]
