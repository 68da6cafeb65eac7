# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A world whose nodes have Ascend NPUs, in the words of the cluster tests."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.cluster.cluster import EXAMPLES, Cluster
from tests.cluster.manifests import pod

#: Where images for these chips look for the driver's libraries.
LIBRARIES = "/usr/local/Ascend/driver/lib64/driver:/usr/local/Ascend/driver/lib64/common"
LOOK_AND_STAY = "npu-smi info; trap 'exit 0' TERM; while :; do sleep 1; done"


def npu_pod(name: str, *claims: str, node: str | None = None) -> dict[str, Any]:
    """A pod that uses existing claims, prints what its own npu-smi shows, and stays until it is deleted."""
    made = pod(name, *claims, node=node)
    (container,) = made["spec"]["containers"]
    container |= {
        "command": ["sh", "-c", LOOK_AND_STAY],
        "env": [{"name": "LD_LIBRARY_PATH", "value": LIBRARIES}],
    }
    return made


class NpuCluster(Cluster):
    """One world, of which the NPUs are looked at."""

    driver = "npu.huawei.com"
    fleet = EXAMPLES / "ascend/npu-fleet.yml"

    def instances(self, node: str) -> list[str]:
        """The slices of a node's NPUs: physical id of the chip, virtual id, template."""
        return [
            f"{physical} {each['vid']} {each['template']}"
            for physical, slices in self.slices_of(node).items()
            for each in slices
        ]

    def slices_of(self, node: str) -> dict[int, list[dict[str, Any]]]:
        """The slices of each NPU of a node, by its physical id: ``vid``, ``template``, ``group`` and ``container`` of each."""
        shown = json.loads(self.run(node, "accelerator-simulator", "show", "--json"))
        shown = shown.get("ascend", shown)  # a machine of two vendors tells of each
        return {int(npu["physical"]): npu["slices"] for npu in shown["npus"]}

    def kept_slices(self, node: str) -> list[str]:
        """The lines by which the vendor's driver makes slices again after a start of the machine, and the nodes of slices."""
        lines = self.shell(node, "cat /etc/vnpu.cfg 2>/dev/null; ls -d /dev/vdavinci* 2>/dev/null; true").splitlines()
        return sorted(line for line in lines if line[:1].isdigit() or line.startswith("/dev/vdavinci"))

    def shown_to(self, name: str) -> list[str]:
        """The names of the chips and slices, all of them well, that a pod's own npu-smi has listed at the pod's start."""

        def shown() -> list[str]:
            return re.findall(r"^\| \d+ +(\S+) +\| OK ", self.log(name), re.MULTILINE)

        return self.wait(f"{name} printing its devices", shown, timeout=60)
