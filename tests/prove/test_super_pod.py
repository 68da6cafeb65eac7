# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test two servers of a super-pod: their labels, a job on both of them, and claims that keep modules and nodes whole."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from typing import Any

import pytest
from dra_driver.core.vendors.ascend.preference import claim_spec

from tests.cluster.cluster import EXAMPLES, Recap
from tests.cluster.manifests import pod
from tests.cluster.npus import NpuCluster

WORLD = os.environ.get("DRA_ACCELERATORS_SUPER_POD_WORLD", "superpod")
KEPT = os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
JOB = "ascend/super-pod-job.yaml"
ANNOTATION = "dra-accelerators/labels"
MACHINES = "8xA3,8xA3"
WHOLE = [{"hosts": "accelerator_nodes", "layout": [{"match": {}, "mode": "whole"}]}]


@pytest.fixture(scope="module")
def npus() -> Iterator[NpuCluster]:
    """Yield two bare nodes with eight modules of two dies."""
    made = NpuCluster(WORLD, {"accelerator_layouts": WHOLE})
    if not KEPT:
        made.world("down")
    made.world("up", "--nodes", "2", "--silicon", MACHINES, timeout=3000)
    yield made
    if not KEPT:
        made.world("down")


@pytest.fixture(scope="module")
def first(npus: NpuCluster) -> Recap:
    """Run the site playbook for the first time."""
    return npus.playbook("site.yml")


def metadata(npus: NpuCluster, node: str) -> dict[str, Any]:
    found: dict[str, Any] = npus.get("node", node)["metadata"]
    return found


def topology(npus: NpuCluster, node: str) -> dict[str, str]:
    """Return the labels of a Node with its position."""
    labels = metadata(npus, node)["labels"]
    return {name.rpartition(".")[2]: value for name, value in labels.items() if "/topotree." in name}


def attributes(npus: NpuCluster, node: str) -> dict[int, dict[str, Any]]:
    """Return the attributes of a node's chips, by physical ID."""
    found = {}
    for name, device in npus.devices(node).items():
        if re.fullmatch(r"npu-[0-9]+", name):  # groups and vNPUs have other names
            said = {key: next(iter(value.values())) for key, value in device["attributes"].items()}
            found[int(name.rpartition("-")[2])] = said
    return found


def one_chip(name: str) -> dict[str, Any]:
    """Return a claim for one chip that breaks up as few groups as possible."""
    return {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {"name": name, "namespace": "default"},
        "spec": claim_spec(1, "npu.huawei.com"),
    }


def test_nodes_report_their_super_pod_position(npus: NpuCluster, first: Recap) -> None:
    assert not first.failed, first.output
    for number, node in enumerate(npus.nodes()):
        assert topology(npus, node) == {"superpodid": "1", "serverid": str(number)}
        assert metadata(npus, node)["labels"]["huawei.com/npu.chip.memory"] == "64G"
        said = attributes(npus, node)
        assert len(said) == 16 and {(each["superPodID"], each["serverID"]) for each in said.values()} == {(1, number)}
        assert said[15]["sdid"] == number << 22 | 7 << 18 | 1 << 16 | 15
        assert (said[0]["cardFree"], said[0]["ringFree"], said[0]["ringChips"]) == (2, 16, 16)
    again = npus.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output


def test_job_gets_two_servers_of_one_super_pod(npus: NpuCluster, first: Recap) -> None:
    assert not first.failed
    npus.apply(EXAMPLES / JOB)

    def ended() -> bool:
        return npus.get("job", "super-pod-job")["status"].get("succeeded", 0) == 2

    npus.wait("both pods of the job having ended", ended, timeout=180)
    pods = npus.get("pods", "-l", "app=super-pod-job")["items"]
    assert {each["spec"]["nodeName"] for each in pods} == set(npus.nodes())
    for each in pods:
        answer = npus.log(each["metadata"]["name"])
        number = npus.nodes().index(each["spec"]["nodeName"])
        lines = {
            key.strip(): value.strip() for key, _colon, value in (line.partition(" : ") for line in answer.splitlines())
        }
        assert (lines["Super Pod ID"], lines["Server Index"]) == ("1", str(number)), answer
    npus.delete(EXAMPLES / JOB)


def test_single_die_claims_use_as_few_modules_and_nodes_as_possible(npus: NpuCluster, first: Recap) -> None:
    """Six claims for one die each: the second die of a module is allocated after the first, and all are on one node."""
    assert not first.failed
    names = [f"one-{number}" for number in range(6)]
    for number, name in enumerate(names):
        npus.apply(one_chip(name), pod(name, name, restart="Always"))
        npus.wait_running(name)
        here = str(npus.pod(name)["spec"]["nodeName"])

        def answer(node: str = here, taken: int = number + 1) -> bool:
            return attributes(npus, node)[0]["ringFree"] == 16 - taken

        npus.wait("the published number of free chips", answer, timeout=30)
    assert len({npus.pod(name)["spec"]["nodeName"] for name in names}) == 1
    said = attributes(npus, npus.pod(names[0])["spec"]["nodeName"])
    assert sorted(each["cardFree"] for each in said.values()) == [0] * 6 + [2] * 10
    npus.delete(*(pod(each, each) for each in names))
    npus.delete(*(one_chip(name) for name in names))


def test_labels_are_removed_with_the_driver(npus: NpuCluster, first: Recap) -> None:
    assert not first.failed
    done = npus.playbook("remove.yml")
    assert not done.failed, done.output
    for node in npus.nodes():
        assert not topology(npus, node) and ANNOTATION not in metadata(npus, node).get("annotations", {})
