# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a GPU error: the driver publishes a taint, pod status, and Events, pods are evicted, and all is removed after
the recovery.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import TOLERATED, claim, pod
from tests.cluster.test_27_observability import info, scraped
from tests.cluster.test_55_faults import on, taints


@pytest.fixture()
def node(clean: Cluster) -> Iterator[str]:
    """Yield the second node, all of whose GPUs are dynamic; clear all faults afterwards."""
    name = clean.nodes()[1]
    clean.wait("all devices are published", lambda: len(clean.devices(name)) == 8 * 26)
    yield name
    clean.heal(name)
    clean.wait("no device is tainted", lambda: not taints(clean, name))


def tolerant(name: str, expression: str) -> dict[str, Any]:
    """Return a claim that tolerates every fault."""
    made = claim(name, device_class="mig.nvidia.com", expression=expression)
    made["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] = TOLERATED
    return made


def health(cluster: Cluster, name: str) -> set[tuple[str, str]]:
    """Return health and message of the devices in a pod's status."""
    return {
        (resource["health"], resource.get("message", ""))
        for container in cluster.pod(name)["status"].get("containerStatuses", ())
        for each in container.get("allocatedResourcesStatus", ())
        for resource in each["resources"]
    }


def events(cluster: Cluster, kind: str, name: str) -> set[tuple[str, str]]:
    """Return reason and type of the Events about an object."""
    found = cluster.get("events", "-A", "--field-selector", f"involvedObject.kind={kind},involvedObject.name={name}")
    return {(each["reason"], each["type"]) for each in found["items"]}


def device_faults(cluster: Cluster, node: str, index: int) -> set[str]:
    """Return cause and value of the faults of a GPU that the driver knows."""
    devices = cluster.status(node)["devices"]
    if index >= len(devices):
        return {"not known"}  # the driver did not answer in time
    return {f"{each['cause']} {each['value']}" for each in devices[index]["ailments"]}


def test_error_evicts_pods_without_toleration_and_its_taint_is_removed_on_recovery(clean: Cluster, node: str) -> None:
    of_gpu_3 = {name for name in clean.devices(node) if name == "gpu-3" or name.startswith("gpu-3-")}
    clean.apply(
        claim("evicted", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-3")),
        pod("evicted", "evicted", node=node),
        tolerant("stays", on(clean, node, "gpu-3", "2g.20gb")),
        pod("stays", "stays", node=node),
    )
    clean.wait_running("evicted", "stays")
    clean.wait("the kubelet shows a healthy device", lambda: health(clean, "stays") == {("Healthy", "")})
    clean.run(node, "accelerator-simulator", "fault", "3", "xid", "95")
    clean.wait(
        "all its devices are tainted, no others",
        lambda: {name for name, keys in taints(clean, node).items() if "gpu.nvidia.com/xid" in keys} == of_gpu_3,
    )
    (taint,) = [each for each in clean.devices(node)["gpu-3"]["taints"] if each["key"] == "gpu.nvidia.com/xid"]
    assert (taint["value"], taint["effect"]) == ("95", "NoExecute")
    clean.wait(
        "the pod is deleted", lambda: "NotFound" in clean.kubectl("get", "pod", "evicted", check=False, merge=True)
    )
    clean.wait("its partition is released", lambda: len(clean.instances(node)) == 1)
    (unhealthy,) = clean.wait(
        "the kubelet shows an unhealthy device", lambda: health(clean, "stays") - {("Healthy", "")}
    )
    assert (
        unhealthy[0] == "Unhealthy" and "Xid 95 (uncontained memory error)" in unhealthy[1] and "reset" in unhealthy[1]
    ), unhealthy
    for kind, name in (("Pod", "stays"), ("ResourceClaim", "stays"), ("Node", node)):
        assert ("DeviceUnhealthy", "Warning") in events(clean, kind, name), kind
    assert device_faults(clean, node, 3) == {"xid 95", "recovery-action drain-and-reset"}
    reported = {(each["cause"], each["effect"]) for each in info(scraped(clean, node), "device_fault")}
    assert reported == {("xid-95", "NoExecute"), ("recovery-action-drain-and-reset", "NoSchedule")}
    assert "xid 95 (failed)" in clean.run(node, "dra-driver", "status")
    clean.restart_driver(node)
    clean.wait("a scan of the driver", lambda: clean.status(node)["published"])
    assert "xid 95" in device_faults(clean, node, 3), "the driver has forgotten the Xid"
    assert set(taints(clean, node)) == of_gpu_3

    clean.run(node, "accelerator-simulator", "clear", "3")
    clean.wait("no device is tainted", lambda: not taints(clean, node))
    clean.wait("the kubelet shows a healthy device", lambda: health(clean, "stays") == {("Healthy", "")})
    for kind, name in (("Pod", "stays"), ("ResourceClaim", "stays"), ("Node", node)):
        assert ("DeviceRecovered", "Normal") in events(clean, kind, name), kind
    clean.apply(pod("evicted", "evicted", node=node))
    clean.wait_running("evicted")


@pytest.mark.prove
def test_application_error_is_reported_for_its_pod_and_affects_no_other_pod(clean: Cluster, node: str) -> None:
    for name in ("failing", "beside"):
        clean.apply(
            claim(name, device_class="mig.nvidia.com", expression=on(clean, node, "gpu-3")), pod(name, name, node=node)
        )
    clean.wait_running("failing", "beside")
    claims = json.loads(clean.run(node, "dra-driver", "claims", "--output", "json"))
    (instance,) = [
        device["instance"] for each in claims for device in each["devices"] if each["uid"] == clean.uid("failing")
    ]
    clean.run(node, "accelerator-simulator", "fault", "3", "xid", "31", instance, "0")
    clean.wait(
        "the Event of its claim", lambda: ("DeviceUnhealthy", "Warning") in events(clean, "ResourceClaim", "failing")
    )
    clean.wait("the Event of its pod", lambda: ("DeviceUnhealthy", "Warning") in events(clean, "Pod", "failing"))
    clean.wait("the fault has ended", lambda: ("DeviceRecovered", "Normal") in events(clean, "Pod", "failing"))
    assert events(clean, "ResourceClaim", "beside") == set() and taints(clean, node) == {}
    assert clean.pod("failing")["status"]["phase"] == "Running"


@pytest.mark.prove
@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (("recovery-action", "3"), {"recovery-action drain-p2p"}),
        (("row-remap", "failure"), {"row-remap-failure ", "xid 64", "recovery-action reset"}),
        (("thermal",), {"slowdown thermal"}),
        (("ecc", "dbe"), {"xid 48", "recovery-action drain-and-reset"}),
    ],
)
def test_each_fault_is_published_with_its_cause_and_cleared(
    clean: Cluster, node: str, fault: tuple[str, ...], expected: set[str]
) -> None:
    clean.run(node, "accelerator-simulator", "fault", "5", *fault)
    clean.wait("the expected faults", lambda: device_faults(clean, node, 5) == expected)
    keys = {f"gpu.nvidia.com/{each.split(' ')[0]}" for each in expected}
    clean.wait("the taint is published", lambda: taints(clean, node).get("gpu-5") == keys)
    assert all(name.startswith("gpu-5") for name in taints(clean, node))
    clean.heal(node, 5)
    clean.wait("the fault has ended", lambda: device_faults(clean, node, 5) == set())


@pytest.mark.prove
def test_xid_that_needs_a_reset_stays_until_the_repair_is_reported(clean: Cluster, node: str) -> None:
    """After Xid 119 a GPU requests no recovery: only a reset ends the fault, and the test does none."""
    clean.run(node, "accelerator-simulator", "fault", "4", "xid", "119")
    clean.wait("the taint is published", lambda: taints(clean, node).get("gpu-4") == {"gpu.nvidia.com/xid"})
    before = clean.status(node)["looked_at"]
    clean.wait("three scans", lambda: clean.status(node)["looked_at"] > before + 25, timeout=120)
    assert device_faults(clean, node, 4) == {"xid 119"}
    clean.restart_driver(node)
    clean.wait("a scan of the driver", lambda: clean.status(node)["published"])
    assert device_faults(clean, node, 4) == {"xid 119"}
    uuid = clean.devices(node)["gpu-4"]["attributes"]["uuid"]["string"]
    assert "reported" in clean.run(node, "dra-driver", "recovered", uuid)
    clean.wait("no device is tainted", lambda: not taints(clean, node))


@pytest.mark.prove
def test_burst_of_errors_is_one_event_and_few_slice_updates(clean: Cluster, node: str) -> None:
    before = {item["metadata"]["name"]: item["spec"]["pool"]["generation"] for item in clean.slices(node)}
    for _round in range(30):
        clean.run(node, "accelerator-simulator", "fault", "6", "xid", "119")
    clean.wait("the driver knows the fault", lambda: "xid 119" in device_faults(clean, node, 6))
    (times,) = [each["times"] for each in clean.status(node)["devices"][6]["ailments"] if each["value"] == "119"]
    assert 1 <= times <= 30, "those that are heard together count once"
    after = max(item["spec"]["pool"]["generation"] for item in clean.slices(node))
    assert after - max(before.values()) <= 3
    found = clean.get("events", "-A", "--field-selector", f"involvedObject.kind=Node,involvedObject.name={node}")
    reports = [each for each in found["items"] if each["reason"] == "DeviceUnhealthy" and "Xid 119" in each["message"]]
    assert len(reports) == 1
