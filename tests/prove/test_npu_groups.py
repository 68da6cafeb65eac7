# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test a node with four cards of two Ascend 310P each: both chips of a card as one device, next to single chips."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import EXAMPLES, Recap
from tests.cluster.manifests import claim, pod
from tests.cluster.npus import NpuCluster

EXAMPLE = "ascend/card-pair.yaml"
DYNAMIC = [{"hosts": "accelerator_nodes", "layout": [{"match": {}, "mode": "dynamic"}]}]
CARD, NODE = "card.npu.huawei.com", "node.npu.huawei.com"
OF = "device.attributes['npu.huawei.com']"


@pytest.fixture(scope="module")
def duo() -> Iterator[NpuCluster]:
    """Yield one bare node with four cards."""
    made = NpuCluster("duo", {"accelerator_layouts": DYNAMIC})
    made.world("down")
    made.world("up", "--nodes", "1", "--silicon", "4x300I-Duo", timeout=3000)
    yield made
    made.world("down")


@pytest.fixture(scope="module")
def site(duo: NpuCluster) -> Recap:
    """Run the site playbook."""
    return duo.playbook("site.yml")


def given(duo: NpuCluster, name: str) -> list[str]:
    """Return the devices that are allocated to a claim."""
    status: dict[str, Any] = duo.get("resourceclaim", name, "-n", "default").get("status", {})
    return [each["device"] for each in status.get("allocation", {}).get("devices", {}).get("results", [])]


def waits(duo: NpuCluster, name: str) -> bool:
    conditions = duo.pod(name)["status"].get("conditions", [])
    return any(each.get("reason") == "Unschedulable" for each in conditions)


def ask(duo: NpuCluster, title: str, device_class: str, expression: str | None = None) -> None:
    duo.apply(claim(title, device_class=device_class, expression=expression), pod(title, title))


def clear(duo: NpuCluster) -> None:
    duo.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    (node,) = duo.nodes()
    duo.wait("no claim is left on the node", lambda: not duo.cdi_files(node) and not duo.instances(node))


def test_cards_and_the_node_are_published_after_their_chips(duo: NpuCluster, site: Recap) -> None:
    assert not site.failed, site.output
    (node,) = duo.nodes()
    found = duo.devices(node)
    groups = [name for name, device in found.items() if device["attributes"]["type"]["string"] == "npu-group"]
    assert groups == ["npu-card-6", "npu-card-4", "npu-card-2", "npu-card-0", "npu-node"]
    assert list(found)[-len(groups) :] == groups
    assert {f"npu-{number}" for number in range(8)} < set(found)


def test_a_pod_with_a_card_sees_both_of_its_chips_and_no_other(duo: NpuCluster, site: Recap) -> None:
    assert not site.failed
    duo.apply(EXAMPLES / EXAMPLE)
    duo.wait_running("card-pair")
    assert given(duo, "card-pair") == ["npu-card-6"]
    text = duo.wait("the pod printing its chips", lambda: duo.log("card-pair"), timeout=60)
    assert re.findall(r"^\| \d+ +(310P\w+) +\| OK ", text, re.MULTILINE) == ["310P3", "310P3"], text
    (entry,) = duo.wait(
        "the claim's status", lambda: duo.get("resourceclaim", "card-pair", "-n", "default")["status"].get("devices")
    )
    assert len(entry["data"]["uuids"]) == 2 and entry["data"]["physicIds"] == "6,7"
    clear(duo)


def test_card_with_an_allocated_chip_is_not_allocated(duo: NpuCluster, site: Recap) -> None:
    """Claims use one chip of each of two cards: two whole cards are left, the third claim waits and is allocated when
    a card is free.
    """
    assert not site.failed
    ask(duo, "chip", "npu.huawei.com", f"{OF}.physicId == 7")
    ask(duo, "half", "npu.huawei.com", f"{OF}.physicId == 4")
    duo.wait_running("chip", "half")
    for number in range(3):
        ask(duo, f"card-{number}", CARD)
        if number < 2:
            duo.wait_running(f"card-{number}")
    assert [given(duo, f"card-{number}") for number in range(2)] == [["npu-card-2"], ["npu-card-0"]]
    duo.wait("the third claim waits", lambda: waits(duo, "card-2"), timeout=60)
    ask(duo, "other", "npu.huawei.com", f"{OF}.physicId == 0")
    duo.wait("a claim for a chip of an allocated card waits", lambda: waits(duo, "other"), timeout=60)
    duo.kubectl("delete", "pod/half", "resourceclaim/half", "-n", "default", "--timeout=120s", timeout=180)
    duo.wait_running("card-2")
    assert given(duo, "card-2") == ["npu-card-4"]
    clear(duo)


def test_pod_with_the_whole_node_excludes_other_pods(duo: NpuCluster, site: Recap) -> None:
    assert not site.failed
    ask(duo, "everything", NODE)
    duo.wait_running("everything")
    assert given(duo, "everything") == ["npu-node"]
    ask(duo, "none-left", "npu.huawei.com")
    duo.wait("a chip waits", lambda: waits(duo, "none-left"), timeout=60)
    clear(duo)
