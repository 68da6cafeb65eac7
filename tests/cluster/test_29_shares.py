# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test the uses of whole GPUs that a layout offers.

First a GPU shared by several claims: counted by the scheduler, enforced by MPS, and whole again afterwards. Then a GPU
for a virtual machine: bound to vfio-pci, hidden from NVML, and returned afterwards. Last a GPU that is prepared before
a pod is bound.
"""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import EXAMPLES, Cluster, Recap
from tests.cluster.machines import drivers, generations, listed
from tests.cluster.manifests import claim, pod
from tests.cluster.test_27_observability import scraped
from tests.cluster.test_28_mps import OUT_OF_MEMORY, computing, daemons, modes, printed, printed_limits

CLASS = "gpu-share.example.com"
# Interval in which the scheduler retries pending pods, with a margin. Until it has seen a deleted pod, the pod's
# claims stay.
SCHEDULER_SECONDS = 7


@pytest.fixture(scope="module")
def sharing(cluster: Cluster, other_layout: Recap) -> str:
    """Return the second node, whose GPU 7 four claims share."""
    assert other_layout.failed == 0, other_layout.output
    node = cluster.nodes()[1]
    cluster.wait("GPU 7 is offered in shares", lambda: "shares" in offered(cluster, node).get("capacity", {}))
    return node


def offered(cluster: Cluster, node: str) -> dict[str, Any]:
    """Return GPU 7 of a node as published."""
    return cluster.devices(node).get("gpu-7", {})


def documents() -> dict[str, dict[str, Any]]:
    """Return the example's objects, by kind and name."""
    items = yaml.safe_load((EXAMPLES / "shares.yaml").read_text(encoding="utf-8"))["items"]
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in items}


@pytest.mark.prove
def test_layout_tag_changes_only_the_layout(cluster: Cluster, other_layout: Recap) -> None:
    """The GPU is whole afterwards, and the driver publishes it whole: it received the rules as well."""
    assert other_layout.failed == 0 and other_layout.changed > 0, other_layout.output
    assert ": Determine the release of the node programs]" not in other_layout.output
    node = cluster.nodes()[1]
    cluster.wait("GPU 7 is offered whole alone", lambda: len(cluster.devices(node)) == 7 * 26 + 1 + 2)


def test_claims_share_a_gpu_and_each_gets_its_consumed_capacity(clean: Cluster, sharing: str) -> None:
    example = EXAMPLES / "shares.yaml"
    names = ("share-of-20", "share-by-default")
    items = yaml.safe_load(example.read_text(encoding="utf-8"))["items"]
    # One pod after the other: with two at once, the scheduler can leave the second pending until its periodic retry,
    # minutes later.
    clean.apply(*(each for each in items if (each["kind"], each["metadata"]["name"]) != ("Pod", names[1])))
    clean.wait_running(names[0])
    clean.apply(example)
    clean.wait_running(*names)
    results = [clean.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"][0] for name in names]
    assert {result["device"] for result in results} == {"gpu-7"}
    assert len({result["shareID"] for result in results}) == 2
    given = {}
    for name in names:
        given[name] = [line for line in printed(clean, name, "G\n").splitlines() if line[0].isdigit()]
    # 20 GiB, and a quarter of the memory, which the daemon prints as whole GiB. No daemon limits the multiprocessors.
    assert given == {"share-of-20": ["100.0", "20G"], "share-by-default": ["100.0", "19G"]}
    assert len(daemons(clean, sharing)) == 2 and set(modes(clean, sharing)) == {"Default"}
    text = scraped(clean, sharing)
    for name, result in zip(names, results):
        # The container, the claim's status, and the metrics show the same values.
        share = result["shareID"]
        path = f"/var/run/kubernetes.io/dra-device-attributes/resourceclaims/{name}/gpu/gpu.nvidia.com-metadata.json"
        newest = json.loads(clean.kubectl("exec", name, "--", "cat", path).splitlines()[0])
        attributes = newest["requests"][0]["devices"][0]["attributes"]
        (entry,) = clean.wait(
            "the claim's status", lambda name=name: clean.get("resourceclaim", name)["status"].get("devices")
        )
        consumed = entry["data"]["consumed"]
        assert attributes["shareID"] == {"string": share} and entry["shareID"] == share
        assert attributes["consumedMemory"] == {"int": consumed["memory"]}
        assert attributes["consumedMultiprocessors"] == {"int": consumed["multiprocessors"]}
        assert consumed["shares"] == attributes["consumedShares"]["int"] == 1
        if name == "share-of-20":
            assert (consumed["memory"], consumed["multiprocessors"]) == (20 << 30, 66)
        for suffix, capacity in (("_bytes", "memory"), ("", "multiprocessors")):
            series = rf'^dra_accelerators_claim_consumed_capacity{suffix}{{(?=.*share_id="{share}").*capacity="{capacity}".*}} (\S+)$'
            assert [float(value) for value in re.findall(series, text, re.MULTILINE)] == [consumed[capacity]]
    clean.delete(example)
    assert clean.companions(sharing) == []


def test_shares_never_exceed_the_gpu_and_limit_their_processes(clean: Cluster, sharing: str) -> None:
    found = documents()
    wanted = {}
    for name, memory in (("small", "2Gi"), ("large", "70Gi"), ("late", "20Gi")):
        wish = claim(name, device_class=CLASS)
        wish["spec"]["devices"]["requests"][0]["exactly"]["capacity"] = {
            "requests": {"memory": memory, "multiprocessors": "12"}
        }
        wanted[name] = [wish, computing(name, name, sharing)]
    clean.apply(found[f"DeviceClass/{CLASS}"], *wanted["small"], *wanted["large"])
    clean.wait_running("small", "large")
    small, large = printed_limits(clean, "small"), printed_limits(clean, "large")
    assert (small["context"], small["within"], small["beyond"], small["memory"]) == (0, 0, OUT_OF_MEMORY, 2048)
    assert (large["context"], large["within"], large["beyond"], large["memory"]) == (0, 0, 0, 70 * 1024)
    # Separate servers run in turns: each has all multiprocessors in its turn.
    assert small["multiprocessors"] == large["multiprocessors"] == 132
    clean.apply(*wanted["late"])
    clean.wait("the reason of the scheduler", lambda: "Unschedulable" in json.dumps(clean.pod("late")["status"]))
    clean.delete(*reversed(wanted["large"]))
    clean.wait_running("late")
    assert printed_limits(clean, "late")["memory"] == 20 * 1024
    clean.delete(*reversed(wanted["late"]), *reversed(wanted["small"]), found[f"DeviceClass/{CLASS}"])
    assert clean.companions(sharing) == []


def test_consumed_memory_limits_each_process_and_not_their_sum(clean: Cluster, sharing: str) -> None:
    """Two processes share 1.5 GiB: each can allocate 1 GiB and no more than 1.5 GiB, and both together exceed the
    share.
    """
    found = documents()
    wish = claim("share", device_class=CLASS)
    wish["spec"]["devices"]["requests"][0]["exactly"]["capacity"] = {
        "requests": {"memory": "1536Mi", "multiprocessors": "66"}
    }
    users = [computing(name, "share", sharing) for name in ("one", "two")]
    clean.apply(found[f"DeviceClass/{CLASS}"], wish, *users)
    clean.wait_running("one", "two")
    (consumed,) = clean.get("resourceclaim", "share")["status"]["allocation"]["devices"]["results"]
    assert consumed["consumedCapacity"]["memory"] == "1536Mi"
    seen = [printed_limits(clean, name) for name in ("one", "two")]
    for each in seen:
        assert (each["context"], each["memory"], each["within"], each["beyond"]) == (0, 1536, 0, OUT_OF_MEMORY)
        assert each["multiprocessors"] == 132
    memory = clean.run(
        sharing, "nvidia-smi", "--query-compute-apps=name,used_memory", "--format=csv,noheader,nounits", "-i", "7"
    )
    used = [int(line.rpartition(", ")[2]) for line in memory.splitlines() if "mps-server" not in line]
    assert len(used) == 2 and sum(used) >= 2 * 1024 > 1536
    clean.delete(*reversed(users), wish, found[f"DeviceClass/{CLASS}"])
    assert clean.companions(sharing) == []


@pytest.mark.prove
def test_claims_with_a_shared_daemon_use_one_daemon_and_separate_limits(clean: Cluster, sharing: str) -> None:
    shared = documents()[f"DeviceClass/{CLASS}"]
    shared["spec"]["config"][0]["opaque"]["parameters"]["sharing"]["mpsConfig"] = {"sharedDaemon": True}
    parts = {"half": 66, "quarter": 33}
    wanted = {}
    for name, multiprocessors in parts.items():
        wish = claim(name, device_class=CLASS)
        wish["spec"]["devices"]["requests"][0]["exactly"]["capacity"] = {
            "requests": {"memory": "2Gi", "multiprocessors": str(multiprocessors)}
        }
        wanted[name] = [wish, computing(name, name, sharing)]
    clean.apply(shared, *wanted["half"])
    clean.wait_running("half")
    clean.apply(*wanted["quarter"])
    clean.wait_running("quarter")
    for name, multiprocessors in parts.items():
        seen = printed_limits(clean, name)
        assert (seen["context"], seen["memory"], seen["multiprocessors"]) == (0, 2048, multiprocessors)
    (unit,) = daemons(clean, sharing)
    assert "mps@device-GPU-" in unit
    clean.delete(*reversed(wanted["half"]))
    assert list(daemons(clean, sharing)) == [unit] and printed_limits(clean, "quarter")["context"] == 0
    clean.delete(*reversed(wanted["quarter"]), shared)
    assert clean.companions(sharing) == []


@pytest.mark.prove
def test_share_survives_a_driver_restart_and_the_end_of_another_claim(clean: Cluster, sharing: str) -> None:
    found = documents()
    clean.apply(*found.values())
    clean.wait_running("share-of-20", "share-by-default")
    before = daemons(clean, sharing)
    clean.restart_driver(sharing)
    uid = clean.uid("share-of-20")
    clean.wait("the claim is prepared again", lambda: clean.recorded(sharing).get(uid) == "prepared")
    assert daemons(clean, sharing) == before
    clean.delete(found["Pod/share-by-default"], found["ResourceClaim/share-by-default"])
    assert list(daemons(clean, sharing)) == [unit for unit in before if uid in unit]
    again = pod("again", "share-of-20", node=sharing)
    clean.apply(again)
    clean.wait_running("again")
    clean.delete(
        again, *(found[name] for name in ("Pod/share-of-20", "ResourceClaim/share-of-20", f"DeviceClass/{CLASS}"))
    )
    assert clean.companions(sharing) == []


def test_gpu_is_passed_to_a_virtual_machine_and_returned(clean: Cluster, sharing: str) -> None:
    example, before = EXAMPLES / "vfio.yaml", generations(clean, sharing)
    clean.apply(example)
    clean.wait_running("vfio")
    (result,) = clean.get("resourceclaim", "vfio")["status"]["allocation"]["devices"]["results"]
    assert result["device"] in {"gpu-vfio-5", "gpu-vfio-6"} and result["pool"] == sharing
    inside = clean.wait("the devices that the pod can open", lambda: clean.log("vfio")).split()
    address, _driver = drivers(clean, sharing).popitem()
    group = clean.run(sharing, "readlink", f"/sys/bus/pci/devices/{address}/iommu_group").strip().rpartition("/")[2]
    assert sorted(inside) == sorted([f"/dev/vfio/{group}", "/dev/vfio/vfio"])
    assert drivers(clean, sharing) == {address: "vfio-pci vfio-pci"} and listed(clean, sharing) == 7
    assert generations(clean, sharing) == before
    clean.delete(example)
    clean.wait("the GPU is back", lambda: listed(clean, sharing) == 8)
    assert drivers(clean, sharing) == {} and generations(clean, sharing) == before


def waiting_claim(cluster: Cluster, node: str) -> list[dict[str, Any]]:
    """Return the example's claim and pod for the GPU with binding conditions."""
    wanted, user = yaml.safe_load((EXAMPLES / "prepared-before-binding.yaml").read_text(encoding="utf-8"))["items"]
    address = cluster.devices(node)["gpu-4"]["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
    (selector,) = wanted["spec"]["devices"]["requests"][0]["exactly"]["selectors"]
    selector["cel"]["expression"] += f" && device.attributes['resource.kubernetes.io'].pciBusID == '{address}'"
    user["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    return [wanted, user]


def conditions(cluster: Cluster, name: str) -> dict[str, dict[str, Any]]:
    """Return the conditions of a claim's only device, by type."""
    devices = cluster.get("resourceclaim", name).get("status", {}).get("devices", [])
    return {each["type"]: each for device in devices for each in device["conditions"]}


def wait_for_conditions(cluster: Cluster, node: str) -> None:
    """Wait until the driver has detected the controller, which it checks every minute."""
    cluster.wait(
        "the devices with binding conditions",
        lambda: "bindingConditions" in cluster.devices(node)["gpu-4-mig-1g10gb-19-0"],
    )


def test_pod_is_bound_when_its_partition_exists(clean: Cluster, sharing: str) -> None:
    """While its driver is stopped, a node gets no pod with such a device. With the driver, the partition is created
    before the binding.
    """
    wait_for_conditions(clean, sharing)
    documents = waiting_claim(clean, sharing)
    name = documents[0]["metadata"]["name"]
    clean.run(sharing, "systemctl", "stop", "dra-accelerators-driver.service")
    try:
        clean.apply(*documents)
        status = clean.wait("the claim is allocated", lambda: clean.get("resourceclaim", name).get("status"))
        (result,) = status["allocation"]["devices"]["results"]
        assert result["bindingConditions"] == ["dra.accelerators/Prepared"] and result["device"].startswith(
            "gpu-4-mig-"
        )
        assert not clean.pod(name)["spec"].get("nodeName") and clean.instances(sharing) == []
        listed = ("configmap", f"waiting-claims-{sharing}", "-n", "dra-accelerators")
        text = clean.wait("its list", lambda: clean.kubectl("get", *listed, "--ignore-not-found", "-o", "yaml"))
        assert f"default/{name} {clean.uid(name)} " in text
    finally:
        clean.run(sharing, "systemctl", "start", "dra-accelerators-driver.service")
    clean.wait_running(name)
    found = conditions(clean, name)
    bound = next(each for each in clean.pod(name)["status"]["conditions"] if each["type"] == "PodScheduled")
    assert found["dra.accelerators/Prepared"]["status"] == found["Ready"]["status"] == "True"
    assert found["dra.accelerators/Prepared"]["lastTransitionTime"] <= bound["lastTransitionTime"]
    (entry,) = clean.get("resourceclaim", name)["status"]["devices"]
    inside = clean.wait("the devices of the pod", lambda: clean.log(name))
    assert entry["data"]["uuid"] in inside and entry["data"]["profile"] == "1g.10gb"
    clean.delete(*reversed(documents))
    clean.wait("no list is left", lambda: not clean.kubectl("get", *listed, "--ignore-not-found"))


@pytest.mark.prove
def test_pod_with_a_failing_prepare_is_not_bound(clean: Cluster, sharing: str) -> None:
    documents = waiting_claim(clean, sharing)
    name = documents[0]["metadata"]["name"]
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "Unheard"}
    documents[0]["spec"]["devices"]["config"] = [{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]
    clean.apply(*documents)
    said = clean.wait(
        "why, as an Event of the claim",
        lambda: (text := " ".join(clean.kubectl("get", "events", "-o", "yaml").split())) and "Unheard" in text and text,
    )
    assert "PrepareFailed" in said
    assert not clean.pod(name)["spec"].get("nodeName") and clean.instances(sharing) == []
    clean.delete(documents[1])
    time.sleep(SCHEDULER_SECONDS)
    clean.delete(documents[0])


@pytest.mark.prove
def test_deleted_unbound_pod_leaves_nothing(clean: Cluster, sharing: str) -> None:
    """The pod has its own claim and one that fails, and is deleted. The driver removes the partition prepared for it."""
    documents = waiting_claim(clean, sharing)
    wanted, user = documents
    name = wanted["metadata"]["name"]
    held = json.loads(json.dumps(wanted))
    held["metadata"]["name"] = "held-up"
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "Unheard"}
    held["spec"]["devices"]["config"] = [{"opaque": {"driver": "gpu.nvidia.com", "parameters": parameters}}]
    user["spec"]["resourceClaims"].append({"name": "held", "resourceClaimName": "held-up"})
    clean.apply(wanted, held, user)
    clean.wait("one of the claims is prepared", lambda: clean.uid(name) in clean.recorded(sharing))
    assert not clean.pod(name)["spec"].get("nodeName")
    clean.delete(user)
    clean.wait("the partition is deleted", lambda: clean.instances(sharing) == [] and not clean.recorded(sharing))
    # Another pod gets the same device. A scheduler that saw the first pod deleted while it waited can consider its
    # claims or devices as allocated until it restarts (docs/troubleshooting.md).
    clean.world("component", "restart", "scheduler")
    again = pod("again", name, node=sharing)
    clean.apply(again)
    clean.wait_running("again")
    clean.delete(again, wanted, held)
