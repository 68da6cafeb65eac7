# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test manual changes of GPUs while the driver runs: created partitions, removed boards, and the reset that the driver
can do.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER_UNIT, ROOT, Cluster
from tests.cluster.machines import generations, listed
from tests.cluster.manifests import claim, dynamic, pod
from tests.cluster.test_27_observability import info, scraped
from tests.cluster.test_55_faults import on, taints
from tests.cluster.test_56_health import device_faults, events, tolerant

pytestmark = pytest.mark.prove

CONFIGURATION = "/etc/dra-accelerators/driver.yaml"
BOARD = json.loads((ROOT / "roles/simulator/files/boards/h100-80.json").read_text(encoding="utf-8"))
#: Memory slices of each profile, by profile ID.
SIZES = {profile["id"]: profile["placements"]["size"] for profile in BOARD["mig"]["profiles"]}


@pytest.fixture()
def node(clean: Cluster) -> Iterator[str]:
    """Return the second node, all of whose GPUs are dynamic; undo the manual changes afterwards."""
    name = clean.nodes()[1]
    clean.wait("all devices are published", lambda: len(clean.devices(name)) == 8 * 26)
    yield name
    clean.run(name, "accelerator-simulator", "plug", "all")
    clean.heal(name)
    clean.wait("all devices are published", lambda: len(clean.devices(name)) == 8 * 26)
    clean.wait("no device is tainted", lambda: not taints(clean, name))


def of_gpu(cluster: Cluster, node: str, index: int) -> set[str]:
    """Return the names of a GPU's published devices."""
    return {name for name in cluster.devices(node) if name == f"gpu-{index}" or name.startswith(f"gpu-{index}-")}


def slices_of(name: str) -> set[int]:
    """Return the memory slices of a published partition, by its name."""
    number, start = (int(word) for word in name.rsplit("-", 2)[1:])
    return set(range(start, start + SIZES[number]))


@pytest.fixture()
def hand_made(clean: Cluster, node: str) -> Iterator[tuple[str, int, str, set[str]]]:
    """Create a partition manually on the idle GPU 4; yield its name, number, UUID, and the devices published before."""
    before = set(clean.devices(node))
    clean.shell(node, "nvidia-smi -i 4 -mig 1 && nvidia-smi mig -i 4 -cgi 9 -C")
    try:
        ((number, start),) = re.findall(
            r"^\|\s+4\s+MIG 3g\.40gb\s+\d+\s+(\d+)\s+(\d+):4",
            clean.run(node, "nvidia-smi", "mig", "-lgi"),
            re.MULTILINE,
        )
        (line,) = clean.instances(node)
        (uuid,) = re.findall(r"MIG-[0-9a-f-]{36}", line)
        yield f"gpu-4-mig-3g40gb-9-{start}", int(number), uuid, before
    finally:
        clean.shell(node, "nvidia-smi mig -i 4 -dci; nvidia-smi mig -i 4 -dgi; nvidia-smi -i 4 -mig 0", check=False)


def test_manually_created_partition_is_published_claimed_and_kept(
    clean: Cluster, node: str, hand_made: tuple[str, int, str, set[str]]
) -> None:
    name, number, uuid, before = hand_made
    parent = f"device.attributes['gpu.nvidia.com'].parentUUID == '{gpu_uuid(clean, node, 4)}'"

    def published() -> bool:
        device = clean.devices(node).get(name, {"attributes": {}})
        return bool(device["attributes"].get("uuid", {}).get("string") == uuid)

    clean.wait("the partition is published with its UUID", published)
    partitions = {each for each in before if each.startswith("gpu-4-")}
    beside = {each for each in partitions if not slices_of(each) & slices_of(name)}
    assert of_gpu(clean, node, 4) == {name, *beside}, (
        "the offered devices are not those that fit on the rest of the GPU"
    )
    assert set(clean.devices(node)) - of_gpu(clean, node, 4) == before - partitions - {"gpu-4"}
    owners = [each["owner"] for each in info(scraped(clean, node), "partitions")]
    assert owners == ["administrator"]

    own = "device.attributes['gpu.nvidia.com'].uuid"
    mine = f"has({own}) && {own} == '{uuid}'"
    wanted = [
        claim("by-hand", device_class="mig.nvidia.com", expression=mine),
        pod("by-hand", "by-hand", node=node),
        claim("beside", device_class="mig.nvidia.com", expression=f"{dynamic('2g.20gb')} && {parent}"),
        pod("beside", "beside", node=node),
    ]
    clean.apply(*wanted)
    clean.wait_running("by-hand", "beside")
    assert uuid in clean.wait("log", lambda: clean.log("by-hand")) and len(clean.instances(node)) == 2
    clean.delete(*reversed(wanted))
    clean.wait("the partition of the claim is deleted", lambda: len(clean.instances(node)) == 1)
    assert uuid in clean.instances(node)[0], "the administrator's partition was deleted"
    assert clean.cdi_files(node) == [] and clean.recorded(node) == {}

    written = generations(clean, node)
    clean.restart_driver(node)
    clean.wait("a scan of the driver", lambda: clean.status(node)["published"])
    assert uuid in clean.instances(node)[0] and published()
    assert generations(clean, node) == written, "the new process has written slices again"
    # A Prometheus scrape does not prevent its destruction.
    assert [each["owner"] for each in info(scraped(clean, node), "partitions")] == ["administrator"]

    clean.shell(node, f"nvidia-smi mig -i 4 -dci -gi {number} && nvidia-smi mig -i 4 -dgi -gi {number}")
    clean.wait("the GPU is offered as before", lambda: set(clean.devices(node)) == before)
    assert clean.instances(node) == []


def gpu_uuid(cluster: Cluster, node: str, index: int) -> str:
    """Return the UUID of a GPU from nvidia-smi."""
    return re.findall(
        rf"^GPU {index}: .*\(UUID: (GPU-[0-9a-f-]+)\)", cluster.run(node, "nvidia-smi", "-L"), re.MULTILINE
    )[0]


def test_gpu_is_unplugged_and_plugged(clean: Cluster, node: str) -> None:
    """One GPU is idle, and a pod uses a partition of the other. That pod can end, and no cleanup stays pending."""
    before, pid = set(clean.devices(node)), clean.driver_pid(node)
    gone = of_gpu(clean, node, 5) | of_gpu(clean, node, 6)
    held = [
        claim("held", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-6")),
        pod("held", "held", node=node),
    ]
    beside = [claim("beside", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-7"))]
    clean.apply(*held, *beside, pod("beside", "beside", node=node))
    clean.wait_running("held", "beside")
    clean.run(node, "accelerator-simulator", "unplug", "5,6")
    clean.wait("neither is published, all others are", lambda: set(clean.devices(node)) == before - gone)
    assert listed(clean, node) == 7, "six GPUs and the partition of another claim"
    clean.delete(*reversed(held))
    clean.wait("its claim has ended", lambda: clean.recorded(node) == {clean.uid("beside"): "prepared"})
    assert len(clean.cdi_files(node)) == 1 and clean.status(node)["ready"]

    clean.run(node, "accelerator-simulator", "plug", "5,6")
    clean.wait("all devices are published again", lambda: set(clean.devices(node)) == before)
    clean.wait("they are well", lambda: not taints(clean, node))
    clean.apply(*held)
    clean.wait_running("held")
    assert len(clean.instances(node)) == 2 and clean.driver_pid(node) == pid


def boards(cluster: Cluster, node: str) -> list[dict[str, Any]]:
    """Return the current state of the boards."""
    return list(json.loads(cluster.run(node, "accelerator-simulator", "show", "--json"))["gpus"])


@pytest.fixture()
def resetting(clean: Cluster, node: str) -> Iterator[str]:
    """Return the node with a driver that can reset GPUs, set in its configuration file."""
    former = clean.run(node, "cat", CONFIGURATION)
    assert "health_reset: true" not in former
    wanted = re.sub(r"^health_reset:.*\n", "", former, flags=re.MULTILINE) + "health_reset: true\n"

    def write(text: str) -> None:
        clean.shell(node, f"cat > {CONFIGURATION} <<'EOF'\n{text}EOF\nsystemctl reload {DRIVER_UNIT}")

    write(wanted)
    yield node
    write(former)


def test_requested_reset_is_done_on_an_idle_gpu_only(clean: Cluster, resetting: str) -> None:
    """The driver resets with nvidia-smi after it has released NVML. The simulator's faults are not cleared.

    After Xid 119 a GPU needs a reset without requesting it. With recovery action 4 it requests one.
    """
    node, pid = resetting, clean.driver_pid(resetting)
    wanted = [tolerant("used", on(clean, node, "gpu-6")), pod("used", "used", node=node)]
    clean.apply(*wanted)
    clean.wait_running("used")
    uuids = {index: boards(clean, node)[index]["uuid"] for index in (5, 6)}
    clean.run(node, "accelerator-simulator", "fault", "6", "recovery-action", "4")
    clean.wait(
        "the driver knows the request for a reset",
        lambda: device_faults(clean, node, 6) == {"recovery-action drain-and-reset"},
    )
    clean.wait("the taint is published", lambda: taints(clean, node).get("gpu-6"))
    clean.run(node, "accelerator-simulator", "fault", "5", "xid", "119")
    clean.wait("the Event of the reset", lambda: reported_resets(clean, node) == {uuids[5]})
    clean.wait("its taints are removed", lambda: all(name.startswith("gpu-6") for name in taints(clean, node)))
    assert ("DeviceRecovered", "Normal") in events(clean, "Node", node)
    assert boards(clean, node)[6]["recovery_action"] == 4 and len(clean.instances(node)) == 1, (
        "the one in use was reset"
    )
    assert clean.pod("used")["status"]["phase"] == "Running"

    clean.delete(*reversed(wanted))
    clean.wait("the other one was reset", lambda: boards(clean, node)[6]["recovery_action"] == 0)
    clean.wait("the Event of the reset", lambda: reported_resets(clean, node) == set(uuids.values()))
    clean.wait("no device is tainted", lambda: not taints(clean, node))
    clean.apply(*wanted)
    clean.wait_running("used")
    assert clean.driver_pid(node) == pid


def reported_resets(cluster: Cluster, node: str) -> set[str]:
    """Return the UUIDs of GPUs in the node's reset Events."""
    found = cluster.get("events", "-A", "--field-selector", f"involvedObject.kind=Node,involvedObject.name={node}")
    said = " ".join(each["message"] for each in found["items"] if each["reason"] == "DeviceReset")
    return set(re.findall(r"GPU-[0-9a-f-]{36}", said))
