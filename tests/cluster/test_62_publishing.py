# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test what the driver publishes to the API server and the kubelet despite interference: feature gates, directories,
sockets, pools.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER, DRIVER_UNIT, Cluster
from tests.cluster.manifests import claim, pod

ALL = 8 * 26
REGISTRY = "/var/lib/kubelet/plugins_registry"
REGISTRATION = f"{REGISTRY}/{DRIVER}-reg.sock"
API_SERVER = "/etc/systemd/system/kube-apiserver.service"
# The gates of counters and taints, and those that depend on them.
GATES = ("DRAPartitionableDevices", "DRAPartitionableDevicesType", "DRADeviceTaints", "DRADeviceTaintRules")


def published(cluster: Cluster, node: str) -> set[str]:
    return set(cluster.devices(node))


def problems(cluster: Cluster, node: str, reason: str) -> str:
    """Return the messages of a node's Events with this reason."""
    items = cluster.get("events", "-n", "default", "--field-selector", f"involvedObject.name={node}")["items"]
    return "\n".join(item["message"] for item in items if item["reason"] == reason)


def is_well(cluster: Cluster, node: str) -> bool:
    status = cluster.status(node)
    return bool(status["ready"] and status["published"] and status["registered"])


@pytest.fixture()
def node(clean: Cluster) -> Iterator[str]:
    """Yield the second node, all of whose GPUs are dynamic, with its whole pool before and after."""
    name = clean.nodes()[1]
    clean.wait(
        "all devices are published", lambda: len(clean.devices(name)) == ALL and is_well(clean, name), timeout=180
    )
    yield name
    clean.heal(name)
    clean.wait(
        "all devices are published", lambda: len(clean.devices(name)) == ALL and is_well(clean, name), timeout=240
    )


def uses_a_gpu(cluster: Cluster, node: str, name: str) -> None:
    cluster.apply(claim(name, device_class="gpu.nvidia.com"), pod(name, name, node=node))
    cluster.wait_running(name)


def test_kubelet_directory_is_removed_and_recreated(clean: Cluster, node: str) -> None:
    """`kubeadm reset` and a new join do the same."""
    before = clean.driver_pid(node)
    clean.shell(node, f"systemctl stop kubelet && rm -rf {REGISTRY} && systemctl start kubelet")
    clean.wait(
        "the socket is in the new directory",
        lambda: clean.shell(node, f"test -S {REGISTRATION} && echo yes", check=False),
    )
    clean.wait("the kubelet has registered the driver", lambda: is_well(clean, node), timeout=120)
    # The new directory is not in the old process's mount namespace: only a new process can serve there.
    assert clean.driver_pid(node) != before
    uses_a_gpu(clean, node, "anew")


def test_socket_of_another_program_is_not_replaced(clean: Cluster, node: str) -> None:
    listen = (
        f"import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('{REGISTRATION}'); s.listen(); time.sleep(600)"
    )
    clean.run(node, "systemctl", "stop", DRIVER_UNIT)
    clean.run(node, "systemd-run", "--unit=squatter", "/opt/dra-accelerators/venv/bin/python", "-c", listen)
    try:
        clean.wait("the socket is taken", lambda: clean.shell(node, f"test -S {REGISTRATION} && echo yes", check=False))
        pid = clean.run(node, "systemctl", "show", "--property=MainPID", "--value", "squatter").strip()
        clean.run(node, "systemctl", "start", "--no-block", DRIVER_UNIT)
        clean.wait(
            "the driver names the process", lambda: clean.said(node, REGISTRATION, f"is served by process {pid} ")
        )
        assert clean.run(node, "systemctl", "is-active", "squatter").strip() == "active"
        assert clean.shell(node, f"test -S {REGISTRATION} && echo yes").strip() == "yes"
    finally:
        clean.shell(node, f"systemctl stop squatter; systemctl start {DRIVER_UNIT}")
    clean.wait("the driver serves when the socket is free", lambda: is_well(clean, node), timeout=120)


def test_a_slice_of_another_pool_is_removed(clean: Cluster, node: str) -> None:
    name = "leftover-of-a-former-name"
    spec: dict[str, Any] = {
        "driver": DRIVER,
        "nodeName": node,
        "pool": {"name": "former-name", "generation": 1, "resourceSliceCount": 1},
        "devices": [],
    }
    document = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": name},
        "spec": spec,
    }
    before = {item["metadata"]["name"] for item in clean.slices(node)}
    clean.apply(document)
    try:
        clean.wait("the slice is deleted", lambda: {item["metadata"]["name"] for item in clean.slices(node)} == before)
        clean.wait("the log line of the driver", lambda: clean.said(node, "removed a slice of a previous pool", name))
        assert name not in problems(clean, node, "SliceLeftOver")
        assert is_well(clean, node)
        assert len(clean.devices(node)) == ALL
    finally:
        clean.kubectl("delete", "resourceslice", name, "--ignore-not-found")


def test_driver_can_create_only_character_devices(clean: Cluster, node: str) -> None:
    """The unit's capability and its device rules agree: NVML's helper creates nodes as this process."""
    group = f"$(systemctl show --property=ControlGroup --value {DRIVER_UNIT})"
    # Version 1 of control groups has a separate tree for devices.
    enter = f"[ -d /sys/fs/cgroup/devices ] && cd /sys/fs/cgroup/devices{group} || cd /sys/fs/cgroup{group}; echo $$ > cgroup.procs"
    made = "mknod /run/probe-c c 195 200 && rm /run/probe-c && echo made"
    assert clean.shell(node, f"{enter} && {made}").strip() == "made"
    refused = clean.shell(node, f"{enter}; mknod /run/probe-b b 7 200 2>&1; rm -f /run/probe-b")
    assert "not permitted" in refused
    bounding = clean.run(node, "systemctl", "show", "--property=CapabilityBoundingSet", "--value", DRIVER_UNIT)
    assert "cap_mknod" in bounding.split()


@pytest.fixture()
def without_gates(clean: Cluster, node: str) -> Iterator[str]:
    """Run the API server without counters and taints."""
    switched = "; ".join(f"s/{gate}=true/{gate}=false/" for gate in GATES)
    clean.shell("control", f"cp {API_SERVER} /root/api-server.unit && sed -i '{switched}' {API_SERVER}")
    restart = "systemctl daemon-reload && systemctl restart kube-apiserver"

    def answers() -> bool:
        return clean.kubectl("get", "--raw=/readyz", check=False).strip() == "ok"

    clean.shell("control", restart)
    clean.wait("the API server answers", answers, timeout=180)
    yield node
    clean.shell("control", f"cp /root/api-server.unit {API_SERVER} && {restart}")
    clean.wait("the API server answers", answers, timeout=180)


@pytest.mark.prove
def test_api_server_that_drops_fields_gets_only_supported_devices(clean: Cluster, without_gates: str) -> None:
    node = without_gates
    whole = {f"gpu-{number}" for number in range(8)}
    clean.wait("whole GPUs alone are published", lambda: published(clean, node) == whole, timeout=180)
    text = problems(clean, node, "SliceFieldsDropped")
    assert "DRAPartitionableDevices" in text and "200 devices are withheld" in text
    clean.run(node, "accelerator-simulator", "fault", "3", "lost")
    clean.wait("the lost GPU is withheld", lambda: published(clean, node) == whole - {"gpu-3"}, timeout=180)
    clean.wait("the gate is named", lambda: "DRADeviceTaints" in problems(clean, node, "SliceFieldsDropped"))
    assert clean.status(node)["published"]
    uses_a_gpu(clean, node, "whole")
