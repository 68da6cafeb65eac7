# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test requests other than one device by name: an extended resource, several devices, devices that belong together."""

from __future__ import annotations

import re
from typing import Any

from tests.cluster.cluster import DRIVER, Cluster
from tests.cluster.manifests import IMAGE, PRINT_AND_STAY, claim, dynamic, example, pod


def allocated(cluster: Cluster, name: str) -> dict[str, list[str]]:
    """Return the devices that are allocated to a claim, by request."""
    found: dict[str, list[str]] = {}
    for result in cluster.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"]:
        found.setdefault(result["request"], []).append(result["device"])
    return found


def uuid_of(cluster: Cluster, node: str, device: str) -> str:
    """Return the published UUID of a node's device."""
    return str(cluster.devices(node)[device]["attributes"]["uuid"]["string"])


def test_extended_resource_gets_a_whole_gpu_without_a_claim(clean: Cluster) -> None:
    node = clean.nodes()[1]
    clean.apply(*example("extended-resource.yaml", node))
    clean.wait_running("extended-resource")
    log = clean.wait("the pod's list", lambda: clean.log("extended-resource"))
    (seen,) = re.findall(r"^GPU 0: .*UUID: (GPU-[0-9a-f-]+)", log, re.MULTILINE)
    assert "GPU 1:" not in log
    # The scheduler has created a claim for it, which the driver has prepared.
    (made,) = clean.get("resourceclaims")["items"]
    (device,) = [device for devices in allocated(clean, made["metadata"]["name"]).values() for device in devices]
    assert uuid_of(clean, node, device) == seen
    assert clean.recorded(node) == {made["metadata"]["uid"]: "prepared"}
    clean.kubectl("delete", "pod", "extended-resource")
    clean.wait("the claim is deleted with its pod", lambda: not clean.get("resourceclaims")["items"])


def test_a_request_for_two_devices_gets_two(clean: Cluster) -> None:
    node = clean.nodes()[1]
    clean.apply(claim("pair", device_class="gpu.nvidia.com", count=2), pod("pair", "pair", node=node))
    clean.wait_running("pair")
    log = clean.wait("the pod's list", lambda: clean.log("pair"))
    seen = re.findall(r"^GPU \d: .*UUID: (GPU-[0-9a-f-]+)", log, re.MULTILINE)
    devices = [device for given in allocated(clean, "pair").values() for device in given]
    assert len(devices) == len(set(devices)) == 2
    assert sorted(seen) == sorted(uuid_of(clean, node, device) for device in devices)


def test_devices_of_one_claim_can_be_kept_on_one_gpu(clean: Cluster) -> None:
    """The first request is for GPU 5. The second one has no selector and follows it by matchAttribute only."""
    node = clean.nodes()[1]
    there = f"device.attributes['{DRIVER}'].parentUUID == '{uuid_of(clean, node, 'gpu-5')}'"

    def wanted(name: str, constraints: list[dict[str, Any]]) -> dict[str, Any]:
        document = claim(name, device_class="mig.nvidia.com", expression=f"{dynamic('1g.10gb')} && {there}")
        (first,) = document["spec"]["devices"]["requests"]
        second = claim(name, device_class="mig.nvidia.com", expression=dynamic("2g.20gb"))
        (follower,) = second["spec"]["devices"]["requests"]
        document["spec"]["devices"]["requests"] = [{**first, "name": "leader"}, {**follower, "name": "follower"}]
        document["spec"]["devices"]["constraints"] = constraints
        return document

    clean.apply(wanted("apart", []), pod("apart", "apart", node=node))
    clean.wait_running("apart")
    assert not allocated(clean, "apart")["follower"][0].startswith("gpu-5-"), "else the rule below would prove nothing"
    clean.kubectl("delete", "pod,resourceclaim", "apart")
    constraint = {"requests": ["leader", "follower"], "matchAttribute": f"{DRIVER}/parentUUID"}
    clean.apply(wanted("together", [constraint]), pod("together", "together", node=node))
    clean.wait_running("together")
    given = allocated(clean, "together")
    assert all(device.startswith("gpu-5-mig-") for devices in given.values() for device in devices), given
    assert len(clean.instances(node)) == 2 and len(clean.cdi_files(node)) == 1


def test_each_container_sees_its_own_request_of_a_shared_claim(clean: Cluster) -> None:
    node = clean.nodes()[1]
    document = claim("split", device_class="mig.nvidia.com", expression=dynamic("1g.10gb"))
    (request,) = document["spec"]["devices"]["requests"]
    other = claim("split", device_class="mig.nvidia.com", expression=dynamic("2g.20gb"))["spec"]["devices"]["requests"][
        0
    ]
    document["spec"]["devices"]["requests"] = [{**request, "name": "small"}, {**other, "name": "large"}]
    user = pod("split", "split", node=node)
    user["spec"]["containers"] = [
        {
            "name": name,
            "image": IMAGE,
            "imagePullPolicy": "Never",
            "command": ["sh", "-c", PRINT_AND_STAY],
            "resources": {"claims": [{"name": "claim-0", "request": name}]},
        }
        for name in ("small", "large")
    ]
    clean.apply(document, user)
    clean.wait_running("split")
    for name, profile in (("small", "1g.10gb"), ("large", "2g.20gb")):
        log = clean.wait(f"the list of {name}", lambda name=name: clean.log("split", container=name))
        assert re.findall(r"MIG (\S+)", log) == [profile], log


def test_first_available_alternative_is_used_with_its_configuration(clean: Cluster) -> None:
    wish, user = example("first-available.yaml")
    clean.apply(wish, user)
    clean.wait_running("first-available")
    log = clean.wait("the pod's list", lambda: clean.log("first-available"))
    assert re.findall(r"MIG (\S+)", log) == ["2g.20gb"], "no GPU of the test world has 100 GiB"
    assert list(allocated(clean, "first-available")) == ["gpu/part"]
    clean.delete(user, wish)
    (selector,) = wish["spec"]["devices"]["requests"][0]["firstAvailable"][0]["selectors"]
    selector["cel"]["expression"] = selector["cel"]["expression"].replace("100Gi", "70Gi")
    clean.apply(wish, user)
    clean.wait_running("first-available")
    node = clean.pod("first-available")["spec"]["nodeName"]
    log = clean.wait("the pod's list", lambda: clean.log("first-available"))
    (uuid,) = re.findall(r"^GPU 0: .*UUID: (GPU-[0-9a-f-]+)", log, re.MULTILINE)
    assert list(allocated(clean, "first-available")) == ["gpu/large"] and "MIG " not in log

    def limit() -> str:
        return clean.run(node, "nvidia-smi", "--query-gpu=power.limit", "--format=csv,noheader", "-i", uuid).strip()

    assert limit() == "500.00 W"
    clean.delete(user, wish)
    assert limit() == "700.00 W"


def test_configuration_that_does_not_fit_its_alternative_is_rejected(clean: Cluster) -> None:
    """The scheduler omits a configuration's requests from the allocation if it names all of them."""
    wish, user = example("first-available.yaml")
    wish["spec"]["devices"]["config"][0]["requests"] = ["gpu/part"]
    clean.apply(wish, user)
    reason = "DeviceSettings is for a device, but the request has a partition"
    clean.wait(
        "the refusal as an Event",
        lambda: reason in " ".join(clean.kubectl("get", "events", "-n", "default", "-o", "yaml").split()),
    )
    assert list(allocated(clean, "first-available")) == ["gpu/part"]
    assert clean.pod("first-available")["status"]["phase"] == "Pending"
