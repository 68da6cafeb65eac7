# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that dynamic partitions fill a GPU, or all eight of a node, and that the next pod gets the first released one."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import claim, dynamic, pod

SLICES = 7


@pytest.mark.parametrize("gpus", [1, pytest.param(8, marks=pytest.mark.prove)])
def test_partitions_fill_a_gpu_to_the_last_slice(clean: Cluster, gpus: int) -> None:
    node = clean.nodes()[1]
    uuids = {clean.devices(node)[f"gpu-{number}"]["attributes"]["uuid"]["string"] for number in range(gpus)}
    wanted = f"{dynamic('1g.10gb')} && device.attributes['gpu.nvidia.com'].parentUUID in {sorted(uuids)}"
    names = [f"fill-{number:02d}" for number in range(gpus * SLICES)]
    documents = []
    for name in names:
        documents += [
            claim(name, device_class="mig.nvidia.com", expression=wanted),
            pod(name, name, node=node),
        ]
    clean.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(documents), timeout=300)
    clean.wait_running(*names, timeout=900)
    assert len(clean.instances(node)) == len(names)
    assert len(clean.cdi_files(node)) == len(names)
    shown = [clean.wait("log", lambda name=name: clean.log(name)) for name in names[:: SLICES - 1]]
    partitions = [re.findall(r"MIG-[0-9a-f-]{36}", log) for log in shown]
    assert len({each for (each,) in partitions}) == len(shown), "each pod sees a different partition"

    clean.apply(claim("next", device_class="mig.nvidia.com", expression=wanted), pod("next", "next", node=node))
    clean.wait(
        "the reason why the next pod waits",
        lambda: "cannot allocate all claims" in clean.kubectl("describe", "pod", "next"),
    )
    assert clean.pod("next")["status"]["phase"] == "Pending"

    freed = clean.get("resourceclaim", names[0], "-n", "default")["status"]["allocation"]["devices"]["results"][0][
        "device"
    ]
    clean.kubectl("delete", "pod", names[0])
    clean.kubectl("delete", "resourceclaim", names[0])
    clean.wait_running("next")
    assert (
        clean.get("resourceclaim", "next", "-n", "default")["status"]["allocation"]["devices"]["results"][0]["device"]
        == freed
    )

    clean.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=600s", timeout=700)
    clean.wait("no instance left", lambda: clean.instances(node) == [], timeout=120)
    assert clean.cdi_files(node) == []
