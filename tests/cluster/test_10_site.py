# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that an Ansible run turns bare Kubernetes nodes into nodes with published, partitioned GPUs, and that a second
run changes nothing.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests.cluster.cluster import DRIVER, DRIVER_UNIT, Cluster, Recap
from tests.cluster.manifests import claim, dynamic, pod

# Maximum number of tasks per host, and for the one host that reads and changes the cluster for all of them.
MOST_TASKS, MOST_TASKS_OF_LEADER = 46, 73


def test_check_mode_on_bare_nodes_reports_changes_and_changes_nothing(
    world: Cluster, bare: bool, before: dict[str, str], checked_run: Recap
) -> None:
    assert checked_run.failed == 0, checked_run.output
    assert (checked_run.changed > 0) == bare, checked_run.output
    if bare:
        assert "dra-accelerators-driver.service" in checked_run.output
        assert world.footprint() == before


def test_first_run_reports_its_changes(first_run: Recap, bare: bool) -> None:
    assert first_run.failed == 0, first_run.output
    assert (first_run.changed > 0) == bare, first_run.output


def test_each_node_reports_the_release_of_its_driver(cluster: Cluster) -> None:
    for node in cluster.nodes():
        release = cluster.run(node, "readlink", "/opt/dra-accelerators/current").strip().rpartition("/")[2]
        assert cluster.get("node", node)["metadata"]["labels"]["dra.accelerators/release"] == release


def test_nodes_publish_their_devices(cluster: Cluster) -> None:
    first, second = cluster.nodes()
    profiles = Counter(
        device["attributes"]["profile"]["string"]
        for device in cluster.devices(first).values()
        if device["attributes"]["type"]["string"] == "mig" and "uuid" in device["attributes"]
    )
    assert profiles == {"3g.40gb": 1, "1g.10gb": 4}
    whole = [device for device in cluster.devices(second).values() if device["attributes"]["type"]["string"] == "gpu"]
    assert len(whole) == 8
    assert len(cluster.devices(second)) == 8 * 26, "an H100 offers itself and 25 placements"


def test_attributes_of_a_whole_gpu_are_the_vendor_drivers(cluster: Cluster) -> None:
    node = cluster.nodes()[1]
    attributes = cluster.devices(node)["gpu-0"]["attributes"]
    kinds = {name: next(iter(value)) for name, value in attributes.items()}
    assert (
        kinds
        | {
            "type": "string",
            "uuid": "string",
            "productName": "string",
            "brand": "string",
            "architecture": "string",
            "cudaComputeCapability": "version",
            "driverVersion": "version",
            "cudaDriverVersion": "version",
            "resource.kubernetes.io/pciBusID": "string",
            "resource.kubernetes.io/pcieRoot": "string",
            "resource.kubernetes.io/numaNode": "int",
        }
        == kinds
    )
    assert attributes["productName"]["string"] == "NVIDIA H100 80GB HBM3"
    assert attributes["cudaComputeCapability"]["version"] == "9.0.0"
    described = (
        cluster.run(node, "nvidia-smi", "-i", "0", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader")
        .strip()
        .split(", ")
    )
    assert attributes["uuid"]["string"] == described[0]
    assert described[1].lower().endswith(attributes["resource.kubernetes.io/pciBusID"]["string"][4:])


def test_pools_are_complete_and_owned_by_their_node(cluster: Cluster) -> None:
    for node in cluster.nodes():
        slices = cluster.slices(node)
        uid = cluster.get("node", node)["metadata"]["uid"]
        assert {item["spec"]["pool"]["name"] for item in slices} == {node}
        assert len({item["spec"]["pool"]["generation"] for item in slices}) == 1
        assert {item["spec"]["pool"]["resourceSliceCount"] for item in slices} == {len(slices)}
        assert all(item["metadata"]["ownerReferences"][0]["uid"] == uid for item in slices)


def test_second_run_changes_nothing(cluster: Cluster) -> None:
    before = {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in cluster.slices()}
    second = cluster.playbook("site.yml")
    assert second.failed == 0, second.output
    assert second.changed == 0, second.output
    assert before == {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in cluster.slices()}
    # The number of tasks determines the duration: Ansible needs time for each task and host, whatever the task does.
    *others, leader = sorted(second.hosts, key=lambda host: second.hosts[host]["ok"])
    assert second.hosts[leader]["ok"] <= MOST_TASKS_OF_LEADER, f"{leader}: {second.hosts[leader]}\n{second.output}"
    for host in others:
        assert second.hosts[host]["ok"] <= MOST_TASKS, f"{host}: {second.hosts[host]}\n{second.output}"


def dispatched(cluster: Cluster, schema: str) -> float:
    """Return how many requests the API server has dispatched for a FlowSchema in its own priority level."""
    lines = cluster.kubectl("get", "--raw", "/metrics").splitlines()
    found = [
        line
        for line in lines
        if line.startswith("apiserver_flowcontrol_dispatched_requests_total{")
        and f'flow_schema="{schema}"' in line
        and f'priority_level="{schema}"' in line
    ]
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)


def test_api_server_ranks_requests_of_drivers(cluster: Cluster) -> None:
    assert dispatched(cluster, "dra-accelerators-driver") > 0
    for schema in cluster.get("flowschemas.flowcontrol.apiserver.k8s.io")["items"]:
        dangling = [each for each in schema["status"]["conditions"] if each["type"] == "Dangling"]
        assert [each["status"] for each in dangling] == ["False"], schema
    before = dispatched(cluster, "dra-accelerators-driver-claims")
    documents = (
        claim("ranked", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
        pod("ranked", "ranked"),
    )
    cluster.apply(*documents)
    try:
        cluster.wait_running("ranked")
        assert dispatched(cluster, "dra-accelerators-driver-claims") > before
    finally:
        cluster.delete(*reversed(documents))


@pytest.mark.prove
def test_changed_flow_schema_is_restored(cluster: Cluster) -> None:
    name = ("flowschema.flowcontrol.apiserver.k8s.io", "dra-accelerators-driver")
    cluster.kubectl("patch", *name, "--type=merge", "--patch", '{"spec": {"matchingPrecedence": 9500}}')
    assert cluster.playbook("site.yml").failed == 0
    assert cluster.get(*name)["spec"]["matchingPrecedence"] == 1002


def test_driver_runs_sandboxed(cluster: Cluster) -> None:
    shown = cluster.run(
        cluster.nodes()[0],
        "systemctl",
        "show",
        DRIVER_UNIT,
        "--property=NoNewPrivileges,ProtectSystem,CapabilityBoundingSet,ProtectHome,RestrictAddressFamilies",
    )
    facts = dict(line.split("=", 1) for line in shown.splitlines() if "=" in line)
    assert facts["NoNewPrivileges"] == "yes"
    assert facts["ProtectSystem"] == "strict"
    assert "cap_sys_module" not in facts["CapabilityBoundingSet"]
    assert "cap_net_admin" not in facts["CapabilityBoundingSet"]
    # It is 0.4 lower without the simulator's drop-in, which gives access to kernel tunables and control groups.
    analysed = cluster.run(cluster.nodes()[0], "systemd-analyze", "security", "--no-pager", DRIVER_UNIT)
    exposure = analysed.splitlines()[-1]
    assert float(re.findall(r"[0-9]+\.[0-9]+", exposure)[0]) <= 3.0, exposure


def test_kubelet_has_the_driver_registered(cluster: Cluster) -> None:
    for node in cluster.nodes():
        cluster.wait_registered(node)
        assert f"{DRIVER}" in cluster.shell(node, "ls /var/lib/kubelet/plugins_registry")
