# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Remove GPUs from a node while pods use them, and destroy a partition manually: names, layout, Events, and pod
status.

The second node has the other layout: claims share GPU 7, and virtual machines can use GPUs 5 and 6.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster, Recap
from tests.cluster.machines import drivers, listed
from tests.cluster.manifests import MIXED_LAYOUT, claim, pod
from tests.cluster.test_31_passthrough import OFFERED, address_of
from tests.cluster.test_55_faults import on
from tests.cluster.test_56_health import events, health
from tests.cluster.test_59_manual_changes import gpu_uuid, of_gpu

HEALTHY = {("Healthy", "")}
REPORTED, OVER = ("DeviceUnhealthy", "Warning"), ("DeviceRecovered", "Normal")


@pytest.fixture(scope="module")
def laid_out(cluster: Cluster, other_layout: Recap) -> str:
    """Return the second node with all devices of its layout published."""
    assert other_layout.failed == 0, other_layout.output
    node = cluster.nodes()[1]
    cluster.wait("GPUs are offered to virtual machines", lambda: set(cluster.devices(node)) >= OFFERED)
    cluster.wait("GPU 7 is shared", lambda: is_shared(cluster, node))
    return node


@pytest.fixture()
def node(clean: Cluster, laid_out: str) -> Iterator[str]:
    """Yield the node before a test; afterwards reinsert all its GPUs and wait for the same devices."""
    published = set(clean.devices(laid_out))
    yield laid_out
    clean.run(laid_out, "accelerator-simulator", "plug", "all")
    clean.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    clean.wait(
        "all devices are published",
        lambda: set(clean.devices(laid_out)) == published and listed(clean, laid_out) == 8,
    )


def is_shared(cluster: Cluster, node: str) -> bool:
    """Return whether claims can share GPU 7, and no partition of it is published."""
    device = cluster.devices(node).get("gpu-7", {})
    return bool(device.get("allowMultipleAllocations")) and of_gpu(cluster, node, 7) == {"gpu-7"}


def bus_ids(cluster: Cluster, node: str) -> dict[str, str]:
    """Return the PCI address of each published device."""
    return {
        name: str(device["attributes"]["resource.kubernetes.io/pciBusID"]["string"])
        for name, device in cluster.devices(node).items()
    }


def selecting(name: str, device_class: str, attribute: str, value: str) -> dict[str, Any]:
    """Return a claim for the device with this attribute."""
    domain, _slash, key = attribute.partition("/")
    return claim(name, device_class=device_class, expression=f"device.attributes['{domain}'].{key} == '{value}'")


def whole(cluster: Cluster, node: str, name: str, index: int) -> dict[str, Any]:
    """Return a claim for a whole GPU."""
    return selecting(name, "gpu.nvidia.com", "gpu.nvidia.com/uuid", gpu_uuid(cluster, node, index))


def test_gpu_unplugged_below_a_virtual_machine_and_a_share_names_stay(clean: Cluster, node: str) -> None:
    """A virtual machine uses GPU 6, and a claim uses a share of GPU 7, while GPU 2 is removed."""
    before, removed = bus_ids(clean, node), of_gpu(clean, node, 2)
    address = address_of(clean, node, 6)
    clean.apply(
        selecting("machine", "vfio.gpu.nvidia.com", "resource.kubernetes.io/pciBusID", address),
        pod("machine", "machine", node=node),
        whole(clean, node, "share", 7),
        pod("share", "share", node=node),
    )
    clean.wait_running("machine", "share")
    (result,) = clean.get("resourceclaim", "machine")["status"]["allocation"]["devices"]["results"]
    assert result["device"] == "gpu-vfio-6" and set(drivers(clean, node)) == {address}
    remaining = {name: bus for name, bus in before.items() if name not in removed}
    clean.run(node, "accelerator-simulator", "unplug", "2")
    clean.wait("all devices but those of GPU 2 are published", lambda: bus_ids(clean, node) == remaining)
    assert is_shared(clean, node) and clean.status(node)["ready"], clean.status(node)["problems"]

    # A restarted driver publishes the same devices.
    clean.restart_driver(node)
    clean.wait("the driver has read its devices", lambda: clean.status(node)["published"])
    assert bus_ids(clean, node) == remaining and is_shared(clean, node)
    # The layout's rules still apply to the same GPUs: a run changes nothing.
    again = clean.playbook("site.yml", "--limit", node, "--tags", "layout", "-e", layouts(node), check=False)
    assert (again.failed, again.changed) == (0, 0), again.output
    assert bus_ids(clean, node) == remaining and is_shared(clean, node)
    # A claim gets a partition of a GPU with a higher address than the removed one.
    clean.apply(
        claim("part", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-3")),
        pod("part", "part", node=node),
    )
    clean.wait_running("part")

    clean.run(node, "accelerator-simulator", "plug", "2")
    clean.wait("all devices have their names", lambda: bus_ids(clean, node) == before)
    assert {clean.pod(name)["status"]["phase"] for name in ("machine", "share", "part")} == {"Running"}
    for name in ("machine", "share", "part"):
        clean.kubectl("delete", f"pod/{name}", f"resourceclaim/{name}")
    clean.wait("the virtual machine's GPU is back", lambda: listed(clean, node) == 8 and drivers(clean, node) == {})


def layouts(node: str) -> str:
    """Return the variables of the node's layout, as in the fixture ``other_layout``."""
    return json.dumps({"accelerator_layouts": [{"hosts": node, "layout": MIXED_LAYOUT}]})


def has_event(cluster: Cluster, name: str, event: tuple[str, str]) -> bool:
    """Return whether Events of a pod and of its claim of the same name have this reason and type, without those of
    earlier objects.
    """

    def found(kind: str) -> set[tuple[str, str]]:
        uid = cluster.get(kind, name, "-n", "default")["metadata"]["uid"]
        items = cluster.get("events", "-n", "default", "--field-selector", f"involvedObject.uid={uid}")["items"]
        return {(each["reason"], each["type"]) for each in items}

    return all(event in found(kind) for kind in ("pod", "resourceclaim"))


def test_gpus_unplugged_under_claims_are_reported_and_restored(clean: Cluster, node: str) -> None:
    """A whole GPU, a partition, and a shared GPU. The pod on another GPU is not affected."""
    claims = {
        "whole": whole(clean, node, "whole", 0),
        "part": claim("part", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-1")),
        "share": whole(clean, node, "share", 7),
        "beside": claim("beside", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-2")),
    }
    affected = ("whole", "part", "share")
    for name, wanted in claims.items():
        clean.apply(wanted, pod(name, name, node=node))
    clean.wait_running(*claims)
    pid, published = clean.driver_pid(node), set(clean.devices(node))
    for name in claims:
        clean.wait(f"{name} is healthy", lambda name=name: health(clean, name) == HEALTHY)
    removed = of_gpu(clean, node, 0) | of_gpu(clean, node, 1) | of_gpu(clean, node, 7)
    clean.run(node, "accelerator-simulator", "unplug", "0,1,7")
    for name in affected:
        clean.wait(f"Events of {name}", lambda name=name: has_event(clean, name, REPORTED))
        (found,) = clean.wait(f"{name} is unhealthy", lambda name=name: health(clean, name) - HEALTHY)
        assert found[0] == "Unhealthy" and found[1], found
    clean.wait("the removed GPUs are not published", lambda: set(clean.devices(node)) == published - removed)
    assert health(clean, "beside") == HEALTHY and REPORTED not in events(clean, "Pod", "beside")

    clean.run(node, "accelerator-simulator", "plug", "0,1,7")
    for name in affected:
        clean.wait(f"Events of the end for {name}", lambda name=name: has_event(clean, name, OVER))
        clean.wait(f"{name} is healthy again", lambda name=name: health(clean, name) == HEALTHY)
    clean.wait("all are published", lambda: set(clean.devices(node)) == published)
    # Restored without a restart: the partitions of both claims exist, and each claim has its CDI file.
    assert len(clean.instances(node)) == 2 and len(clean.cdi_files(node)) == 4
    assert clean.driver_pid(node) == pid
    # A restarted container gets its device.
    clean.kubectl("exec", "part", "--", "nvidia-smi", "-L")
    for name in claims:
        clean.kubectl("delete", f"pod/{name}", f"resourceclaim/{name}")
    clean.wait("no claim is left", lambda: clean.recorded(node) == {} and clean.instances(node) == [])


def test_partition_destroyed_by_hand_under_a_claim_is_reported_and_restored(clean: Cluster, node: str) -> None:
    clean.apply(
        claim("lost", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-3")),
        pod("lost", "lost", node=node),
    )
    clean.wait_running("lost")
    clean.wait("the device is healthy", lambda: health(clean, "lost") == HEALTHY)
    (prepared,) = json.loads(clean.run(node, "dra-driver", "claims", "--output", "json"))
    number = prepared["devices"][0]["instance"]
    pid = clean.driver_pid(node)
    clean.shell(node, f"nvidia-smi mig -i 3 -dci -gi {number} && nvidia-smi mig -i 3 -dgi -gi {number}")
    assert clean.instances(node) == []
    clean.wait("Events of the loss", lambda: has_event(clean, "lost", REPORTED))
    clean.wait("Events of the end", lambda: has_event(clean, "lost", OVER))
    clean.wait("the device is healthy again", lambda: health(clean, "lost") == HEALTHY)
    (instance,) = clean.wait("the partition is created again", lambda: clean.instances(node))
    (restored,) = json.loads(clean.run(node, "dra-driver", "claims", "--output", "json"))
    assert restored["state"] == "prepared" and restored["devices"][0]["uuid"] in instance
    assert clean.driver_pid(node) == pid
    clean.kubectl("delete", "pod/lost", "resourceclaim/lost")
    clean.wait("nothing is left", lambda: clean.recorded(node) == {} and clean.instances(node) == [])
