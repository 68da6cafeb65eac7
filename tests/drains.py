# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Rules of drains in a cluster, for tests of who lifts them: those of the module device_drain, those that somebody has made by hand, and what is told."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from tests.cluster.cluster import Cluster, execute

CONTROLLER = "dra-accelerators-controller"
#: What the controller counts them as.
LIFTED = 'clean_up_actions_total{action="lift-rule",outcome="done"}'
SIGN = "dra.accelerators/drain-renewed"
BY_HAND = {"by-hand", "by-hand-in-its-name"}


def rules_by_hand(node: str) -> list[dict[str, Any]]:
    """Two rules for a GPU that nobody has, which the module has not written: one of them has the labels that the module's have."""
    labels = {
        "app.kubernetes.io/managed-by": "dra-accelerators",
        "dra.accelerators/drain": "repartition",
        "dra.accelerators/node": node,
    }
    return [
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "DeviceTaintRule",
            "metadata": {"name": name, "labels": labels if "name" in name else {}},
            "spec": {
                "deviceSelector": {"driver": "gpu.nvidia.com", "pool": node, "device": "gpu-5"},
                "taint": {"key": "example.com/by-hand", "effect": "NoSchedule"},
            },
        }
        for name in sorted(BY_HAND)
    ]


def drain(cluster: Cluster, node: str, operation: str, *devices: str) -> dict[str, float]:
    """Drain GPUs that nobody has by the module; returns its rules, and when the API server got them."""
    options = {
        "kubeconfig": cluster.world("kubeconfig").strip(),
        "state": "drained",
        "node": node,
        "operation": operation,
        "devices": devices,
    }
    module = "dra.accelerators.device_drain"
    execute(["ansible", "localhost", "--module-name", module, "--args", json.dumps(options)])
    return drained(cluster, operation)


def drained(cluster: Cluster, operation: str) -> dict[str, float]:
    """The rules that the module has written for an operation, and when the API server got them."""
    asked = ("devicetaintrules", "--show-managed-fields", "-l", f"dra.accelerators/drain={operation}")
    return {
        each["metadata"]["name"]: _seconds(each["metadata"]["creationTimestamp"])
        for each in cluster.get(*asked)["items"]
        if any(one["manager"] == "dra.accelerators.device-drain" for one in each["metadata"]["managedFields"])
    }


def there(cluster: Cluster) -> set[str]:
    """The names of all rules."""
    return {each["metadata"]["name"] for each in cluster.get("devicetaintrules")["items"]}


def lifted_at(cluster: Cluster, node: str) -> dict[str, float]:
    """When rules of a node were lifted, as the controller's Events say, by the rules' names."""
    mine = f"involvedObject.name={node},reportingComponent={CONTROLLER},reason=DrainLifted"
    return {
        str(each["message"]).split()[2]: _seconds(each["metadata"]["creationTimestamp"])
        for each in cluster.get("events", "-n", "default", "--field-selector", mine)["items"]
    }


def verify_rules_are_removed(cluster: Cluster, node: str, left: dict[str, float], goes_on: str, lasting: float) -> None:
    """See that rules of which nobody gives a sign are lifted when it is time, and that those by hand stay, and one of which somebody does."""
    assert left.keys() | BY_HAND | {goes_on} == there(cluster), "too early"
    deadline = time.monotonic() + lasting + 60
    while left.keys() & there(cluster):
        assert time.monotonic() < deadline, there(cluster)
        # What a run writes that goes on with a drain of more than ten minutes ago.
        now = datetime.now(tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        cluster.kubectl("annotate", "devicetaintrule", goes_on, f"{SIGN}={now}", "--overwrite")
        time.sleep(2.0)
    assert there(cluster) == BY_HAND | {goes_on}
    cluster.wait("all are told", lambda: lifted_at(cluster, node).keys() == left.keys())
    lasted = [at - left[name] for name, at in lifted_at(cluster, node).items()]
    print(f"lifted after {lasted} s")
    # Times of the API server are whole seconds.
    assert all(lasting - 1 <= each < lasting + 20 for each in lasted), lasted


def see_that_lifted_too(cluster: Cluster, node: str, goes_on: str, lasting: float) -> None:
    """See that it was the signs that have kept the last one: nobody gives any more."""
    cluster.wait("it is lifted as well", lambda: goes_on not in there(cluster), timeout=lasting + 30)
    cluster.wait("that is told", lambda: goes_on in lifted_at(cluster, node))
    assert there(cluster) == BY_HAND


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
