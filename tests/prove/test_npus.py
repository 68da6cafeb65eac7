# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test nodes with Ascend NPUs: whole chips, static vNPUs of the layout, dynamic vNPUs, and chips that are near each
other.

The first node has eight 310P, the second four cards of two, the third two rings of four 910A.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import EXAMPLES, Recap
from tests.cluster.manifests import claim, pod
from tests.cluster.npus import NpuCluster

#: Each example with its pods, and the names of chips or vNPUs that the containers show.
SEEN = {
    "ascend/whole-npu.yaml": {"whole-npu": ["310P3|910"]},
    "ascend/static-vnpu.yaml": {"static-vir04": ["310Pvir04"]},
    "ascend/two-dynamic-vnpus.yaml": {"dynamic-quarter": ["310Pvir02"], "dynamic-by-memory": [r"310Pvir04\w*"]},
    "ascend/near-npus.yaml": {"near-npus": ["310P3|910", "310P3|910"]},
    "ascend/same-card-pair.yaml": {"same-card-pair": ["310P3"] * 2},
    "ascend/same-ring-four.yaml": {"same-ring-four": ["910"] * 4},
    "ascend/any-npu-by-memory.yaml": {"any-npu": [r"310Pvir04\w*|310P3|910"]},
    "ascend/vnpu-config.yaml": {"vnpu-config": ["310Pvir01"]},
    "ascend/npu-extended-resource.yaml": {"npu-extended-resource": ["310P3"]},
}
#: Number of consecutive card numbers that form a group, for pods whose devices must be near each other.
NEAR = {"ascend/same-card-pair.yaml": 1, "ascend/same-ring-four.yaml": 4}
UNFIT = "ascend/npu-does-not-fit.yaml"
LAYOUT = ["vir02", "vir04"]
MACHINES = "8x310P-Pro,4x300I-Duo,8x910A"
WORLD = os.environ.get("DRA_ACCELERATORS_NPUS_WORLD", "npus")


@pytest.fixture(scope="module")
def npus() -> Iterator[NpuCluster]:
    """Yield three bare nodes with NPUs."""
    made = NpuCluster(WORLD)
    made.world("down")
    made.world("up", "--nodes", "3", "--silicon", MACHINES, timeout=3000)
    yield made
    made.world("down")


@pytest.fixture(scope="module")
def first(npus: NpuCluster) -> Recap:
    """Run the site playbook for the first time."""
    return npus.playbook("site.yml")


def templates(npus: NpuCluster) -> list[str]:
    """Return the templates of all vNPUs. Only the first node has any."""
    return sorted(line.split()[2] for node in npus.nodes() for line in npus.instances(node))


def has_only_its_layout(npus: NpuCluster) -> bool:
    """Return whether the nodes have only the layout's vNPUs, and no CDI file of a claim."""
    return templates(npus) == LAYOUT and not any(map(npus.cdi_files, npus.nodes()))


def seen_by(npus: NpuCluster, pod: str) -> list[tuple[int, str]]:
    """Return card number and name of all devices that a pod's npu-smi lists."""
    text = npus.wait(f"{pod} printing its devices", lambda: npus.log(pod), timeout=60)
    found = re.findall(r"^\| (\d+) +((?:310P|910)\w*) +\| OK ", text, re.MULTILINE)
    return [(int(number), name) for number, name in found]


def test_playbook_installs_everything_and_second_run_changes_nothing(npus: NpuCluster, first: Recap) -> None:
    assert not first.failed, first.output
    assert templates(npus) == LAYOUT
    again = npus.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output


@pytest.mark.parametrize("example", SEEN)
def test_pod_sees_only_its_claimed_devices(npus: NpuCluster, first: Recap, example: str) -> None:
    assert not first.failed
    pods = SEEN[example]
    npus.apply(EXAMPLES / example)
    npus.wait_running(*pods)
    for each, names in pods.items():
        seen = seen_by(npus, each)
        assert len(seen) == len(names), (each, seen)
        assert all(re.fullmatch(name, found) for name, (_card, found) in zip(names, seen, strict=True)), (each, seen)
        if example in NEAR:
            assert len({card // NEAR[example] for card, _name in seen}) == 1, (each, seen)
    npus.delete(EXAMPLES / example)
    npus.wait("the nodes have only their layout", lambda: has_only_its_layout(npus))


def test_containers_get_the_network_port_files_on_request(npus: NpuCluster, first: Recap) -> None:
    assert not first.failed
    before = npus.variables
    npus.variables = {**before, "dra_driver_network_tools": ["ascend"]}
    changed = npus.playbook("site.yml")
    assert not changed.failed, changed.output
    npus.apply(EXAMPLES / "ascend/network-ports.yaml")
    npus.wait_running("network-ports")
    text = npus.wait("the addresses of a port", lambda: npus.log("network-ports"), timeout=60)
    assert "address_0=" in text and "ipaddr:" in text, text
    npus.delete(EXAMPLES / "ascend/network-ports.yaml")
    npus.variables = before
    assert not npus.playbook("site.yml").failed


def test_claim_that_cannot_fit_waits_with_a_reason(npus: NpuCluster, first: Recap) -> None:
    assert not first.failed
    npus.apply(EXAMPLES / UNFIT)

    def reason() -> str:
        conditions = npus.pod("npu-does-not-fit")["status"].get("conditions", [])
        return next((str(each["message"]) for each in conditions if each.get("reason") == "Unschedulable"), "")

    assert "cannot allocate all claims" in npus.wait("the scheduler's reason", reason, timeout=60)
    npus.delete(EXAMPLES / UNFIT)


def test_pods_and_layout_are_restored_after_a_power_failure(npus: NpuCluster, first: Recap) -> None:
    """The vendor's driver restores every vNPU, including those of claims. The node driver knows which ones belong to
    claims.
    """
    assert not first.failed
    node = npus.nodes()[0]
    slices = {"quarter": "ascend-310p-1-4", "half": "ascend-310p-1-2"}
    for name, device_class in slices.items():
        not_yet = "!has(device.attributes['npu.huawei.com'].uuid)"
        npus.apply(claim(name, device_class=device_class, expression=not_yet), pod(name, name, restart="Always"))
    npus.wait_running(*slices)
    held = templates(npus)
    assert len(held) == len(LAYOUT) + len(slices)
    npus.world("reboot", node, "--hard")
    npus.wait_registered(node)
    npus.wait_running(*slices)
    assert templates(npus) == held
    npus.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    npus.wait("the nodes have only their layout", lambda: has_only_its_layout(npus))
