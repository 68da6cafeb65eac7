# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Plan layouts for pending claims of a cluster; after the layouts are applied, the real scheduler allocates devices to
exactly these claims.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args

from tests import planned
from tests.oracles.allocation_cases import READY
from tests.oracles.scheduler import DRA, Cluster

Json = dict[str, Any]
#: Only the pair requests its profile, so the scheduler's order does not matter.
SMALL, LARGE, PAIR = "1g.10gb", "3g.40gb", "2g.20gb"


def waiting() -> list[Json]:
    """Return claims for partitions that do not exist, one for a whole GPU that fits at once, and an impossible one,
    each with a pod.
    """
    claims = [planned.claim(f"small-{number}", SMALL) for number in range(9)]
    claims += [planned.claim(f"large-{number}", LARGE) for number in range(3)]
    claims += [planned.claim("pair", PAIR, count=2), planned.claim("whole"), planned.claim("never", "9g.90gb")]
    return [*claims, *(planned.pod(each["metadata"]["name"], each["metadata"]["name"]) for each in claims)]


def test_pending_claims_are_planned_and_get_their_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module = importlib.import_module("ansible_collections.dra.accelerators.plugins.modules.fleet_plan")
    devices = planned.fleet(nodes=3, each=2)
    nodes = [{"kind": "Node", "metadata": {"name": name}, "status": READY} for name in devices]
    cluster = Cluster(tmp_path)
    with cluster.running():
        running = planned.claim("running")
        cluster.create([*planned.CLASSES, *nodes, *planned.slices(devices), running, planned.pod("running", "running")])
        cluster.start_scheduler()
        held = cluster.pods()["running"]["spec"]["nodeName"]
        has = cluster.claims()["running"]["status"]["allocation"]["devices"]["results"][0]
        cluster.create(waiting())
        cluster.pods()
        options = {
            "nodes": planned.answers(devices),
            "pending_for": "0s",
            "kubeconfig": str(cluster.kubeconfig),
            "dest": str(tmp_path / "layouts.yml"),
        }
        with patch_module_args(options), pytest.raises(SystemExit):
            module.main()
        answer: Json = json.loads(capsys.readouterr().out)
        plan = answer["plan"]
        served = {each["name"]: each["served"] for each in plan["wanted"]}
        assert sum(served.values()) == 13 and plan["moves"] == []
        (lacking,) = plan["unplaceable"]
        assert lacking["name"] == "Pod default/never" and lacking["code"] == "no-such-device"
        assert lacking["why"].startswith("Pod default/never: no node has devices for it now.")
        # The GPU in use is not changed.
        (kept,) = [one for one in plan["devices"] if (one["node"], f"gpu-{one['index']}") == (held, has["device"])]
        assert not kept["changed"] and kept["mode"] == "whole"

        after = planned.applied(devices, plan["layouts"])
        published = {each["metadata"]["name"]: each for each in planned.slices(after)}
        for each in cluster.request("GET", f"{DRA}/resourceslices")["items"]:
            spec = published[each["metadata"]["name"]]["spec"]
            pool = {**spec["pool"], "generation": each["spec"]["pool"]["generation"] + 1}
            cluster.request(
                "PUT", f"{DRA}/resourceslices/{each['metadata']['name']}", {**each, "spec": {**spec, "pool": pool}}
            )
        cluster.until(
            lambda: [
                name
                for name, each in cluster.claims().items()
                if name != "never" and not (each.get("status") or {}).get("allocation")
            ]
        )
        claims = cluster.claims()
        assert not (claims["never"].get("status") or {}).get("allocation")
        assert claims["running"]["status"]["allocation"]["devices"]["results"] == [has]
        # Only the impossible claim is left to plan.
        with patch_module_args({**options, "nodes": planned.answers(after)}), pytest.raises(SystemExit):
            module.main()
        again: Json = json.loads(capsys.readouterr().out)["plan"]
        assert [each["name"] for each in again["wanted"]] == ["Pod default/never"] and again["touched"] == 0
