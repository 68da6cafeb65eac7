# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test one faulty GPU: other GPUs are not affected, its claims can be released, and the fault is reported until it
ends.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import DRIVER_UNIT, Cluster
from tests.cluster.manifests import claim, dynamic, pod

CALL = "nvmlDeviceGetMemoryInfo"
WITHOUT_NVML = f"/etc/systemd/system/{DRIVER_UNIT}.d/without-nvml.conf"
LIBRARY = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"


def taints(cluster: Cluster, node: str) -> dict[str, set[str]]:
    """Return the taint keys of the node's tainted devices."""
    return {
        name: {taint["key"] for taint in device["taints"]}
        for name, device in cluster.devices(node).items()
        if device.get("taints")
    }


def on(cluster: Cluster, node: str, gpu: str, profile: str = "1g.10gb") -> str:
    """Return CEL for a dynamic partition on one GPU."""
    uuid = cluster.devices(node)[gpu]["attributes"]["uuid"]["string"]
    return f"{dynamic(profile)} && device.attributes['gpu.nvidia.com'].parentUUID == '{uuid}'"


@pytest.fixture()
def node(clean: Cluster) -> Iterator[str]:
    """Yield the second node, all of whose GPUs are dynamic; clear all faults afterwards."""
    name = clean.nodes()[1]
    clean.wait("all devices are published", lambda: len(clean.devices(name)) == 8 * 26)
    yield name
    clean.run(name, "accelerator-simulator", "clear")
    clean.wait("no device is tainted", lambda: not taints(clean, name))


@pytest.mark.parametrize(
    ("fault", "cause"), [pytest.param("fail 999", "unknown-error", marks=pytest.mark.prove), ("hang", "no-answer")]
)
def test_only_the_faulty_gpu_is_tainted_and_its_claims_are_released(
    clean: Cluster, node: str, fault: str, cause: str
) -> None:
    of_gpu_3 = {name for name in clean.devices(node) if name == "gpu-3" or name.startswith("gpu-3-")}
    assert len(of_gpu_3) == 26
    pid = clean.driver_pid(node)
    held = (
        claim("held", device_class="mig.nvidia.com", expression=on(clean, node, "gpu-3")),
        pod("held", "held", node=node),
    )
    clean.apply(*held)
    clean.wait_running("held")
    clean.run(node, "accelerator-simulator", "fault", "3", "call", CALL, *fault.split())
    clean.wait(
        "its devices are tainted, no others",
        lambda: taints(clean, node) == {name: {f"gpu.nvidia.com/{cause}"} for name in of_gpu_3},
        timeout=120,
    )

    answer = clean.status(node)
    assert (answer["ready"], answer["problems"]) == (True, [])
    faults = [device["fault"] for device in answer["devices"]]
    assert [index for index, text in enumerate(faults) if text] == [3]
    assert cause in faults[3]

    beside = tuple(f"beside-{number}" for number in range(4))
    for number, name in enumerate(beside):
        clean.apply(
            claim(name, device_class="mig.nvidia.com", expression=on(clean, node, f"gpu-{number + 4}")),
            pod(name, name, node=node),
        )
    clean.wait_running(*beside)
    clean.delete(*reversed(held))
    clean.wait("the pod has ended and its file is deleted", lambda: len(clean.cdi_files(node)) == len(beside))

    clean.run(node, "accelerator-simulator", "clear")
    clean.wait("no device is tainted", lambda: not taints(clean, node))
    clean.wait("the pending cleanup of the GPU is done", lambda: len(clean.instances(node)) == len(beside))
    assert not any(device["fault"] for device in clean.status(node)["devices"])
    clean.apply(*held)
    clean.wait_running("held")
    assert clean.driver_pid(node) == pid


def test_reboot_without_the_gpu_driver_ends_pods_with_partitions(clean: Cluster, node: str) -> None:
    documents = (
        claim("stranded", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
        pod("stranded", "stranded", node=node),
    )
    clean.apply(*documents)
    clean.wait_running("stranded")
    clean.shell(
        node,
        f"mkdir -p {WITHOUT_NVML.rpartition('/')[0]} && "
        f"printf '[Service]\\nBindReadOnlyPaths=/dev/null:{LIBRARY}\\n' > {WITHOUT_NVML} && systemctl daemon-reload",
    )
    try:
        clean.world("reboot", node)
        clean.wait_registered(node, timeout=180)
        problems = clean.wait("the log line of the driver", lambda: clean.status(node)["problems"])
        assert any("hardware" in problem for problem in problems), problems
        clean.delete(*reversed(documents))
        clean.wait(
            "pod and claim are deleted",
            lambda: not clean.get("pods,resourceclaims", "-n", "default")["items"],
            timeout=180,
        )
        assert clean.cdi_files(node) == []
        assert clean.status(node)["claims"] == []
    finally:
        clean.shell(node, f"rm -f {WITHOUT_NVML} && systemctl daemon-reload && systemctl restart {DRIVER_UNIT}")
    clean.wait("the driver is ready", lambda: clean.status(node)["ready"], timeout=180)
    clean.wait("all devices are published", lambda: len(clean.devices(node)) == 8 * 26)
    assert clean.instances(node) == []
