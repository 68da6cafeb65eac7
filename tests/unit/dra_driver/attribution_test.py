# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The containers to which devices of claims are attributed: by the kubelet's list, and by pods if the driver can read them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from api_model import kubeconfig
from claim_steps import SMALL
from dra_driver.api.resources import ResourceApi
from dra_driver.claims.store.records import ClaimRecord
from dra_driver.commands import claims as command
from dra_driver.commands import gather
from dra_driver.config import parse
from dra_driver.core.host.system import System
from dra_driver.kubelet.attribution import requests_of_pod
from dra_driver.kubelet.pod_resources import socket_path
from dra_driver.metrics import MetricsRegistry
from dra_driver.monitoring import collector
from dra_driver.monitoring.collector import Collector
from dra_driver.monitoring.pods import PodReader
from monitoring_test import home, kubelet, labels, lines, of
from vendor_scene import Scene, run

from tests.oracles.controller_rights import driver_objects

__all__ = ["home"]

DEVICES = {"a": SMALL, "b": "gpu-1"}
CONTAINERS = [("pod", each, "c", device) for each in ("a", "b", "init") for device in DEVICES.values()]


def pod(**containers: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "spec": {
            "resourceClaims": [{"name": "gpus", "resourceClaimTemplateName": "t"}],
            "initContainers": [{"name": "init", "resources": {"claims": [{"name": "gpus", "request": "b"}]}}],
            "containers": [{"name": name, "resources": {"claims": claims}} for name, claims in containers.items()],
        },
        "status": {"resourceClaimStatuses": [{"name": "gpus", "resourceClaimName": "c"}]},
    }


POD = pod(a=[{"name": "gpus", "request": "a/small"}], b=[{"name": "gpus"}])


async def prepare(scene: Scene, *requests: str) -> ClaimRecord:
    """Prepare the claim c with these requests, one device for each."""
    await scene.api.start()
    await scene.start()
    devices = [{"device": DEVICES[each[0]], "request": each} for each in requests]
    assert await Scene.eventually(lambda: scene.prepare("c", *devices)) == ""  # type: ignore[arg-type]
    (record,) = scene.driver.view().records
    return record


def registry_of(scene: Scene, *, reads: bool) -> MetricsRegistry:
    loop, registry = asyncio.get_running_loop(), MetricsRegistry()
    pods = PodReader(loop, ResourceApi(scene.client)) if reads else None
    path = socket_path(str(scene.folder / "kubelet"))
    registry.register(Collector(loop, [scene.driver], pod_resources=path, expires=lambda: 0.0, pods=pods))
    return registry


async def pairs(registry: MetricsRegistry) -> list[tuple[str, str]]:
    return sorted((each["container"], each["device"]) for each in of(await lines(registry), "container_device_info"))


@pytest.fixture(autouse=True)
def read_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "FRESH_SECONDS", 0.0)


def test_metric_several_requests_and_containers_names_pod_once_per_device(home: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await prepare(scene, "a", "b")
        with kubelet(scene.folder / "kubelet") as reported:
            reported.containers = CONTAINERS
            assert await pairs(registry_of(scene, reads=False)) == [("", SMALL), ("", "gpu-1")]
            assert not [path for _method, path in scene.api.log if "/pods/" in path]

    run(home, scenario)


def test_metric_one_container_names_it(home: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await prepare(scene, "a", "b")
        with kubelet(scene.folder / "kubelet") as reported:
            reported.containers = CONTAINERS[:2]
            assert await pairs(registry_of(scene, reads=False)) == [("a", SMALL), ("a", "gpu-1")]

    run(home, scenario)


def test_metric_one_request_names_all_containers_unless_other_driver_has_one(home: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await prepare(scene, "a")
        with kubelet(scene.folder / "kubelet") as reported:
            reported.containers = [("pod", "a", "c", SMALL), ("pod", "b", "c", SMALL)]
            registry = registry_of(scene, reads=False)
            assert await pairs(registry) == [("a", SMALL), ("b", SMALL)]
            reported.foreign = [("pod", each, "c", "nic-0") for each in ("a", "b")]
            assert await pairs(registry) == [("", SMALL)]

    run(home, scenario)


def test_metric_with_pods_names_containers_by_request(home: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await prepare(scene, "a/small", "b")
        scene.api.pods["pod"] = POD
        with kubelet(scene.folder / "kubelet") as reported:
            reported.containers = CONTAINERS
            registry = registry_of(scene, reads=True)
            for _time in range(3):
                expected = [("a", SMALL), ("b", SMALL), ("b", "gpu-1"), ("init", "gpu-1")]
                assert await pairs(registry) == expected
            assert len([path for _method, path in scene.api.log if "/pods/" in path]) == 1, "the pod is cached"

    run(home, scenario)


def test_metric_pods_forbidden_names_pod_and_reports(home: Path) -> None:
    async def scenario(scene: Scene) -> None:
        await prepare(scene, "a", "b")
        scene.api.pods_forbidden = True
        with kubelet(scene.folder / "kubelet") as reported:
            reported.containers = CONTAINERS
            registry = registry_of(scene, reads=True)
            assert await pairs(registry) == [("", SMALL), ("", "gpu-1")]
            found = await lines(registry)
            assert {labels(each)["source"]: found[each] for each in found if "collection_success" in each}["pods"] == 0

    run(home, scenario)


def test_claims_command_lists_each_container_once(home: Path) -> None:
    async def scenario(scene: Scene) -> None:
        record = await prepare(scene, "a", "b")
        scene.api.pods["pod"] = POD
        file = scene.folder / "command"
        file.write_text(json.dumps(kubeconfig(scene.api.url)))
        with kubelet(scene.folder / "kubelet") as reported:
            reported.containers = CONTAINERS
            for reads, small, whole in (
                (False, ["default/pod"], ["default/pod"]),
                (True, ["default/pod/a", "default/pod/b"], ["default/pod/b", "default/pod/init"]),
            ):
                settings = {
                    "node_name": "node-1",
                    "kubelet_root": str(scene.folder / "kubelet"),
                    "kubeconfig": str(file),
                    "read_pods": reads,
                }
                driver = SimpleNamespace(name="gpu.nvidia.com", stored=SimpleNamespace(records=(record,)))
                node: Any = SimpleNamespace(
                    configuration=parse(settings), drivers=(driver,), system=System(str(scene.folder / "root"))
                )
                (claim,) = await asyncio.to_thread(command.claims, node)
                assert claim["containers"] == ["default/pod/a", "default/pod/b", "default/pod/init"]
                assert [each["containers"] for each in claim["devices"]] == [small, whole]
                text = command.claims_text([claim], [])
                assert [line.split("  ")[-1].strip() for line in text.splitlines()[1:]] == [
                    ", ".join(small),
                    ", ".join(whole),
                ]
            assert gather.containers_using(command.containers_of(node), record) == claim["containers"]

    run(home, scenario)


def test_requests_of_pod_extended_resources_use_request_mappings() -> None:
    extended = {
        "resourceClaimName": "pod-extended-resources-x",
        "requestMappings": [
            {"containerName": "a", "resourceName": "example.com/gpu", "requestName": "container-0-request-0"},
            {"containerName": "b", "resourceName": "example.com/gpu", "requestName": "container-1-request-0"},
        ],
    }
    named = {"name": "nic", "resourceClaimName": "shared"}
    found = requests_of_pod(
        {
            "spec": {
                "resourceClaims": [named],
                "containers": [
                    {"name": "a", "resources": {"claims": [{"name": "nic"}, {"name": "nic", "request": "x"}]}}
                ],
            },
            "status": {"extendedResourceClaimStatus": extended},
        }
    )
    assert found == {
        ("a", "shared"): None,
        ("a", "pod-extended-resources-x"): frozenset({"container-0-request-0"}),
        ("b", "pod-extended-resources-x"): frozenset({"container-1-request-0"}),
    }


@pytest.mark.parametrize("granted", [True, False])
def test_drivers_get_pods_with_the_option_only(granted: bool) -> None:
    (role,) = [each for each in driver_objects(read_pods=granted) if each["kind"] == "ClusterRole"]
    verbs = [each["verbs"] for each in role["rules"] if "pods" in each["resources"]]
    assert verbs == ([["get"]] if granted else [])
