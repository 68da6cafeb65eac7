# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test NPU faults on a cluster: taint, eviction, pod status, Events, and metrics report them, and their end.

The node also has free vNPUs and whole NPUs at the same time: one DeviceClass serves both by memory.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Recap
from tests.cluster.manifests import TOLERATED, claim
from tests.cluster.npus import NpuCluster, npu_pod
from tests.cluster.surfaces import ExpectedFault, FaultyDevice, Holder, Surfaces, Times, start_anew
from tests.cluster.test_27_observability import info, scraped
from tests.cluster.test_55_faults import taints
from tests.cluster.test_56_health import device_faults, events, health
from tests.cluster.test_58_each_fault import AT_ONCE, Case, case

WORLD = os.environ.get("DRA_ACCELERATORS_NPU_HEALTH_WORLD", "npu-health")
OF = "device.attributes['npu.huawei.com']"
CUT = 3
#: One static vNPU, one dynamic NPU, and all others whole.
LAYOUT = [
    {"match": {"index": 0}, "mode": "static", "partitions": {"vir04": 1}},
    {"match": {"index": CUT}, "mode": "dynamic"},
    {"match": {}, "mode": "whole"},
]
VARIABLES = {
    "accelerator_layouts": [{"hosts": "accelerator_nodes", "layout": LAYOUT}],
    "dra_driver_inventory_interval": 10,
    "dra_driver_metrics_address": "0.0.0.0:9817",
}
CALL = "call dcmi_get_device_health"
#: Faults of an NPU, in groups of four: codes of each kind in the vendor's list and an unlisted one, its health alone,
#: and failing calls. The health level of each code is chosen, so that the code determines the result.
CASES = (
    case("error 0x80E18402 critical", expected=(ExpectedFault("error-code", "80e18402", "NoExecute"),)),
    case("error 0x80E18005 critical", expected=(ExpectedFault("error-code", "80e18005", "NoExecute"),)),
    case("error 0x8C044E00 alarm", expected=(ExpectedFault("error-code", "8c044e00"),)),
    case("error 0x8FFF0000 alarm", expected=(ExpectedFault("error-code", "8fff0000"),)),
    case("error 0x80E01801 ok", expected=(ExpectedFault("error-code", "80e01801", ""),)),
    case("error 0x80818C06 warning", expected=(ExpectedFault("error-code", "80818c06", ""),)),
    case(
        "error 0x80E01801 critical",
        expected=(ExpectedFault("error-code", "80e01801", ""), ExpectedFault("health", "critical", "NoExecute")),
    ),
    case("health warning", expected=(ExpectedFault("health", "warning", ""),)),
    case("health alarm", expected=(ExpectedFault("health", "alarm"),)),
    case("health critical", expected=(ExpectedFault("health", "critical", "NoExecute"),)),
    case(f"{CALL} fail -8005", expected=(ExpectedFault("internal-error"),)),
    case(f"{CALL} fail -8012", expected=(ExpectedFault("not-ready"),)),
    case(f"{CALL} fail -8002", expected=(ExpectedFault("no-permission"),)),
    case(f"{CALL} fail -7", expected=(ExpectedFault("unknown-error"),)),
    case(f"{CALL} hang", expected=(ExpectedFault("no-answer"),)),
    case("lost", expected=(ExpectedFault("npu-lost", "", "NoExecute"),)),
)
TOGETHER = [CASES[place : place + AT_ONCE] for place in range(0, len(CASES), AT_ONCE)]


@pytest.fixture(scope="module")
def npus() -> Iterator[NpuCluster]:
    """Yield one bare node with eight NPUs."""
    made = NpuCluster(WORLD, VARIABLES)
    made.world("down")
    made.world("up", "--nodes", "1", "--silicon", "8x310P-Pro", timeout=3000)
    yield made
    made.world("down")


@pytest.fixture(scope="module")
def first(npus: NpuCluster) -> Recap:
    """Run the site playbook."""
    return npus.playbook("site.yml")


@pytest.fixture()
def node(npus: NpuCluster, first: Recap) -> Iterator[str]:
    """Yield the node with everything installed; clear all faults and delete all claims afterwards."""
    assert not first.failed, first.output
    (name,) = npus.nodes()
    yield name
    npus.run(name, "accelerator-simulator", "clear")
    npus.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    npus.wait("no device is tainted", lambda: not taints(npus, name))
    npus.wait("the layout's slice alone", lambda: len(npus.instances(name)) == 1 and not npus.cdi_files(name))


def documents(name: str, device_class: str, expression: str, *, tolerates: bool) -> list[dict[str, Any]]:
    """Return a claim, which can tolerate every fault, and its pod."""
    wanted = claim(name, device_class=device_class, expression=expression)
    if tolerates:
        wanted["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] = TOLERATED
    return [wanted, npu_pod(name, wanted["metadata"]["name"])]


def whole(physical: int, *, tolerates: bool = False) -> list[dict[str, Any]]:
    """Return a claim for one whole NPU, and its pod."""
    return documents(f"whole-{physical}", "npu.huawei.com", f"{OF}.physicId == {physical}", tolerates=tolerates)


def quarter(name: str, *, tolerates: bool) -> list[dict[str, Any]]:
    """Return a claim for a quarter of the dynamic NPU, and its pod."""
    return documents(name, "ascend-310p-1-4", f"{OF}.physicId == {CUT}", tolerates=tolerates)


def waits(npus: NpuCluster, name: str) -> bool:
    """Return whether the scheduler finds no device for a pod."""
    conditions = npus.pod(name)["status"].get("conditions", ())
    return any(each.get("reason") == "Unschedulable" for each in conditions)


def on_chip(npus: NpuCluster, node: str, physical: int) -> set[str]:
    """Return all published devices of an NPU: itself, its vNPUs, and the groups that contain it."""
    found = set()
    for name, device in npus.devices(node).items():
        members = device["attributes"].get("physicIds", {}).get("string", "").split(",")
        if re.fullmatch(rf"npu-{physical}(-.*)?", name) or str(physical) in members:
            found.add(name)
    return found


def test_error_evicts_pods_without_toleration_and_its_taint_is_removed_on_recovery(npus: NpuCluster, node: str) -> None:
    faulty = on_chip(npus, node, CUT)
    evicted, stays = quarter("evicted", tolerates=False), quarter("stays", tolerates=True)
    npus.apply(*evicted, *stays, *whole(4))
    npus.wait_running("evicted", "stays", "whole-4")
    npus.wait("the kubelet shows healthy devices", lambda: health(npus, "stays") == {("Healthy", "")})
    assert len(npus.instances(node)) == 3
    npus.run(node, "accelerator-simulator", "fault", CUT, "error", "0x80E18402", "critical")
    key = "npu.huawei.com/error-code"
    npus.wait(
        "all its devices are tainted, no others",
        lambda: {name for name, keys in taints(npus, node).items() if key in keys} == faulty,
    )
    npus.wait(
        "the pod is deleted", lambda: "NotFound" in npus.kubectl("get", "pod", "evicted", check=False, merge=True)
    )
    (taint,) = npus.devices(node)[f"npu-{CUT}"]["taints"]
    assert (taint["key"], taint["value"], taint["effect"]) == (key, "80e18402", "NoExecute")
    npus.wait("its vNPU is released", lambda: len(npus.instances(node)) == 2)
    (unhealthy,) = npus.wait("the kubelet shows an unhealthy device", lambda: health(npus, "stays") - {("Healthy", "")})
    assert unhealthy[0] == "Unhealthy" and "error 0x80e18402" in unhealthy[1] and "replaced" in unhealthy[1], unhealthy
    for kind, name in (("Pod", "stays"), ("ResourceClaim", "stays"), ("Node", node)):
        assert ("DeviceUnhealthy", "Warning") in events(npus, kind, name), kind
    assert device_faults(npus, node, CUT) == {"error-code 80e18402"}
    causes = {(each["cause"], each["effect"]) for each in info(scraped(npus, node), "device_fault")}
    assert causes == {("error-code-80e18402", "NoExecute")}
    assert "error-code 80e18402 (failed)" in npus.run(node, "dra-driver", "status")
    npus.restart_driver(node)
    npus.wait("a scan of the driver", lambda: npus.status(node)["published"])
    assert set(taints(npus, node)) == faulty
    # A pod without a toleration gets no vNPU of it, and the neighbor was not affected.
    npus.apply(evicted[1])
    npus.wait("the new pod is pending", lambda: waits(npus, "evicted"))
    assert npus.pod("whole-4")["status"]["phase"] == "Running" and health(npus, "whole-4") == {("Healthy", "")}
    assert events(npus, "Pod", "whole-4") & {("DeviceUnhealthy", "Warning")} == set()

    npus.run(node, "accelerator-simulator", "clear", CUT)
    npus.wait("no device is tainted", lambda: not taints(npus, node))
    npus.wait("the kubelet shows a healthy device", lambda: health(npus, "stays") == {("Healthy", "")})
    for kind, name in (("Pod", "stays"), ("ResourceClaim", "stays"), ("Node", node)):
        npus.wait(
            f"the Event of the {kind}",
            lambda kind=kind, name=name: ("DeviceRecovered", "Normal") in events(npus, kind, name),
        )
    assert info(scraped(npus, node), "device_fault") == []
    npus.wait_running("evicted")


@pytest.fixture()
def holders(npus: NpuCluster, node: str) -> list[Holder]:
    """Return some whole NPUs, each with a pod that tolerates all faults."""
    numbers = range(8 - AT_ONCE, 8)
    npus.apply(*(each for number in numbers for each in whole(number, tolerates=True)))
    npus.wait_running(*(f"whole-{number}" for number in numbers))
    published = npus.devices(node)
    return [
        Holder(
            str(published[f"npu-{number}"]["attributes"]["uuid"]["string"]),
            f"npu-{number}",
            f"whole-{number}",
            f"whole-{number}",
        )
        for number in numbers
    ]


@pytest.fixture()
def surfaces(npus: NpuCluster, node: str, holders: list[Holder]) -> Iterator[Surfaces]:
    """Record all sources of reports."""
    start_anew(npus, node)
    listening = Surfaces(npus, node)
    npus.wait("all is well", lambda: listening.all_well(holders))
    yield listening
    listening.close()


@pytest.mark.parametrize("cases", TOGETHER, ids=lambda cases: f"{cases[0].name} to {cases[-1].name}")
def test_fault_is_reported_everywhere_and_cleared(
    npus: NpuCluster, node: str, holders: list[Holder], surfaces: Surfaces, times: Times, cases: tuple[Case, ...]
) -> None:
    faulty = []
    for each, holder in zip(cases, holders):
        faulty.append(FaultyDevice(each.name, holder, each.expected_faults, time.time()))
        number = holder.device.rpartition("-")[2]
        npus.shell(node, " && ".join(f"accelerator-simulator fault {number} {words}" for words in each.faults))
    seen = surfaces.wait_seen(faulty)
    ended = time.time()
    npus.run(node, "accelerator-simulator", "clear")
    gone = surfaces.wait_gone(faulty, ended)
    for one in faulty:
        times.add(one, seen[one.name], ended, gone[one.name])
        for place in surfaces.expected(one.expected_faults):
            assert one.began <= (seen[one.name][place] or 0.0) <= ended <= (gone[one.name][place] or 0.0), (one, place)
    assert all(npus.pod(holder.pod)["status"]["phase"] == "Running" for holder in holders), "all is tolerated"


def test_one_class_serves_slices_and_whole_npus_by_memory(npus: NpuCluster, node: str) -> None:
    """Equal claims request at least 10 GiB. They get device after device, and of each NPU its vNPUs before the whole
    NPU.
    """
    enough = "device.capacity['npu.huawei.com'].memory.compareTo(quantity('10Gi')) >= 0"
    types, shown = [], []
    for number in range(5):
        name = f"any-{number}"
        asked = claim(name, device_class="any.npu.huawei.com", expression=enough)
        npus.apply(asked, npu_pod(name, asked["metadata"]["name"]))
        npus.wait_running(name)
        (held,) = npus.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"]
        types.append(npus.devices(node)[held["device"]]["attributes"]["type"]["string"])
        shown += npus.shown_to(name)
    assert types == ["vnpu", "npu", "npu", "vnpu", "vnpu"]
    names = {"npu": "310P3", "vnpu": "310Pvir04"}
    assert [re.sub(r"(vir04)\w*", r"\1", each) for each in shown] == [names[each] for each in types]
