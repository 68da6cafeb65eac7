# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test NPU machines that no other world contains, each as one node: their devices are published and used by pods, and
a removal leaves nothing.

test_npus.py, test_npu_groups.py, and test_super_pod.py test eight 310P, cards with two chips, rings of 910A, and
super-pods of A3.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import ROOT, Recap
from tests.cluster.manifests import claim
from tests.cluster.npus import NpuCluster, npu_pod
from tests.prove import test_npus, test_super_pod

WORLD = os.environ.get("DRA_ACCELERATORS_NPU_MACHINES_WORLD", "npu-machines")
DYNAMIC = {"accelerator_layouts": [{"hosts": "accelerator_nodes", "layout": [{"match": {}, "mode": "dynamic"}]}]}


@dataclass(frozen=True)
class Story:
    """A machine's chip name and number of chips, its vNPU classes with the names in pods, and its groups with their
    sizes.
    """

    chip: str
    chips: int
    device_class: str
    slices: dict[str, str]
    groups: dict[str, int]


STORIES = {
    "8x910B3": Story(
        chip="910B3",
        chips=8,
        device_class="ascend-910b3",
        slices={"ascend-910b3-1-4": "910B3vir05_1c_16g", "ascend-910b3-1-2": "910B3vir10_3c_32g"},
        groups={"npu-ring-0": 8, "npu-node": 8},
    ),
    "8x910B4": Story(
        chip="910B4",
        chips=8,
        device_class="ascend-910b4",
        slices={"ascend-910b4-1-4": "910B4vir05_1c_8g", "ascend-910b4-1-2": "910B4vir10_3c_16g"},
        groups={"npu-node": 8},
    ),
    "16x910B": Story(
        chip="910B2C",
        chips=16,
        device_class="ascend-910b2c",
        slices={"ascend-910b2c-1-4": "910B2Cvir06_1c_16g", "ascend-910b2c-1-2": "910B2Cvir12_3c_32g"},
        groups={"npu-ring-0": 8, "npu-ring-8": 8, "npu-node": 16},
    ),
    "1x950": Story(chip="Ascend950PR", chips=1, device_class="ascend-950", slices={}, groups={}),
    "8x950-UB": Story(
        chip="Ascend950PR",
        chips=8,
        device_class="ascend-950",
        slices={},
        groups={"npu-ring-0": 8, "npu-node": 8},
    ),
}
MACHINES = list(STORIES)
#: Machines that differ from a tested one only in the names and tables of their boards. The simulator's tests cover
#: them.
VARIANTS = {"8x910A-16", "8x910A-30", "8x910B1", "8x910B2", "8x910B4-1", "8xA3-infer"}


@pytest.fixture(scope="module")
def npus() -> Iterator[NpuCluster]:
    """Yield bare nodes, each of another machine."""
    made = NpuCluster(WORLD, DYNAMIC)
    made.world("down")
    made.world("up", "--nodes", len(MACHINES), "--silicon", ",".join(MACHINES), timeout=3000)
    yield made
    made.world("down")


@pytest.fixture(scope="module")
def before(npus: NpuCluster) -> dict[str, str]:
    """Return the nodes' files and the API objects before the first run."""
    return npus.footprint()


@pytest.fixture(scope="module")
def first(npus: NpuCluster, before: dict[str, str]) -> Recap:
    """Run the site playbook for the first time."""
    assert before
    return npus.playbook("site.yml")


@pytest.fixture()
def nodes(npus: NpuCluster, first: Recap) -> Iterator[dict[str, str]]:
    """Yield the node of each machine; afterwards delete all pods and claims, and assert that nothing remains."""
    assert not first.failed, first.output
    names = npus.nodes()
    yield dict(zip(MACHINES, names, strict=True))
    clear(npus)
    for node in names:
        assert npus.cdi_files(node) == [] and npus.recorded(node) == {} and npus.kept_slices(node) == [], node


def clear(npus: NpuCluster) -> None:
    """Delete all pods and claims, and wait until no vNPU is left."""
    npus.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    npus.wait("no slice left", lambda: not any(map(npus.instances, npus.nodes())))


def ask(npus: NpuCluster, wanted: dict[str, tuple[str, str]]) -> dict[str, list[str]]:
    """Start a pod per entry, with its node and the class of its device; return the devices that each sees."""
    documents = []
    for name, (node, device_class) in wanted.items():
        documents += [claim(name, device_class=device_class), npu_pod(name, name, node=node)]
    npus.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(documents), timeout=300)
    npus.wait_running(*wanted, timeout=300)
    return {name: npus.shown_to(name) for name in wanted}


def given(npus: NpuCluster, name: str) -> str:
    """Return the device that is allocated to a claim."""
    (result,) = npus.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"]
    return str(result["device"])


def attribute(device: dict[str, Any], name: str) -> Any:
    """Return an attribute of a published device; None if it is missing."""
    return next(iter(device["attributes"].get(name, {"": None}).values()))


def test_every_npu_machine_is_tested() -> None:
    """Add a new machine to a world of these tests unless it is a variant."""
    elsewhere = {*test_npus.MACHINES.split(","), *test_super_pod.MACHINES.split(",")}
    described = {path.stem for path in (ROOT / "roles/simulator/files/ascend/machines").glob("*.json")}
    assert described == elsewhere | set(MACHINES) | VARIANTS


def test_each_machine_publishes_its_devices(npus: NpuCluster, nodes: dict[str, str]) -> None:
    def all_whole() -> bool:
        return all(types(npus, nodes[machine]).count("npu") == story.chips for machine, story in STORIES.items())

    npus.wait("all whole chips", all_whole)
    for machine, story in STORIES.items():
        found = npus.devices(nodes[machine]).items()
        groups = {name: attribute(each, "chips") for name, each in found if attribute(each, "type") == "npu-group"}
        assert groups == story.groups, machine
        assert ("vnpu" in types(npus, nodes[machine])) == bool(story.slices), machine


def types(npus: NpuCluster, node: str) -> list[str]:
    """Return the type of each device that a node publishes."""
    return [str(attribute(device, "type")) for device in npus.devices(node).values()]


def test_pods_get_chips_and_vnpus_of_one_node(npus: NpuCluster, nodes: dict[str, str]) -> None:
    wanted, expected = {}, {}
    for machine, story in STORIES.items():
        for number, (device_class, name) in enumerate({story.device_class: story.chip, **story.slices}.items()):
            pod = f"{machine.lower()}-{number}"
            wanted[pod], expected[pod] = (nodes[machine], device_class), [name]
    assert ask(npus, wanted) == expected
    for machine, story in STORIES.items():
        cut = sorted(line.split()[2] for line in npus.instances(nodes[machine]))
        assert cut == sorted(name.removeprefix(story.chip) for name in story.slices.values()), machine


@pytest.mark.parametrize("kind", ["ring", "node"])
def test_pod_gets_a_group_as_one_device(npus: NpuCluster, nodes: dict[str, str], kind: str) -> None:
    wanted, expected = {}, {}
    for machine, story in STORIES.items():
        sizes = [chips for name, chips in story.groups.items() if kind in name]
        if sizes:
            pod = f"{machine.lower()}-{kind}"
            wanted[pod], expected[pod] = (nodes[machine], f"{kind}.npu.huawei.com"), [story.chip] * sizes[0]
    assert ask(npus, wanted) == expected
    assert all(given(npus, pod).startswith(f"npu-{kind}") for pod in wanted)


def test_removal_leaves_nothing(npus: NpuCluster, before: dict[str, str], first: Recap) -> None:
    """The nodes' files and the API objects are the same as before the first run, except for the vendor's backup of its
    vNPU config.
    """
    assert not first.failed
    recap = npus.playbook("remove.yml", "-e", "accelerator_remove_reset_layout=true")
    assert not recap.failed, recap.output
    after = npus.footprint()
    keys = {key for key in before.keys() | after.keys() if not key.endswith("/etc/vnpu.cfg.bak")}
    difference = {key: (before.get(key), after.get(key)) for key in keys}
    assert {key: both for key, both in difference.items() if both[0] != both[1]} == {}
