# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test NPUs that several claims share, and vNPUs that an NPU rejects although all counters allow them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.acting import acting_controller
from tests.cluster.cluster import EXAMPLES, Recap
from tests.cluster.manifests import claim, pod
from tests.cluster.npus import NpuCluster
from tests.cluster.test_27_observability import scraped

WORLD = os.environ.get("DRA_ACCELERATORS_NPU_SHARING_WORLD", "npu-sharing")
SHARES = "ascend/shares.yaml"
LAYOUT = [
    {"match": {"index": 0}, "mode": "whole", "shares": 4},
    {"match": {"index": 1}, "mode": "dynamic"},
    {"match": {"index": [2, 3]}, "mode": "dynamic", "prepared_before_binding": True},
    {"match": {}, "mode": "whole"},
]
METRICS = {"dra_driver_metrics_address": "127.0.0.1:9817"}
#: Dynamic devices of one chip.
ON_DEMAND = "!has(device.attributes['npu.huawei.com'].uuid) && device.attributes['npu.huawei.com'].physicId == {}"


@pytest.fixture(scope="module")
def npus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NpuCluster]:
    """Yield one node with eight NPUs: one shared, three dynamic, the others whole."""
    made = NpuCluster(WORLD, {"accelerator_layouts": [{"hosts": "accelerator_nodes", "layout": LAYOUT}], **METRICS})
    made.world("down")
    made.world("up", "--nodes", "1", "--silicon", "8x310P-Pro", timeout=3000)
    with acting_controller(made, tmp_path_factory.mktemp("controller")):
        yield made
    made.world("down")


@pytest.fixture(scope="module")
def first(npus: NpuCluster) -> Recap:
    """Run the site playbook for the first time, without changing the sharing switch."""
    return npus.playbook("site.yml")


@pytest.fixture(scope="module")
def switched(npus: NpuCluster, first: Recap) -> Recap:
    """Run the playbook with sharing of the NPUs enabled."""
    assert not first.failed, first.output
    npus.variables = {**npus.variables, "ascend_vnpu_device_share": True}
    return npus.playbook("site.yml")


def taints(npus: NpuCluster) -> dict[str, set[str]]:
    """Return the causes of each tainted device."""
    (node,) = npus.nodes()
    return {
        name: {taint["key"].rpartition("/")[2] for taint in device["taints"]}
        for name, device in npus.devices(node).items()
        if device.get("taints")
    }


def events(npus: NpuCluster, kind: str, reason: str) -> list[str]:
    """Return the messages of Events with a reason about objects of a kind."""
    found = json.loads(npus.kubectl("get", "events", "-A", "-o", "json"))["items"]
    return [each["message"] for each in found if (each["involvedObject"]["kind"], each["reason"]) == (kind, reason)]


def run_npu_smi(npus: NpuCluster, physical: int, *command: str) -> None:
    """Run an administrator's npu-smi command on a chip."""
    (node,) = npus.nodes()
    said = npus.run(node, "npu-smi", "set", "-t", command[0], "-i", physical, "-c", 0, *command[1:])
    assert "OK" in said, said


def test_npu_without_device_share_is_not_shared(npus: NpuCluster, first: Recap) -> None:
    assert not first.failed, first.output
    npus.wait("the taint of the NPU", lambda: taints(npus).get("npu-0") == {"not-shareable"}, timeout=60)
    assert set(taints(npus)) == {"npu-0"}
    assert any("ascend_vnpu_device_share: true" in each for each in events(npus, "Node", "DeviceUnhealthy"))
    npus.apply(EXAMPLES / SHARES)
    for name in ("npu-share-of-8", "npu-share-by-default"):
        npus.wait("why it waits", lambda name=name: "Unschedulable" in json.dumps(npus.pod(name)["status"]))
    npus.delete(EXAMPLES / SHARES)


def test_two_claims_share_an_npu_and_see_their_shares(npus: NpuCluster, switched: Recap) -> None:
    assert not switched.failed and switched.changed, switched.output
    (node,) = npus.nodes()
    npus.wait("the end of the taint", lambda: not taints(npus), timeout=60)
    offered = npus.devices(node)["npu-0"]
    assert offered["allowMultipleAllocations"] and set(offered["capacity"]) == {"memory", "aiCores", "shares"}
    # One pod after the other: see docs/troubleshooting.md.
    names = ("npu-share-of-8", "npu-share-by-default")
    npus.apply(EXAMPLES / SHARES)
    npus.wait_running(*names)
    results = [npus.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"][0] for name in names]
    assert {result["device"] for result in results} == {"npu-0"} and len({each["shareID"] for each in results}) == 2
    text = scraped(npus, node)
    for name, result, answer in zip(names, results, ((8192, 50), (None, 25)), strict=True):
        log = npus.wait(
            "the devices of the pod", lambda name=name: (said := npus.log(name)) and "NPU_SHARE" in said and said
        )
        assert re.findall(r"^\| \d+ +(310P\w+) +\| OK ", log, re.MULTILINE) == ["310P3"]
        found = dict(re.findall(r"^(NPU_\w+)=(\d+)$", log, re.MULTILINE))
        memory, percent = answer
        assert found["NPU_SHARE_MEMORY_MIB"] == found["NPU_MEM_QUOTA"] and found["NPU_SHARE_AICORE_PERCENT"] == str(
            percent
        )
        assert memory in (None, int(found["NPU_MEM_QUOTA"]))
        (entry,) = npus.wait(
            "the claim's status", lambda name=name: npus.get("resourceclaim", name)["status"].get("devices")
        )
        path = f"/var/run/kubernetes.io/dra-device-attributes/resourceclaims/{name}/npu/npu.huawei.com-metadata.json"
        newest = json.loads(npus.kubectl("exec", name, "--", "cat", path).splitlines()[0])
        attributes = newest["requests"][0]["devices"][0]["attributes"]
        consumed = entry["data"]["consumed"]
        assert entry["shareID"] == result["shareID"] == attributes["shareID"]["string"]
        assert attributes["consumedAiCores"] == {"int": consumed["aiCores"]}
        assert consumed["memory"] == int(found["NPU_MEM_QUOTA"]) << 20
        series = rf'^dra_accelerators_claim_consumed_capacity{{(?=.*share_id="{result["shareID"]}").*capacity="aiCores".*}} (\S+)$'
        assert [float(value) for value in re.findall(series, text, re.MULTILINE)] == [consumed["aiCores"]]
    npus.delete(EXAMPLES / SHARES)
    npus.wait("no file of a claim", lambda: not npus.cdi_files(node))


def slice_of(title: str, physical: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a claim for a quarter of a chip, and its pod."""
    return claim(title, device_class="ascend-310p-1-4", expression=ON_DEMAND.format(physical)), pod(title, title)


def test_rejected_vnpu_is_reported_tainted_and_created_when_there_is_room(npus: NpuCluster, switched: Recap) -> None:
    assert not switched.failed
    (node,) = npus.nodes()
    run_npu_smi(npus, 1, "create-vnpu", "-f", "vir01", "-v", "116", "-g", "0")
    npus.run(node, "accelerator-simulator", "fault", "1", "fragmented")
    npus.apply(*slice_of("refused", 1))
    (held,) = npus.wait(
        "an allocation",
        lambda: (
            npus.get("resourceclaim", "refused")
            .get("status", {})
            .get("allocation", {})
            .get("devices", {})
            .get("results")
        ),
    )
    for kind in ("ResourceClaim", "Pod"):
        said = npus.wait(f"the Event of the {kind}", lambda kind=kind: events(npus, kind, "PrepareFailed"), timeout=60)
        assert "vir01 at 0:1" in said[0] and "its claim is then allocated again" in said[0], said
    npus.wait("the taint", lambda: "partition-refused" in taints(npus).get(held["device"], ()), timeout=60)
    kept = taints(npus)
    assert "npu-1" not in kept and all(name.startswith("npu-1-") for name in kept), kept
    place = held["device"].rpartition("-")[2]
    assert all(name.endswith(f"-{place}") for name in kept), kept
    # Another administrator's vNPU is not changed. When it is destroyed, the pod starts and all devices are available.
    assert "1 116 vir01" in npus.instances(node)
    run_npu_smi(npus, 1, "destroy-vnpu", "-v", "116")
    npus.wait_running("refused")
    npus.wait("the end of the taint", lambda: not taints(npus), timeout=60)
    npus.delete(*reversed(slice_of("refused", 1)))
    npus.wait("no slice", lambda: npus.instances(node) == [])


def test_unbound_pod_moves_to_an_npu_with_room(npus: NpuCluster, switched: Recap) -> None:
    """Chip 2 comes first and rejects each placement. The scheduler deallocates the claim until only chip 3 is left."""
    assert not switched.failed
    (node,) = npus.nodes()
    run_npu_smi(npus, 2, "create-vnpu", "-f", "vir01", "-v", "132", "-g", "0")
    npus.run(node, "accelerator-simulator", "fault", "2", "fragmented")
    wanted, user = slice_of("elsewhere", 2)
    (request,) = wanted["spec"]["devices"]["requests"]
    exactly = request.pop("exactly")
    request["firstAvailable"] = [
        {
            "name": f"chip-{physical}",
            "deviceClassName": exactly["deviceClassName"],
            "selectors": [{"cel": {"expression": ON_DEMAND.format(physical)}}],
        }
        for physical in (2, 3)
    ]
    npus.apply(wanted, user)
    npus.wait_running("elsewhere", timeout=300)
    (held,) = npus.get("resourceclaim", "elsewhere")["status"]["allocation"]["devices"]["results"]
    assert held["device"].startswith("npu-3-") and held["request"] == "device/chip-3"
    assert any(each.startswith("3 ") for each in npus.instances(node))
    assert {each for each in npus.instances(node) if each.startswith("2 ")} == {"2 132 vir01"}
    npus.delete(user, wanted)
    run_npu_smi(npus, 2, "destroy-vnpu", "-v", "132")
    npus.run(node, "accelerator-simulator", "clear", "2")
    npus.wait("the node has no vNPU and no CDI file", lambda: npus.instances(node) == [] and not npus.cdi_files(node))
