# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Fifty-six dynamic partitions fill the eight GPUs of one node; the next pod waits for the first place that is given back."""

from __future__ import annotations

import re

import yaml

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import claim, dynamic, pod

PLACES = 8 * 7


def test_a_node_filled_to_the_last_slice(clean: Cluster) -> None:
    node = clean.nodes()[1]
    names = [f"fill-{number:02d}" for number in range(PLACES)]
    documents = []
    for name in names:
        documents += [
            claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
            pod(name, name, node=node),
        ]
    clean.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(documents), timeout=300)
    clean.wait_running(*names, timeout=900)
    assert len(clean.instances(node)) == PLACES
    assert len(clean.cdi_files(node)) == PLACES
    uuids = {
        re.search(r"MIG-[0-9a-f-]{36}", clean.wait("log", lambda name=name: clean.log(name))).group(0)
        for name in names[::8]
    }  # type: ignore[union-attr]
    assert len(uuids) == len(names[::8])

    clean.apply(
        claim("next", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("next", "next", node=node)
    )
    clean.wait(
        "the 57th is told why it waits",
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
