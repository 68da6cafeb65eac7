# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""The state of a node's GPUs while virtual machines use some of them."""

from __future__ import annotations

from tests.cluster.cluster import Cluster


def listed(cluster: Cluster, node: str) -> int:
    """Return how many GPUs NVML lists on a node."""
    return len(cluster.run(node, "nvidia-smi", "-L").splitlines())


def drivers(cluster: Cluster, node: str) -> dict[str, str]:
    """Return driver and override of each GPU of a node that differs from the default."""
    script = (
        "for each in /sys/bus/pci/drivers/nvidia/../../devices/*; do [ -e $each/driver_override ] || continue; "
        "case $(cat $each/class) in 0x03*) echo ${each##*/} $(basename $(readlink $each/driver)) $(cat $each/driver_override);; esac; done"
    )
    found = {}
    for line in cluster.shell(node, script).splitlines():
        address, _space, what = line.partition(" ")
        if what != "nvidia (null)":
            found[address] = what
    return found


def generations(cluster: Cluster, node: str) -> set[tuple[str, str]]:
    """Return names and resource versions of the slices, which show any new write."""
    return {(each["metadata"]["name"], each["metadata"]["resourceVersion"]) for each in cluster.slices(node)}
