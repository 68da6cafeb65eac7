# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that a controller with the role's permissions removes the rules of abandoned drains on a real API server, and
no others.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.drains import (
    REMOVED_RULES_METRIC,
    drain,
    manual_rules,
    verify_abandoned_rules_are_removed,
    verify_rule_without_renewal_is_removed,
)
from tests.fleets import Fleet, boards
from tests.oracles.controller_process import NoNodes, acting

NODE = "drained-node"
#: Seconds after which the controller removes a drain's rules that are not renewed.
LASTING = 20


@pytest.mark.prove
def test_abandoned_drain_rules_are_deleted_with_the_rights_of_the_role(
    administrator: Path, kubectl: Path, tmp_path: Path
) -> None:
    cluster = NoNodes(kubectl, administrator)
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": NODE}, "spec": {}})
    made = Fleet()
    made.node(NODE, boards(8))
    cluster.apply(*({**each, "apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"} for each in made.slices))
    cluster.apply(*manual_rules(NODE))
    abandoned = drain(cluster, NODE, "repartition", "gpu-1", "gpu-2")
    (renewed,) = drain(cluster, NODE, "elsewhere", "gpu-6")
    # The time counts from when the controller first sees the rules.
    began = time.time()
    with acting(cluster, tmp_path, drifting=2, lift_drains_after=LASTING) as controller:
        cluster.wait("the metric of the remaining drains", lambda: controller.counted('drift{kind="drain-left"}') > 0)
        assert controller.counted(REMOVED_RULES_METRIC) == 0
        verify_abandoned_rules_are_removed(cluster, NODE, dict.fromkeys(abandoned, began), renewed, LASTING)
        cluster.wait(
            "the metric of the removed rules", lambda: controller.counted(REMOVED_RULES_METRIC) == len(abandoned) == 2
        )
        verify_rule_without_renewal_is_removed(cluster, NODE, renewed, LASTING)
        cluster.wait("nothing is drained", lambda: controller.counted('drift{kind="drain-left"}') == 0)
