# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""What a layout offers of whole GPUs.

One that several claims have at a time: counted by the scheduler, enforced by MPS, and whole again afterwards. And one for a virtual
machine: bound to vfio-pci meanwhile, unknown to NVML, and back afterwards.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.cluster.cluster import EXAMPLES, Cluster, Recap
from tests.cluster.machines import drivers, generations, listed
from tests.cluster.manifests import claim, pod
from tests.cluster.test_28_mps import OUT_OF_MEMORY, computing, daemons, modes, printed, told

CLASS = "gpu-share.example.com"


@pytest.fixture(scope="module")
def sharing(cluster: Cluster, other_layout: Recap) -> str:
    """The second node, whose GPU 7 four claims share."""
    assert other_layout.failed == 0, other_layout.output
    node = cluster.nodes()[1]
    cluster.wait("GPU 7 is offered in shares", lambda: "shares" in offered(cluster, node).get("capacity", {}))
    return node


def offered(cluster: Cluster, node: str) -> dict[str, Any]:
    """The GPU 7 of a node as it is published."""
    return cluster.devices(node).get("gpu-7", {})


def documents() -> dict[str, dict[str, Any]]:
    """The example's objects, by kind and name."""
    items = yaml.safe_load((EXAMPLES / "shares.yaml").read_text(encoding="utf-8"))["items"]
    return {f"{item['kind']}/{item['metadata']['name']}": item for item in items}


def test_a_layout_is_changed_by_its_tag_alone(cluster: Cluster, other_layout: Recap) -> None:
    """The GPU is whole afterwards, and so is what the driver publishes: it was told the rules as well."""
    assert other_layout.failed == 0 and other_layout.changed > 0, other_layout.output
    assert ": Name the release of the node programs]" not in other_layout.output
    node = cluster.nodes()[1]
    cluster.wait("GPU 7 is offered whole alone", lambda: len(cluster.devices(node)) == 7 * 26 + 1 + 2)


def test_claims_share_a_gpu_and_each_has_what_it_consumes(clean: Cluster, sharing: str) -> None:
    example = EXAMPLES / "shares.yaml"
    clean.apply(example)
    names = ("share-of-20", "share-by-default")
    clean.wait_running(*names)
    results = [clean.get("resourceclaim", name)["status"]["allocation"]["devices"]["results"][0] for name in names]
    assert {result["device"] for result in results} == {"gpu-7"}
    assert len({result["shareID"] for result in results}) == 2
    given = {}
    for name in names:
        given[name] = [line for line in printed(clean, name, "G\n").splitlines() if line[0].isdigit()]
    # 20 GiB and half of 132 multiprocessors; a quarter of each, of which the daemon shows whole GiB.
    assert given == {"share-of-20": ["50.0", "20G"], "share-by-default": ["25.0", "19G"]}
    assert len(daemons(clean, sharing)) == 2 and set(modes(clean, sharing)) == {"Default"}
    clean.delete(example)
    assert clean.companions(sharing) == []


def test_no_more_is_given_away_than_there_is_and_processes_are_held_to_it(clean: Cluster, sharing: str) -> None:
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
    small, large = told(clean, "small"), told(clean, "large")
    assert (small["context"], small["within"], small["beyond"], small["memory"]) == (0, 0, OUT_OF_MEMORY, 2048)
    assert (large["context"], large["within"], large["beyond"], large["memory"]) == (0, 0, 0, 70 * 1024)
    # 12 of 132 are 9 percent, and that is 12 again in whole multiprocessors.
    assert small["multiprocessors"] == large["multiprocessors"] == 12
    clean.apply(*wanted["late"])
    clean.wait("the scheduler says why", lambda: "Unschedulable" in json.dumps(clean.pod("late")["status"]))
    clean.delete(*reversed(wanted["large"]))
    clean.wait_running("late")
    assert told(clean, "late")["memory"] == 20 * 1024
    clean.delete(*reversed(wanted["late"]), *reversed(wanted["small"]), found[f"DeviceClass/{CLASS}"])
    assert clean.companions(sharing) == []


@pytest.mark.prove
def test_a_share_outlives_the_driver_and_another_claim_s_end(clean: Cluster, sharing: str) -> None:
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


def test_a_gpu_goes_to_a_virtual_machine_and_comes_back(clean: Cluster, sharing: str) -> None:
    example, before = EXAMPLES / "vfio.yaml", generations(clean, sharing)
    clean.apply(example)
    clean.wait_running("vfio")
    (result,) = clean.get("resourceclaim", "vfio")["status"]["allocation"]["devices"]["results"]
    assert result["device"] in {"gpu-vfio-5", "gpu-vfio-6"} and result["pool"] == sharing
    inside = clean.wait("what the pod may open", lambda: clean.log("vfio")).split()
    address, _driver = drivers(clean, sharing).popitem()
    group = clean.run(sharing, "readlink", f"/sys/bus/pci/devices/{address}/iommu_group").strip().rpartition("/")[2]
    assert sorted(inside) == sorted([f"/dev/vfio/{group}", "/dev/vfio/vfio"])
    assert drivers(clean, sharing) == {address: "vfio-pci vfio-pci"} and listed(clean, sharing) == 7
    assert generations(clean, sharing) == before
    clean.delete(example)
    clean.wait("the GPU is back", lambda: listed(clean, sharing) == 8)
    assert drivers(clean, sharing) == {} and generations(clean, sharing) == before
