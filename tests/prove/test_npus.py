# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A node with eight Ascend 310P: whole chips, slices that the layout holds ready, and slices that are cut for a claim."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import EXAMPLES, Recap
from tests.cluster.manifests import claim, pod
from tests.cluster.npus import NpuCluster

#: Each example with its pods, and the names that chips or slices have for who is in them.
SEEN = {
    "ascend/whole-npu.yaml": {"whole-npu": ["310P3"]},
    "ascend/static-vnpu.yaml": {"static-vir04": ["310Pvir04"]},
    "ascend/two-dynamic-vnpus.yaml": {"dynamic-quarter": ["310Pvir02"], "dynamic-by-memory": [r"310Pvir04\w*"]},
    "ascend/near-npus.yaml": {"near-npus": ["310P3", "310P3"]},
    "ascend/any-npu-by-memory.yaml": {"any-npu": [r"310Pvir04\w*|310P3"]},
    "ascend/vnpu-config.yaml": {"vnpu-config": ["310Pvir01"]},
    "ascend/npu-extended-resource.yaml": {"npu-extended-resource": ["310P3"]},
}
UNFIT = "ascend/npu-does-not-fit.yaml"
LAYOUT = ["vir02", "vir04"]


@pytest.fixture(scope="module")
def npus() -> Iterator[NpuCluster]:
    """One bare node with eight NPUs."""
    made = NpuCluster("npus")
    made.world("down")
    made.world("up", "--nodes", "1", "--silicon", "8x310P-Pro", timeout=3000)
    yield made
    made.world("down")


@pytest.fixture(scope="module")
def first(npus: NpuCluster) -> Recap:
    """The site playbook's first run."""
    return npus.playbook("site.yml")


def templates(npus: NpuCluster) -> list[str]:
    """The templates of the node's slices."""
    (node,) = npus.nodes()
    return sorted(line.split()[2] for line in npus.instances(node))


def as_the_layout_says(npus: NpuCluster) -> bool:
    """Whether the node has the layout's slices alone, and no CDI file of a claim."""
    (node,) = npus.nodes()
    return templates(npus) == LAYOUT and not npus.cdi_files(node)


def names_seen(npus: NpuCluster, pod: str) -> list[str]:
    """The names of all that a pod's own npu-smi lists."""
    text = npus.wait(f"{pod} printing its devices", lambda: npus.log(pod), timeout=60)
    return re.findall(r"^\| \d+ +(310P\w+) +\| OK ", text, re.MULTILINE)


def test_the_playbook_installs_everything_and_its_second_run_changes_nothing(npus: NpuCluster, first: Recap) -> None:
    assert not first.failed, first.output
    assert templates(npus) == LAYOUT
    again = npus.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output


@pytest.mark.parametrize("example", SEEN)
def test_a_pod_sees_what_it_has_claimed_and_nothing_else(npus: NpuCluster, first: Recap, example: str) -> None:
    assert not first.failed
    pods = SEEN[example]
    npus.apply(EXAMPLES / example)
    npus.wait_running(*pods)
    for each, names in pods.items():
        seen = names_seen(npus, each)
        assert len(seen) == len(names), (each, seen)
        assert all(re.fullmatch(name, found) for name, found in zip(names, seen, strict=True)), (each, seen)
    npus.delete(EXAMPLES / example)
    npus.wait("the node is as it was", lambda: as_the_layout_says(npus))


def test_a_claim_that_nothing_fits_waits_and_says_why(npus: NpuCluster, first: Recap) -> None:
    assert not first.failed
    npus.apply(EXAMPLES / UNFIT)

    def reason() -> str:
        conditions = npus.pod("npu-does-not-fit")["status"].get("conditions", [])
        return next((str(each["message"]) for each in conditions if each.get("reason") == "Unschedulable"), "")

    assert "cannot allocate all claims" in npus.wait("the scheduler's reason", reason, timeout=60)
    npus.delete(EXAMPLES / UNFIT)


def test_after_a_power_cut_pods_come_back_and_the_layout_stays(npus: NpuCluster, first: Recap) -> None:
    """The vendor's driver cuts every slice again, those of claims too; the node driver knows which are its own."""
    assert not first.failed
    (node,) = npus.nodes()
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
    npus.wait("the node is as it was", lambda: as_the_layout_says(npus))
