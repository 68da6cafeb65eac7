# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A world whose nodes have Ascend NPUs, with the operations of the cluster tests."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.cluster.cluster import EXAMPLES, Cluster
from tests.cluster.manifests import pod

#: Paths of the driver's libraries in images for these chips.
LIBRARIES = "/usr/local/Ascend/driver/lib64/driver:/usr/local/Ascend/driver/lib64/common"
LOOK_AND_STAY = "npu-smi info; trap 'exit 0' TERM; while :; do sleep 1; done"


def npu_pod(name: str, *claims: str, node: str | None = None) -> dict[str, Any]:
    """Return a pod that uses existing claims, prints its npu-smi output, and runs until it is deleted."""
    made = pod(name, *claims, node=node)
    (container,) = made["spec"]["containers"]
    container |= {
        "command": ["sh", "-c", LOOK_AND_STAY],
        "env": [{"name": "LD_LIBRARY_PATH", "value": LIBRARIES}],
    }
    return made


class NpuCluster(Cluster):
    """One world, with methods for its NPUs."""

    driver = "npu.huawei.com"
    fleet = EXAMPLES / "ascend/npu-fleet.yml"

    def instances(self, node: str) -> list[str]:
        """Return the vNPUs of a node's NPUs: physical chip ID, virtual ID, template."""
        return [
            f"{physical} {each['vid']} {each['template']}"
            for physical, slices in self.slices_of(node).items()
            for each in slices
        ]

    def slices_of(self, node: str) -> dict[int, list[dict[str, Any]]]:
        """Return the vNPUs of each NPU of a node by physical ID, with ``vid``, ``template``, ``group``, and
        ``container``.
        """
        shown = json.loads(self.run(node, "accelerator-simulator", "show", "--json"))
        shown = shown.get("ascend", shown)  # a machine with two vendors has one entry per vendor
        return {int(npu["physical"]): npu["slices"] for npu in shown["npus"]}

    def kept_slices(self, node: str) -> list[str]:
        """Return the lines from which the vendor's driver restores vNPUs at boot, and the device nodes of vNPUs."""
        lines = self.shell(node, "cat /etc/vnpu.cfg 2>/dev/null; ls -d /dev/vdavinci* 2>/dev/null; true").splitlines()
        return sorted(line for line in lines if line[:1].isdigit() or line.startswith("/dev/vdavinci"))

    def shown_to(self, name: str) -> list[str]:
        """Return the names of the healthy chips and vNPUs that a pod's npu-smi listed at the pod's start."""

        def shown() -> list[str]:
            return re.findall(r"^\| \d+ +(\S+) +\| OK ", self.log(name), re.MULTILINE)

        return self.wait(f"{name} printing its devices", shown, timeout=60)
