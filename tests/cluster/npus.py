# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A world whose nodes have Ascend NPUs, in the words of the cluster tests."""

from __future__ import annotations

import json

from tests.cluster.cluster import EXAMPLES, Cluster


class NpuCluster(Cluster):
    """One world, of which the NPUs are looked at."""

    driver = "npu.huawei.com"
    fleet = EXAMPLES / "ascend/npu-fleet.yml"

    def instances(self, node: str) -> list[str]:
        """The slices of a node's NPUs: physical id of the chip, virtual id, template."""
        shown = json.loads(self.run(node, "accelerator-simulator", "show", "--json"))
        return [
            f"{npu['physical']} {each['vid']} {each['template']}" for npu in shown["npus"] for each in npu["slices"]
        ]
