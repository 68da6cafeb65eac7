# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that processes with an open partition keep it: a pod's program, and a node's monitor that outlives the pod."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import PRINT_AND_STAY, claim, dynamic, pod

PYTHON = "/opt/dra-accelerators/venv/bin/python"
MONITOR = "watching-monitor.service"

#: Queries the memory of each MIG device and keeps NVML open, like a monitoring agent.
WATCH = """
import time
import pynvml as nvml
nvml.nvmlInit()
for index in range(nvml.nvmlDeviceGetCount()):
    gpu = nvml.nvmlDeviceGetHandleByIndex(index)
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(gpu)):
        try:
            nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, number))
        except nvml.NVMLError_NotFound:
            continue
print("watching", flush=True)
time.sleep(3600)
"""


@pytest.fixture
def node(clean: Cluster) -> Iterator[str]:
    """Yield the second node, which has only partitions of claims; stop the monitor afterwards."""
    name = clean.nodes()[1]
    assert clean.instances(name) == []
    yield name
    clean.run(name, "systemctl", "stop", MONITOR, check=False)


def instance(cluster: Cluster, node: str) -> tuple[str, str]:
    """Return GPU and ID of the node's only GPU instance, as an administrator's nvidia-smi lists it."""
    ((gpu, number),) = re.findall(
        r"^\|\s+(\d+)\s+MIG 1g\.10gb\s+\d+\s+(\d+)", cluster.run(node, "nvidia-smi", "mig", "-lgi"), re.MULTILINE
    )
    return gpu, number


def run_pod(cluster: Cluster, node: str, name: str, command: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Start a pod that runs a command with its own partition; return its claim and the pod."""
    wish, wanted = (
        claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
        pod(name, name, node=node),
    )
    wanted["spec"]["containers"][0]["command"] = ["sh", "-c", command]
    cluster.apply(wish, wanted)
    cluster.wait_running(name)
    return wish, wanted


def test_partition_open_in_a_pod_cannot_be_destroyed(clean: Cluster, node: str) -> None:
    """The pod is a client for the board itself, not only for the driver: nvidia-smi does not query the driver."""
    documents = run_pod(clean, node, "looking", "exec nvidia-smi -L -l 3600")
    clean.wait("the pod has listed its partition", lambda: "MIG 1g.10gb" in clean.log("looking"))
    gpu, number = instance(clean, node)
    destroy = ("nvidia-smi", "mig", "-i", gpu, "-dci", "-gi", number)
    refused = clean.shell(node, f"{shlex.join(destroy)} 2>&1 && echo destroyed", check=False)
    assert "in use" in refused.lower() and "destroyed" not in refused, refused
    clean.delete(*reversed(documents))
    clean.wait("the partition is deleted with the pod", lambda: clean.instances(node) == [])


def test_partition_open_in_a_monitor_is_released_when_the_monitor_ends(clean: Cluster, node: str) -> None:
    documents = run_pod(clean, node, "watched", PRINT_AND_STAY)
    uid, before = clean.uid("watched"), clean.driver_pid(node)
    clean.run(node, "systemd-run", f"--unit={MONITOR}", "--collect", PYTHON, "-c", WATCH)
    clean.wait(
        "the monitor watches",
        lambda: "watching" in clean.run(node, "journalctl", "-u", MONITOR, "-o", "cat", "--no-pager"),
    )
    clean.kubectl("delete", "pod", "watched", "--wait=false")
    # NVML lists only processes that compute, which a monitor does not. So the driver names the likely kinds of
    # processes.
    clean.wait(
        "the driver names the process that uses the partition",
        lambda: clean.said(node, "it is in use", "DCGM", uid) > 0,
    )
    assert clean.instances(node) and clean.recorded(node).keys() == {uid}
    assert clean.pod("watched")["metadata"]["deletionTimestamp"]

    beside = run_pod(clean, node, "beside", PRINT_AND_STAY)
    clean.delete(*reversed(beside))
    clean.run(node, "systemctl", "stop", MONITOR)
    clean.delete(*reversed(documents))
    clean.wait("the partition is deleted", lambda: clean.instances(node) == [])
    assert (clean.recorded(node), clean.driver_pid(node)) == ({}, before)
