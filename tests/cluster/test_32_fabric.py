# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test partitions of the NVSwitch fabric: a pair of GPUs is connected for its claim, and others are not.

The fabric manager of one node runs in shared-NVSwitch mode during these tests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import EXAMPLES, Cluster
from tests.cluster.killer import Killer
from tests.cluster.machines import drivers, listed
from tests.cluster.manifests import claim, pod

SOCKET = "/run/nvidia-fabricmanager/socket"
CONFIGURATION = "/usr/share/nvidia/nvswitch/fabricmanager.cfg"
START = "systemd-run --unit=nvidia-fabricmanager --collect accelerator-simulator fabric-manager"
LIST = f"""python3 -c 'import socket; each = socket.socket(socket.AF_UNIX); each.connect("{SOCKET}"); each.sendall(b"list\\n")
each.shutdown(socket.SHUT_WR)
print(each.makefile().read())'"""


def active(cluster: Cluster, node: str) -> list[int]:
    """Return the active partitions of a node's fabric manager."""
    rows = [line.split() for line in cluster.shell(node, LIST).splitlines()]
    return [int(row[1]) for row in rows if row and row[0] == "partition" and row[2] == "1"]


def module_of(cluster: Cluster, node: str, name: str) -> Any:
    published = cluster.devices(node).get(name, {"attributes": {}})
    return published["attributes"].get("gpuModuleID", {}).get("int")


@pytest.fixture(scope="module")
def fabric(cluster: Cluster) -> Iterator[str]:
    """Yield a node whose fabric manager has partitions."""
    node = cluster.nodes()[0]
    cluster.shell(
        node,
        f"mkdir -p $(dirname {CONFIGURATION}) && printf 'FABRIC_MODE=1\\nFM_CMD_UNIX_SOCKET_PATH={SOCKET}\\n' > {CONFIGURATION} && {START}",
    )
    try:
        cluster.wait(
            "the fabric manager listens", lambda: cluster.shell(node, f"test -S {SOCKET} && echo yes", check=False)
        )
        cluster.restart_driver(node)
        cluster.wait("partitions are published", lambda: module_of(cluster, node, "gpu-1") == 2)
        yield node
    finally:
        cluster.shell(
            node, f"systemctl stop nvidia-fabricmanager; rm -rf $(dirname {CONFIGURATION}) {SOCKET}", check=False
        )
        cluster.restart_driver(node)
        cluster.wait("no partitions are published", lambda: module_of(cluster, node, "gpu-1") is None)


def on_node(manifest: str, node: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the documents of an example with the pod on a node."""
    import yaml

    (wanted, container) = yaml.safe_load((EXAMPLES / manifest).read_text())["items"]
    container["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    for request in wanted["spec"]["devices"]["requests"]:
        request["exactly"].update(changes)
    return [wanted, container]


def test_pair_is_connected_for_its_claim(clean: Cluster, fabric: str) -> None:
    answer = clean.devices(fabric)["gpu-2"]["attributes"]
    assert {name: answer[name]["int"] for name in ("partition1", "partition2", "partition4", "partition8")} == {
        "partition1": 10,
        "partition2": 5,
        "partition4": 2,
        "partition8": 1,
    }
    documents = on_node("fabric-partition.yaml", fabric)
    clean.apply(*documents)
    clean.wait_running("fabric-partition")
    results = clean.get("resourceclaim", "fabric-partition")["status"]["allocation"]["devices"]["results"]
    names = [result["device"] for result in results]
    pairs = {clean.devices(fabric)[name]["attributes"]["partition2"]["int"] for name in names}
    assert len(names) == 2 and active(clean, fabric) == sorted(pairs)
    assert clean.log("fabric-partition").count("GPU ") == 2
    assert SOCKET not in clean.kubectl("exec", "fabric-partition", "--", "cat", "/proc/self/mountinfo")
    clean.delete(*reversed(documents))
    clean.wait("the partition is deactivated", lambda: active(clean, fabric) == [])


def test_gpus_without_a_common_partition_are_rejected_with_the_list(clean: Cluster, fabric: str) -> None:
    expression = "device.attributes['gpu.nvidia.com'].gpuModuleID in [2, 3]"
    wanted = claim("apart", device_class="gpu.nvidia.com", expression=expression)
    wanted["spec"]["devices"]["requests"][0]["exactly"]["count"] = 2
    documents = [wanted, pod("apart", "apart", node=fabric)]
    clean.apply(*documents)

    def rejection() -> str:
        text = " ".join(clean.kubectl("get", "events", "-o", "yaml").split())
        return text if "no partition of the NVSwitch fabric has exactly these GPUs" in text else ""

    said = clean.wait("the rejection as an Event", rejection)
    assert "4 has modules 1, 2" in said and active(clean, fabric) == []
    clean.delete(*reversed(documents))


def test_two_claims_have_separate_partitions(clean: Cluster, fabric: str) -> None:
    documents = []
    for number in (1, 2):
        pair = on_node("fabric-partition.yaml", fabric)
        for document in pair:
            document["metadata"]["name"] = f"pair-{number}"
        pair[1]["spec"]["resourceClaims"][0]["resourceClaimName"] = f"pair-{number}"
        documents.append(pair)
        clean.apply(*pair)
    clean.wait_running("pair-1", "pair-2")
    assert len(active(clean, fabric)) == 2
    clean.delete(*reversed(documents[0]))
    clean.wait("one partition is left", lambda: len(active(clean, fabric)) == 1)
    clean.restart_driver(fabric)
    assert len(active(clean, fabric)) == 1
    clean.delete(*reversed(documents[1]))
    clean.wait("no partition is left", lambda: active(clean, fabric) == [])


def inactive_partitions(cluster: Cluster) -> int:
    """Return how many Events report an inactive partition."""
    text = " ".join(cluster.kubectl("get", "events", "-A", "-o", "yaml").split())
    return text.count("of the fabric is not active any more")


def test_restart_of_fabric_manager_is_reported_and_partition_activated_again(clean: Cluster, fabric: str) -> None:
    documents = on_node("fabric-partition.yaml", fabric)
    clean.apply(*documents)
    clean.wait_running("fabric-partition")
    connected, reported = active(clean, fabric), inactive_partitions(clean)
    clean.shell(fabric, "systemctl restart nvidia-fabricmanager")
    clean.wait("the restart is reported", lambda: inactive_partitions(clean) > reported)
    clean.wait("the partition is active again", lambda: active(clean, fabric) == connected)
    clean.delete(*reversed(documents))
    clean.wait("the partition is deactivated", lambda: active(clean, fabric) == [])


def test_restarted_fabric_manager_gets_the_active_partitions(clean: Cluster, fabric: str) -> None:
    clean.shell(fabric, f"echo FABRIC_MODE_RESTART=1 >> {CONFIGURATION} && systemctl restart nvidia-fabricmanager")
    try:
        clean.wait("it has started", lambda: "partition" in clean.shell(fabric, LIST, check=False))
        documents = on_node("fabric-partition.yaml", fabric)
        clean.apply(*documents)
        clean.wait_running("fabric-partition")
        connected, reported = active(clean, fabric), inactive_partitions(clean)
        assert len(connected) == 1
        clean.shell(fabric, "systemctl restart nvidia-fabricmanager")
        clean.wait("it has the list", lambda: "partition" in clean.shell(fabric, LIST, check=False))
        assert active(clean, fabric) == connected and inactive_partitions(clean) == reported
        clean.delete(*reversed(documents))
        clean.wait("the partition is deactivated", lambda: active(clean, fabric) == [])
    finally:
        clean.shell(
            fabric,
            f"sed -i /FABRIC_MODE_RESTART/d {CONFIGURATION}; rm -f /tmp/fabricmanager.state; systemctl restart nvidia-fabricmanager",
        )
        clean.wait("it has started", lambda: "partition" in clean.shell(fabric, LIST, check=False))


@pytest.mark.prove
@pytest.mark.parametrize("stage", ["settings-applied", "fabric-activated", "cdi-written"])
def test_killed_driver_leaves_no_partition_active(clean: Cluster, fabric: str, stage: str) -> None:
    killer = Killer(clean, fabric)
    documents = on_node("fabric-partition.yaml", fabric)
    killer.arm(stage)
    try:
        clean.apply(*documents)
        killer.wait_killed()
    finally:
        killer.disarm()
    clean.wait_running("fabric-partition", timeout=240)
    assert len(active(clean, fabric)) == 1
    killer.arm("fabric-deactivated")
    try:
        killer.delete(documents)
        killer.wait_killed()
    finally:
        killer.disarm()
    killer.wait_nothing_left("fabric-partition")
    assert active(clean, fabric) == []


@pytest.mark.prove
def test_virtual_machine_gets_a_pair(clean: Cluster, fabric: str) -> None:
    """The claim has the form of NVIDIA's manifest for two passthrough GPUs of one partition."""
    rules = [{"match": {}, "mode": "dynamic", "passthrough": True}]
    only = ("site.yml", "--limit", fabric, "--tags", "layout")
    change = json.dumps({"accelerator_layouts": [{"hosts": fabric, "layout": rules}]})
    changed = clean.playbook(*only, "-e", change)
    assert changed.failed == 0, changed.output
    try:
        clean.wait("GPUs are offered to virtual machines", lambda: "gpu-vfio-7" in clean.devices(fabric))
        documents = on_node("fabric-partition.yaml", fabric, deviceClassName="vfio.gpu.nvidia.com")
        documents[1]["spec"]["containers"][0]["command"] = ["sh", "-c", "sleep 3600"]
        documents[0]["spec"]["devices"]["config"] = [
            {
                "requests": ["gpus"],
                "opaque": {
                    "driver": "gpu.nvidia.com",
                    "parameters": {
                        "apiVersion": "resource.nvidia.com/v1beta1",
                        "kind": "VfioDeviceConfig",
                        "iommu": {"backendPolicy": "LegacyOnly", "enableAPIDevice": True},
                    },
                },
            }
        ]
        clean.apply(*documents)
        clean.wait_running("fabric-partition")
        assert len(active(clean, fabric)) == 1 and len(drivers(clean, fabric)) == 2
        clean.delete(*reversed(documents))
        clean.wait("the GPUs are back", lambda: listed(clean, fabric) == 8 and active(clean, fabric) == [])
    finally:
        back = clean.playbook(*only)
        assert back.failed == 0, back.output
