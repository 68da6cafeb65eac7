# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test that the controller deallocates a claim with statuses of two drivers, with the role's permissions and only for
its own driver.
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.bench.api_server import ApiServer
from tests.cluster.manifests import claim
from tests.fleets import DRIVER
from tests.oracles.controller_process import NoNodes, acting

NODE, OTHER = "removed-node", "gpu.example.com"


def test_deallocation_of_a_claim_of_two_drivers_clears_both_statuses(kubectl: Path, tmp_path: Path) -> None:
    server = ApiServer(tmp_path)
    with server.running():
        cluster = NoNodes(kubectl, server.kubeconfig)
        cluster.apply(claim("shared", device_class="any"))
        devices = [{"driver": driver, "pool": NODE, "device": "gpu-0"} for driver in (DRIVER, OTHER)]
        field = {"key": "metadata.name", "operator": "In", "values": [NODE]}
        allocation = {
            "devices": {"results": [{"request": "device", **device} for device in devices]},
            "nodeSelector": {"nodeSelectorTerms": [{"matchFields": [field]}]},
        }
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Prepared",
            "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
        for status in (
            {"allocation": allocation},
            {"devices": [{**device, "conditions": [ready]} for device in devices]},
        ):
            patch = json.dumps({"status": status})
            cluster.kubectl(
                "patch",
                "resourceclaim",
                "shared",
                "-n",
                "default",
                "--subresource=status",
                "--type=merge",
                "-p",
                patch,
            )
        assert len(cluster.get("resourceclaim", "shared", "-n", "default")["status"]["devices"]) == 2
        (tmp_path / "controller").mkdir()
        with acting(cluster, tmp_path / "controller", grace=1) as controller:
            done = 'clean_up_actions_total{action="deallocate-claim",outcome="done"}'
            cluster.wait("the claim is deallocated", lambda: controller.counted(done) == 1)
            assert not cluster.get("resourceclaim", "shared", "-n", "default").get("status")
