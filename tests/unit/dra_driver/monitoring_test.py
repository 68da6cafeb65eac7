# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Metrics of the current state: devices by claim, and conditions. A failing source does not hide the others."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from claim_steps import SMALL
from dra_driver.core.errors import AcceleratorError
from dra_driver.core.model import Fault
from dra_driver.kubelet.pod_resources import PodResourcesUnreachable, container_devices, socket_path
from dra_driver.metrics import LABEL_VALUES, OTHER, MetricsRegistry, PrometheusMetrics, resource_of
from dra_driver.monitoring import collector
from dra_driver.monitoring.collector import Collector
from dra_driver.monitoring.families import FAMILIES, Samples
from dra_driver.protocol import pod_resources_pb2, pod_resources_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from vendor_scene import Scene, run

P = "dra_accelerators_"


@pytest.fixture()
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a short path, because it contains sockets."""
    return tmp_path_factory.mktemp("s")


class Kubelet(pod_resources_pb2_grpc.PodResourcesListerServicer):  # type: ignore[misc]
    """A kubelet that returns one pod for each registered claim."""

    def __init__(self) -> None:
        self.pods: list[tuple[str, str, str]] = []  # pod, claim, device
        self.containers: list[tuple[str, str, str, str]] = []  # pod, container, claim, device
        self.foreign: list[tuple[str, str, str, str]] = []  # the same with devices of another driver
        self.calls = 0

    def List(self, request: Any, context: Any) -> Any:
        self.calls += 1
        answer = pod_resources_pb2.ListPodResourcesResponse()
        listed = [
            *(("gpu.nvidia.com", pod, "main", claim, device) for pod, claim, device in self.pods),
            *(("gpu.nvidia.com", *each) for each in self.containers),
            *(("nic.example.com", *each) for each in self.foreign),
        ]
        for driver, pod, name, claim, device in listed:
            container = answer.pod_resources.add(name=pod, namespace="default").containers.add(name=name)
            resource = container.dynamic_resources.add(
                claim_name=claim, claim_namespace="default"
            ).claim_resources.add()
            resource.driver_name, resource.pool_name, resource.device_name = driver, "node-1", device
        return answer


@contextmanager
def kubelet(root: Path) -> Iterator[Kubelet]:
    path = Path(socket_path(str(root)))
    path.parent.mkdir(parents=True, exist_ok=True)
    server, reported = grpc.server(ThreadPoolExecutor(2)), Kubelet()
    pod_resources_pb2_grpc.add_PodResourcesListerServicer_to_server(reported, server)
    server.add_insecure_port(f"unix:{path}")
    server.start()
    try:
        yield reported
    finally:
        server.stop(0).wait()


def registry_of(scene: Scene, expires: float = 0.0) -> MetricsRegistry:
    registry = MetricsRegistry()
    pod_resources = socket_path(str(scene.folder / "kubelet"))
    registry.register(
        Collector(asyncio.get_running_loop(), [scene.driver], pod_resources=pod_resources, expires=lambda: expires)
    )
    return registry


async def lines(registry: MetricsRegistry) -> dict[str, float]:
    """Return each sample by its name and labels."""
    text = (await asyncio.to_thread(registry.text)).decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{.*\})?) (\S+)$", text, re.MULTILINE)}


def labels(line: str) -> dict[str, str]:
    return dict(re.findall(r'(\w+)="([^"]*)"', line))


def of(found: dict[str, float], name: str) -> list[dict[str, str]]:
    return [labels(line) for line in found if line.partition("{")[0] == P + name]


def test_claim_is_attributed_while_it_is_prepared(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "FRESH_SECONDS", 0.0)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        with kubelet(scene.folder / "kubelet") as reported:
            registry = registry_of(scene, expires=5e9)
            assert await Scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
            reported.pods = [("pod-a", "a", SMALL), ("pod-b", "foreign", "gpu-1")]
            found = await lines(registry)
            (claim,) = of(found, "claim_device_info")
            ((_gpu, partition),) = [
                (device.uuid, each.uuid) for device in scene.backend.gpus.devices() for each in device.partitions
            ]
            assert claim["uuid"] == partition and claim["device_uuid"] != partition
            requested = [call for call in scene.backend.calls if call[0] == "telemetry"]
            assert requested[-1][1][-1] == {partition}, (
                "only partitions of claims are read: no other tool destroys them"
            )
            assert (claim["namespace"], claim["claim"], claim["claim_uid"]) == ("default", "a", "0uid-a")
            assert (claim["device"], claim["kind"], claim["profile"]) == (SMALL, "partition", "1g.10gb")
            assert claim["admin"] == "false" and claim["partition_id"] == "1"
            (container,) = of(found, "container_device_info")
            assert (container["pod"], container["container"], container["uuid"]) == ("pod-a", "main", partition)
            assert container["partition_id"] == "1"
            assert found[f'{P}claims{{driver="gpu.nvidia.com",state="prepared"}}'] == 1
            assert found[f"{P}identity_token_expiry_timestamp_seconds"] == 5e9
            await Scene.until(lambda: scene.driver.view().snapshot.survey.devices, 8)  # type: ignore[union-attr]
            assert await scene.unprepare("a") == ""
            found = await lines(registry)
            assert of(found, "claim_device_info") == of(found, "container_device_info") == []
            assert found[f'{P}claims{{driver="gpu.nvidia.com",state="prepared"}}'] == 0

    run(home, scenario)


def test_fault_metrics_name_cause_and_effect_until_the_fault_ends(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "FRESH_SECONDS", 0.0)
    monkeypatch.setattr("dra_driver.core.health.tracker.VERIFY_SECONDS", 0.2)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        registry = registry_of(scene)

        def faults() -> list[str]:
            hardware_state = scene.driver.view().hardware_state
            return list(hardware_state.faults) if hardware_state.snapshot.survey else ["no scan"]

        await Scene.until(lambda: not faults())
        found = await lines(registry)
        assert of(found, "device_fault") == []
        assert {each["device"] for each in of(found, "device_info")} == {"gpu-0", "gpu-1"}
        assert len(of(found, "device_power_watts")) == 2
        scene.backend.faults[1] = Fault("gpu-lost", "It has fallen off the bus")
        scene.driver.request_scan()
        await Scene.until(lambda: len(faults()) == 1)
        found = await lines(registry)
        (fault,) = of(found, "device_fault")
        assert (fault["device"], fault["cause"], fault["effect"]) == ("gpu-1", "gpu-lost", "NoSchedule")
        healthy = {each["device"]: found[line] for line in found if "device_healthy" in line for each in [labels(line)]}
        assert healthy == {"gpu-0": 1, "gpu-1": 0}
        assert found[f'{P}devices{{driver="gpu.nvidia.com",state="faulty"}}'] == 1
        assert [each["device"] for each in of(found, "device_power_watts")] == ["gpu-0"]
        scene.backend.faults.clear()
        scene.driver.request_scan()
        await Scene.until(lambda: not faults())
        assert of(await lines(registry), "device_fault") == []

    run(home, scenario)


def test_scrape_failed_source_keeps_the_others(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "FRESH_SECONDS", 0.0)

    async def scenario(scene: Scene) -> None:
        await scene.api.start()
        await scene.start()
        registry = registry_of(scene)
        assert await Scene.eventually(lambda: scene.prepare("a", SMALL)) == ""
        scene.backend.failures["telemetry"] = [AcceleratorError("it is closed")]
        found = await lines(registry)  # neither the kubelet nor the devices answer
        success = {labels(line)["source"]: found[line] for line in found if "collection_success" in line}
        assert success == {"state": 1, "kubelet": 0, "telemetry": 0}
        assert len(of(found, "claim_device_info")) == 1 and of(found, "device_power_watts") == []

    run(home, scenario)


def test_scrape_hanging_event_loop_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "VIEW_SECONDS", 0.05)
    loop = asyncio.new_event_loop()  # a loop that does not run
    registry = MetricsRegistry()
    registry.register(Collector(loop, [], pod_resources="/none", expires=lambda: 0.0))
    text = registry.text().decode()
    assert f'{P}collection_success{{driver="",source="state"}} 0.0' in text
    loop.close()


def test_scrape_concurrent_requests_read_each_source_once() -> None:
    now = [100.0]
    loop = asyncio.new_event_loop()
    read: list[int] = []
    shared = Collector(loop, [], pod_resources="/none", expires=lambda: read.append(1) or 0.0, clock=lambda: now[0])
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    with ThreadPoolExecutor(8) as pool:
        assert len(set(map(id, pool.map(lambda _n: shared.samples(), range(8))))) == 1
    assert len(read) == 1
    now[0] += 2
    shared.samples()
    assert len(read) == 2
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_container_devices_unreachable_kubelet_is_named(tmp_path: Path) -> None:
    with pytest.raises(PodResourcesUnreachable, match="does not answer at"):
        container_devices(str(tmp_path / "none.sock"), 0.5)
    with pytest.raises(PodResourcesUnreachable, match="longer than"):
        container_devices("/" + "x" * 200, 0.5)


@given(st.lists(st.text(max_size=80), max_size=300))
def test_labels_any_values_stay_within_the_limit(values: list[str]) -> None:
    registry = MetricsRegistry()
    metrics = PrometheusMetrics(registry, "d")
    for value in values:
        metrics.finished("prepare", "device", value, 0.1)
        metrics.partition_change("create", value, "success")
        registry.api_request("GET", f"/api/v1/{value}", value, 0.1)
    text = registry.text().decode()
    for label in ("code", "profile", "resource"):
        assert len(set(re.findall(rf'{label}="([^"]*)"', text))) <= LABEL_VALUES + 1


def test_labels_first_values_stay_and_invalid_values_are_replaced() -> None:
    registry = MetricsRegistry()
    words = [f"w{number}" for number in range(LABEL_VALUES)]
    assert [registry.word("code", word) for word in words] == words
    assert registry.word("code", "one-more") == OTHER
    assert registry.word("code", "w0") == "w0"
    assert registry.word("profile", "1g.10gb+me") == "1g.10gb+me"
    assert registry.word("profile", "two words") == OTHER


@pytest.mark.parametrize(
    ("path", "resource"),
    [
        ("/api/v1/nodes/n", "nodes"),
        ("/apis/resource.k8s.io/v1/namespaces/default/resourceclaims/a-claim", "resourceclaims"),
        ("/apis/resource.k8s.io/v1/resourceslices", "resourceslices"),
        ("/api/v1/namespaces/x/serviceaccounts/y/token", "serviceaccounts-token"),
        ("/apis/resource.k8s.io/v1/namespaces/d/resourceclaims/c/status", "resourceclaims-status"),
        ("/version", "discovery"),
        ("/apis/resource.k8s.io", "discovery"),
    ],
)
def test_resource_of_a_request_path(path: str, resource: str) -> None:
    assert resource_of(path) == resource


def test_samples_with_other_labels_are_rejected() -> None:
    samples = Samples()
    with pytest.raises(ValueError, match="has the labels"):
        samples.add("ready", 1)
    samples.add("ready", None, "d")
    assert samples.values == {}
    for name, family in FAMILIES.items():
        assert re.fullmatch("[a-z][a-z_]*", name) and family.text and not family.text.endswith(".")
        assert len(set(family.labels)) == len(family.labels)
