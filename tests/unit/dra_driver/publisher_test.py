# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The pool in the API server converges to the desired content, whatever other clients do, and is then unchanged."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import board_model
import pytest
from api_model import ApiModel, kubeconfig
from dra_driver.api.client import ApiClient
from dra_driver.api.resources import ResourceApi
from dra_driver.core.model import Taint
from dra_driver.core.vendors.nvidia import offers
from dra_driver.metrics import Metrics
from dra_driver.publish import publisher as module
from dra_driver.publish.publisher import Content, Publisher

DRIVER = "gpu.nvidia.com"


def content(*boards: str, dynamic: bool = True) -> Content:
    devices = [board_model.device(board, index) for index, board in enumerate(boards)]
    found = [offer for device in devices for offer in offers.offers(device, dynamic)]
    return Content(tuple(found), tuple(offers.counter_set(device) for device in devices if dynamic))


class Scene:
    def __init__(self, api: ApiModel, publisher: Publisher, client: ApiClient) -> None:
        self.api = api
        self.publisher = publisher
        self.client = client
        self.problems: list[tuple[str, str]] = []

    async def until(self, condition: Any, seconds: float = 30.0) -> None:
        deadline = asyncio.get_running_loop().time() + seconds
        while not condition():
            assert asyncio.get_running_loop().time() < deadline, (self.api.log, list(self.api.slices))
            await asyncio.sleep(0.01)

    async def at_rest(self, seconds: float = 0.3) -> int:
        before = len(self.api.writes())
        await asyncio.sleep(seconds)
        return len(self.api.writes()) - before


def run(tmp_path: Path, scenario: Any, api: ApiModel | None = None) -> None:
    async def main() -> None:
        model = api or ApiModel()
        await model.start()
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(kubeconfig(model.url)))
        client = ApiClient(str(file))
        problems: list[tuple[str, str]] = []
        publisher = Publisher(
            api=ResourceApi(client),
            driver=DRIVER,
            pool="node-1",
            node_name="node-1",
            metrics=Metrics(),
            report_problem=lambda reason, message: problems.append((reason, message)),
        )
        scene = Scene(model, publisher, client)
        scene.problems = problems
        task = asyncio.ensure_future(publisher.run())
        try:
            await scenario(scene)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await client.close()
            await model.stop()

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.05)
    monkeypatch.setattr(module, "RETRY_FIRST", 0.02)
    monkeypatch.setattr(module, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(module, "CHECK_INTERVAL", (0.02, 0.04))
    monkeypatch.setattr("dra_driver.api.watching.RETRY_FIRST", 0.02)


def test_publisher_unchanged_content_is_written_once(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80", "l4"))
        await scene.until(scene.publisher.published.is_set)
        slices = [scene.api.slices[name] for name in sorted(scene.api.slices)]
        assert len(slices) == 2
        assert {item["spec"]["pool"]["resourceSliceCount"] for item in slices} == {2}
        assert "sharedCounters" in slices[0]["spec"]
        assert slices[0]["metadata"]["ownerReferences"] == [
            {"apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "node-uid-1", "controller": True}
        ]
        assert await scene.at_rest() == 0
        scene.publisher.set_content(content("h100-80", "l4"))
        assert await scene.at_rest() == 0
        scene.api.end_watches()  # the server ends watches every few minutes
        assert await scene.at_rest() == 0

    run(tmp_path, scenario)


def test_publisher_one_changed_device_is_one_write(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        first = content("h100-80", "l4")
        scene.publisher.set_content(first)
        await scene.until(scene.publisher.published.is_set)
        before = len(scene.api.writes())
        changed = [
            replace(offer, attributes={**offer.attributes, "driverVersion": offer.attributes["cudaDriverVersion"]})
            if offer.name == "gpu-1"
            else offer
            for offer in first.offers
        ]
        scene.publisher.set_content(replace(first, offers=tuple(changed)))
        await scene.until(lambda: len(scene.api.writes()) > before)
        assert await scene.at_rest() == 0
        assert [method for method, _unused in scene.api.writes()[before:]] == ["PUT"]
        assert {item["spec"]["pool"]["generation"] for item in scene.api.slices.values()} == {1}

    run(tmp_path, scenario)


def test_publisher_slices_deleted_by_the_kubelet_are_created_again(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80", "l4"))
        await scene.until(scene.publisher.published.is_set)
        for name in list(scene.api.slices):
            scene.api.delete_slice(name)
        await scene.until(lambda: len(scene.api.slices) == 2)
        assert await scene.at_rest() == 0

    run(tmp_path, scenario)


def test_publisher_change_by_another_client_is_reverted(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)
        (name,) = scene.api.slices
        wrong = json.loads(json.dumps(scene.api.slices[name]["spec"]))
        wrong["devices"][0]["capacity"]["memory"]["value"] = "1Gi"
        right = scene.api.slices[name]["spec"]["devices"]
        scene.api.change_slice(name, wrong)
        await scene.until(lambda: scene.api.slices[name]["spec"]["devices"] == right)

    run(tmp_path, scenario)


def test_publisher_recreated_node_owns_the_slices(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)
        scene.api.nodes["node-1"]["metadata"]["uid"] = "node-uid-2"
        (name,) = scene.api.slices
        scene.api.delete_slice(name)
        await scene.until(lambda: len(scene.api.slices) == 1)
        (item,) = scene.api.slices.values()
        assert item["metadata"]["ownerReferences"][0]["uid"] == "node-uid-2"

    run(tmp_path, scenario)


def test_publisher_node_out_of_service_leaves_deleted_slices_alone_until_that_is_over(tmp_path: Path) -> None:
    """The controller deletes the slices of an out-of-service node, although its driver runs: they stay deleted until that ends."""

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80"))
        await scene.until(scene.publisher.published.is_set)
        node = scene.api.nodes["node-1"]
        node["spec"] = {"taints": [{"key": "node.kubernetes.io/out-of-service", "effect": "NoExecute"}]}
        for ready, are_published in (("Unknown", False), ("True", True), ("False", False)):
            node["status"] = {"conditions": [{"type": "Ready", "status": ready}]}
            for name in list(scene.api.slices):
                scene.api.delete_slice(name)
            before = len(scene.api.log)
            if are_published:
                await scene.until(lambda: len(scene.api.slices) == 2)
                continue
            await scene.until(lambda before=before: scene.api.log[before:].count(("GET", "/api/v1/nodes/node-1")) > 2)
            assert not scene.api.slices and "node.kubernetes.io/out-of-service" in scene.publisher.problem
        del node["spec"]
        await scene.until(lambda: scene.publisher.published.is_set() and len(scene.api.slices) == 2)
        assert not scene.publisher.problem

    run(tmp_path, scenario)


def test_waits_for_the_node_and_through_failures(tmp_path: Path) -> None:
    api = ApiModel()
    node = api.nodes.pop("node-1")
    api.failures = [("POST", 500, "etcd is away"), ("GET", 503, "starting"), ("POST", 429, "too many")]

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await asyncio.sleep(0.2)
        assert not scene.api.slices
        scene.api.nodes["node-1"] = node
        await scene.until(lambda: len(scene.api.slices) == 1, 20)

    run(tmp_path, scenario, api)


def test_publisher_conflict_is_resolved_with_a_new_read(tmp_path: Path) -> None:
    api = ApiModel()

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)
        api.failures = [("PUT", 409, "conflict")]
        scene.publisher.set_content(content("t4", dynamic=False))
        await scene.until(lambda: "T4" in json.dumps([item["spec"] for item in scene.api.slices.values()]), 10)

    run(tmp_path, scenario, api)


def test_without_counters_whole_devices_are_published_and_the_gate_is_named(tmp_path: Path) -> None:
    api = ApiModel()
    api.drop_fields = ("consumesCounters", "sharedCounters")

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80", "l4"))
        await scene.until(scene.publisher.published.is_set)
        devices = [device["name"] for item in scene.api.slices.values() for device in item["spec"]["devices"]]
        assert sorted(devices) == ["gpu-0", "gpu-1"]
        assert [reason for reason, _unused in scene.problems] == ["SliceFieldsDropped"]
        assert "DRAPartitionableDevices" in scene.problems[0][1]
        assert await scene.at_rest(0.5) == 0
        assert len(scene.api.dry_runs) == 1
        assert len(scene.problems) == 1

    run(tmp_path, scenario, api)


def test_publisher_device_that_cannot_be_published_is_reported_once(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        good, bad = content("l4", "t4", dynamic=False).offers
        scene.publisher.set_content(Content((good, replace(bad, name="Not a label"))))
        await scene.until(scene.publisher.published.is_set)
        devices = [device["name"] for item in scene.api.slices.values() for device in item["spec"]["devices"]]
        assert devices == ["gpu-0"]
        ((reason, text),) = scene.problems
        assert reason == "DeviceNotPublishable" and "'Not a label' is not a DNS label" in text
        assert await scene.at_rest(0.5) == 0
        assert len(scene.problems) == 1

    run(tmp_path, scenario)


def test_without_taints_a_tainted_device_is_never_published(tmp_path: Path) -> None:
    api = ApiModel()
    api.drop_fields = ("taints",)
    bodies: list[str] = []
    changed_by_server = api._curtailed
    api._curtailed = lambda body: (  # type: ignore[method-assign]
        bodies.append("" if body["metadata"].get("name") == "dry-run" else json.dumps(body)) or changed_by_server(body)
    )

    async def scenario(scene: Scene) -> None:
        healthy = content("l4", "t4", dynamic=False)
        scene.publisher.set_content(healthy)
        await scene.until(scene.publisher.published.is_set)
        assert not scene.api.dry_runs  # no dry run is needed
        faulty = [
            replace(healthy.offers[0], taints=(Taint("gpu.nvidia.com/gpu-lost", "NoSchedule"),)),
            healthy.offers[1],
        ]
        before = len(bodies)
        scene.publisher.set_content(replace(healthy, offers=tuple(faulty)))
        await scene.until(scene.publisher.published.is_set)
        assert "gpu-0" not in "".join(bodies[before:])
        assert "gpu-1" in "".join(json.dumps(item) for item in scene.api.slices.values())
        assert "DRADeviceTaints" in scene.problems[0][1]
        scene.publisher.set_content(healthy)
        await scene.until(lambda: "gpu-0" in "".join(json.dumps(item["spec"]) for item in scene.api.slices.values()))

    run(tmp_path, scenario, api)


def test_publisher_failed_dry_run_detects_features_by_kept_fields(tmp_path: Path) -> None:
    api = ApiModel()
    api.drop_fields = ("consumesCounters", "sharedCounters")
    api.failures = [("DRYRUN", 400, "a webhook does not do dry runs")]

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80"))
        await scene.until(scene.publisher.published.is_set)
        devices = [device["name"] for item in scene.api.slices.values() for device in item["spec"]["devices"]]
        assert devices == ["gpu-0"]
        assert await scene.at_rest(0.5) == 0

    run(tmp_path, scenario, api)


def test_gate_that_is_switched_on_is_noticed(tmp_path: Path) -> None:
    api = ApiModel()
    api.drop_fields = ("consumesCounters", "sharedCounters")

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80"))
        await scene.until(scene.publisher.published.is_set)
        assert len(scene.api.slices) == 1
        scene.api.drop_fields = ()
        scene.api.failures = [("WATCH", 500, "restarting")]
        scene.api.end_watches()
        await scene.until(lambda: len(scene.api.slices) == 2)
        await scene.until(scene.publisher.published.is_set)
        assert await scene.at_rest() == 0

    run(tmp_path, scenario, api)


def test_publisher_fields_changed_by_the_server_are_not_written_again(tmp_path: Path) -> None:
    api = ApiModel()
    changed_by_server = api._curtailed

    def changed(body: Any) -> Any:
        body = changed_by_server(body)
        for device in body["spec"].get("devices") or ():
            device["attributes"].pop("cudaDriverVersion")
        return body

    api._curtailed = changed  # type: ignore[method-assign]

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80"))
        await scene.until(scene.publisher.published.is_set)
        assert await scene.at_rest(0.5) == 0

    run(tmp_path, scenario, api)


def test_publisher_watch_that_ends_at_once_is_reopened_with_a_pause(tmp_path: Path) -> None:
    api = ApiModel()
    api.watch_ends_at_once = True

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)
        await asyncio.sleep(1.5)
        # The limit of the random wait doubles from 0.02 s: about 8 watches. Without waits there would be a thousand.
        assert len([entry for entry in scene.api.log if entry[0] == "WATCH"]) <= 20
        scene.publisher.set_content(content("t4", dynamic=False))
        await scene.until(lambda: "T4" in json.dumps(list(scene.api.slices.values())))

    run(tmp_path, scenario, api)


def test_own_change_does_not_wait_for_others_to_settle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SETTLE_SECONDS", 3600.0)

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)

        async def disturb() -> None:
            while True:
                for name in list(scene.api.slices):
                    spec = json.loads(json.dumps(scene.api.slices[name]["spec"]))
                    spec["devices"][0]["capacity"]["memory"]["value"] = "1Gi"
                    scene.api.change_slice(name, spec)
                await asyncio.sleep(0.02)

        others = asyncio.ensure_future(disturb())
        await asyncio.sleep(0.2)
        assert not scene.publisher.is_current
        scene.publisher.set_content(content("t4", dynamic=False))
        await scene.until(lambda: "T4" in json.dumps(list(scene.api.slices.values())))
        others.cancel()

    run(tmp_path, scenario)


def test_retry_after_is_honoured(tmp_path: Path) -> None:
    api = ApiModel()
    api.retry_after = "1"
    api.failures = [("POST", 429, "too many")]

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)
        refused, repeated = [api.moments[at] for at, entry in enumerate(api.log) if entry[0] == "POST"][:2]
        assert repeated - refused > 0.99

    run(tmp_path, scenario, api)


def test_slice_of_another_pool_that_must_stay_does_not_block(tmp_path: Path) -> None:
    api = ApiModel()
    api.slices["old"] = {
        "metadata": {"name": "old", "uid": "x", "resourceVersion": "7"},
        "spec": {
            "driver": DRIVER,
            "nodeName": "node-1",
            "pool": {"name": "old-name", "generation": 4, "resourceSliceCount": 1},
        },
    }
    api.kept = {"old"}

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)
        await scene.until(lambda: scene.problems)
        assert scene.problems[0][0] == "SliceLeftOver"
        assert "kubectl delete resourceslice old" in scene.problems[0][1]
        assert await scene.at_rest() == 0
        assert scene.publisher.is_current
        scene.publisher.set_content(content("t4", dynamic=False))
        await scene.until(lambda: "T4" in json.dumps(list(scene.api.slices.values())))
        assert [entry for entry in scene.api.log if entry[0] == "DELETE"] == [
            ("DELETE", "/apis/resource.k8s.io/v1/resourceslices/old")
        ]

    run(tmp_path, scenario, api)


def test_invalid_slice_is_an_event(tmp_path: Path) -> None:
    api = ApiModel()
    api.failures = [("POST", 422, "spec.devices[0].name: Invalid value")]

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(lambda: scene.problems)
        assert scene.problems[0][0] == "SlicesRefused"
        await scene.until(scene.publisher.published.is_set)

    run(tmp_path, scenario, api)


@pytest.mark.parametrize("status", [401, 409, 410, 503])
def test_pool_of_another_name_is_removed_after_an_error_of_the_server(tmp_path: Path, status: int) -> None:
    api = ApiModel()
    api.slices["old"] = {
        "metadata": {"name": "old", "uid": "x", "resourceVersion": "7"},
        "spec": {
            "driver": DRIVER,
            "nodeName": "node-1",
            "pool": {"name": "old-name", "generation": 4, "resourceSliceCount": 1},
        },
    }
    api.failures.append(("DELETE", status, "once"))

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(lambda: "old" not in scene.api.slices)
        await scene.until(scene.publisher.published.is_set)
        assert not scene.problems and scene.publisher.problem == ""

    run(tmp_path, scenario, api)


def test_publisher_pool_with_the_previous_name_is_removed(tmp_path: Path) -> None:
    api = ApiModel()
    api.slices["00000-gpu.nvidia.com-node-1-old"] = {
        "metadata": {"name": "00000-gpu.nvidia.com-node-1-old", "uid": "x", "resourceVersion": "7"},
        "spec": {
            "driver": DRIVER,
            "nodeName": "node-1",
            "pool": {"name": "old-name", "generation": 4, "resourceSliceCount": 1},
        },
    }

    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(Content())
        await scene.until(lambda: [item["spec"]["pool"]["name"] for item in scene.api.slices.values()] == ["node-1"])
        (item,) = scene.api.slices.values()
        assert item["spec"]["pool"]["name"] == "node-1"
        assert not item["spec"].get("devices")

    run(tmp_path, scenario, api)


def test_older_server_gets_counters_in_the_slices_of_devices(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("h100-80"))
        await scene.until(scene.publisher.published.is_set)
        (item,) = scene.api.slices.values()
        assert item["spec"]["sharedCounters"]
        assert item["spec"]["devices"]

    run(tmp_path, scenario, ApiModel(minor="34+"))


def test_v1beta1_server(tmp_path: Path) -> None:
    async def scenario(scene: Scene) -> None:
        scene.publisher.set_content(content("l4", dynamic=False))
        await scene.until(scene.publisher.published.is_set)
        (item,) = scene.api.slices.values()
        assert item["apiVersion"] == "resource.k8s.io/v1beta1"
        (device,) = item["spec"]["devices"]
        assert set(device) == {"name", "basic"}
        assert device["basic"]["attributes"]["type"] == {"string": "gpu"}
        assert await scene.at_rest() == 0
        scene.api.end_watches()
        assert await scene.at_rest() == 0

    run(tmp_path, scenario, ApiModel(minor="32", versions=("v1beta1",)))
