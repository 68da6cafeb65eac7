# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a GPU for a virtual machine: bound to vfio-pci for its claim, hidden from NVML, and returned afterwards.

The node is the one with the other layout. test_29_shares.py has one short case with that layout as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import DRIVER_UNIT, EXAMPLES, Cluster, Recap
from tests.cluster.killer import Killer
from tests.cluster.machines import drivers, generations, listed
from tests.cluster.manifests import TOLERATED, claim, pod
from tests.cluster.surfaces import ExpectedFault, FaultyDevice, Holder, Surfaces, Times
from tests.cluster.test_29_shares import conditions

pytestmark = pytest.mark.prove
CLASS = "vfio.gpu.nvidia.com"
OFFERED = {"gpu-vfio-5", "gpu-vfio-6"}


@pytest.fixture(scope="module")
def passing(cluster: Cluster, other_layout: Recap) -> str:
    """Return the node whose GPUs virtual machines can use."""
    assert other_layout.failed == 0, other_layout.output
    node = cluster.nodes()[1]
    cluster.wait("GPUs are offered to virtual machines", lambda: set(cluster.devices(node)) >= OFFERED)
    return node


def test_a_virtual_machine_that_prefers_iommufd(clean: Cluster, passing: str) -> None:
    example = EXAMPLES / "vfio-iommufd.yaml"
    clean.apply(example)
    clean.wait_running("vfio-iommufd")
    inside = set(clean.wait("the devices that the pod can open", lambda: clean.log("vfio-iommufd")).split())
    (own,) = [path for path in inside if path.startswith("/dev/vfio/devices/")]
    assert inside == {"/dev/iommu", "/dev/vfio/vfio", "/dev/vfio/devices", own}
    clean.delete(example)
    clean.wait("the GPU is back", lambda: listed(clean, passing) == 8)


def test_driver_restarts_while_a_gpu_is_in_a_virtual_machine(clean: Cluster, passing: str) -> None:
    """The restarted driver publishes the same slices although NVML does not know the GPU, and rebinds it when the pod
    has ended.
    """
    example = EXAMPLES / "vfio.yaml"
    clean.apply(example)
    clean.wait_running("vfio")
    before = generations(clean, passing)
    clean.restart_driver(passing)
    assert generations(clean, passing) == before and listed(clean, passing) == 7
    clean.delete(example)
    clean.wait("the GPU is back", lambda: listed(clean, passing) == 8)
    assert drivers(clean, passing) == {} and generations(clean, passing) == before


def test_whole_partition_and_virtual_machine_exclude_each_other(clean: Cluster, passing: str) -> None:
    """Partitions use both GPUs for virtual machines: the third claim is pending, and gets the first GPU that is
    released.
    """
    holders = []
    for number in (5, 6):
        where = f"device.attributes['resource.kubernetes.io'].pciBusID == '{address_of(clean, passing, number)}'"
        expression = f"device.attributes['gpu.nvidia.com'].profile == '1g.10gb' && {where}"
        part = f"part-{number}"
        wanted = claim(part, device_class="mig.nvidia.com", expression=expression)
        holders.append([wanted, pod(part, part, node=passing)])
    for documents in holders:
        clean.apply(*documents)
    clean.wait_running("part-5", "part-6")
    wanted = [claim("machine", device_class=CLASS), pod("machine", "machine", node=passing)]
    clean.apply(*wanted)
    clean.wait(
        "it cannot be scheduled", lambda: "cannot allocate" in clean.kubectl("get", "events", "-A", "-o", "yaml")
    )
    clean.delete(*reversed(holders[0]))
    clean.wait_running("machine")
    assert set(drivers(clean, passing)) == {address_of(clean, passing, 5)}
    clean.delete(*reversed(wanted), *reversed(holders[1]))
    clean.wait("the GPU is back", lambda: listed(clean, passing) == 8)


def address_of(cluster: Cluster, node: str, number: int) -> str:
    """Return the PCI address of a GPU."""
    return str(cluster.devices(node)[f"gpu-{number}"]["attributes"]["resource.kubernetes.io/pciBusID"]["string"])


def test_pod_is_bound_when_its_gpu_is_bound(clean: Cluster, passing: str) -> None:
    """The GPU is bound to vfio-pci before the pod is bound. Without a driver that does it, the pod has no node."""
    address = address_of(clean, passing, 6)
    where = f"device.attributes['resource.kubernetes.io'].pciBusID == '{address}'"
    documents = [
        claim("awaited", device_class=CLASS, expression=where),
        pod("awaited", "awaited", node=passing),
    ]
    clean.run(passing, "systemctl", "stop", DRIVER_UNIT)
    try:
        clean.apply(*documents)
        status = clean.wait("the claim is allocated", lambda: clean.get("resourceclaim", "awaited").get("status"))
        (result,) = status["allocation"]["devices"]["results"]
        assert (result["device"], result["bindingConditions"]) == ("gpu-vfio-6", ["dra.accelerators/Prepared"])
        assert not clean.pod("awaited")["spec"].get("nodeName") and drivers(clean, passing) == {}
    finally:
        clean.run(passing, "systemctl", "start", DRIVER_UNIT)
    clean.wait_running("awaited")
    found = conditions(clean, "awaited")["dra.accelerators/Prepared"]
    bound = next(each for each in clean.pod("awaited")["status"]["conditions"] if each["type"] == "PodScheduled")
    assert found["status"] == "True" and found["lastTransitionTime"] <= bound["lastTransitionTime"]
    assert drivers(clean, passing) == {address: "vfio-pci vfio-pci"}
    clean.delete(*reversed(documents))
    clean.wait("the GPU is back", lambda: listed(clean, passing) == 8 and drivers(clean, passing) == {})


def test_error_names_the_users_of_a_gpu(clean: Cluster, passing: str) -> None:
    """A process on the node uses the GPUs: the pod waits until it has ended."""
    clean.shell(passing, "accelerator-simulator fault 5,6 process 1")
    documents = [claim("machine", device_class=CLASS), pod("machine", "machine", node=passing)]
    try:
        clean.apply(*documents)
        said = clean.wait(
            "the refusal as an event",
            lambda: (
                "cannot be passed through" in (text := " ".join(clean.kubectl("get", "events", "-o", "yaml").split()))
                and text
            ),
        )
        assert "is in use by 1 (systemd" in said and listed(clean, passing) == 8
    finally:
        clean.shell(passing, "accelerator-simulator clear")
    clean.wait_running("machine")
    clean.delete(*reversed(documents))
    clean.wait("the GPU is back", lambda: listed(clean, passing) == 8)


def test_gpu_vanishes_while_a_virtual_machine_uses_it(clean: Cluster, passing: str, times: Times) -> None:
    """NVML does not know the GPU; the PCI bus shows it. A pod that tolerates the taint stays, and the GPU is published
    again on return.
    """
    wanted = claim("machine", device_class=CLASS)
    wanted["spec"]["devices"]["requests"][0]["exactly"]["tolerations"] = TOLERATED
    documents, published = [wanted, pod("machine", "machine", node=passing)], set(clean.devices(passing))
    clean.apply(*documents)
    clean.wait_running("machine")
    (result,) = clean.get("resourceclaim", "machine")["status"]["allocation"]["devices"]["results"]
    number = int(str(result["device"]).rpartition("-")[2])
    uuid = str(clean.devices(passing)[f"gpu-{number}"]["attributes"]["uuid"]["string"])
    address = address_of(clean, passing, number)
    holder = Holder(uuid, result["device"], "machine", "machine")
    clean.restart_driver(passing)  # it reports once in five minutes
    surfaces = Surfaces(clean, passing)
    try:
        clean.wait("all is well", lambda: surfaces.all_well([holder]))
        lost = FaultyDevice(
            "lost while a machine has it", holder, (ExpectedFault("gpu-lost", "", "NoExecute"),), time.time()
        )
        clean.run(passing, "accelerator-simulator", "unplug", address)
        seen = surfaces.wait_seen([lost])
        ended = time.time()
        clean.run(passing, "accelerator-simulator", "plug", address)
        gone = surfaces.wait_gone([lost], ended)
    finally:
        surfaces.close()
        clean.run(passing, "accelerator-simulator", "plug", address)
    times.add(lost, seen[lost.name], ended, gone[lost.name])
    assert clean.pod("machine")["status"]["phase"] == "Running"
    clean.wait(
        "NVML lists the GPU again", lambda: set(clean.devices(passing)) == published and listed(clean, passing) == 8
    )
    clean.delete(*reversed(documents))
    clean.wait("the GPU is back", lambda: listed(clean, passing) == 8)
    assert drivers(clean, passing) == {}


@pytest.fixture()
def killer(clean: Cluster, passing: str) -> Iterator[Killer]:
    made = Killer(clean, passing)
    yield made
    if made.armed:
        made.disarm()


@pytest.mark.parametrize(
    ("prepare", "unprepare"),
    [
        ("recorded-preparing", "unprepare-started"),
        ("settings-applied", "taken-back"),
        ("handed-over", "settings-restored"),
        ("cdi-written", "cdi-removed"),
        ("recorded-prepared", "record-removed"),
    ],
)
def test_killed_at_a_stage(killer: Killer, prepare: str, unprepare: str) -> None:
    cluster, node = killer.cluster, killer.node
    documents = killer.documents("machine", CLASS)
    killer.arm(prepare)
    cluster.apply(*documents)
    killer.wait_killed()
    killer.disarm()
    cluster.wait_running("machine", timeout=240)
    assert listed(cluster, node) == 7
    killer.arm(unprepare)
    killer.delete(documents)
    killer.wait_killed()
    killer.disarm()
    killer.wait_nothing_left("machine")
    assert listed(cluster, node) == 8 and drivers(cluster, node) == {}
