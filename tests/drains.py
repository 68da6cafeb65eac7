# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Create DeviceTaintRules in a cluster for tests of their removal: rules of the module device_drain and manual rules.

The controller removes the rules of an abandoned drain and reports each removal as an Event.
"""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

from tests.cluster.cluster import Cluster, execute

CONTROLLER = "dra-accelerators-controller"
#: The metric that counts the rules that the controller has removed.
REMOVED_RULES_METRIC = 'clean_up_actions_total{action="lift-rule",outcome="done"}'
RENEWAL_ANNOTATION = "dra.accelerators/drain-renewed"
#: Names of the rules that the module did not write.
MANUAL_RULES = {"manual", "manual-with-name-labels"}


def manual_rules(node: str) -> list[dict[str, Any]]:
    """Return two rules for an unused GPU that the module did not write. One of them has the labels of the module's rules."""
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
                "taint": {"key": "example.com/manual", "effect": "NoSchedule"},
            },
        }
        for name in sorted(MANUAL_RULES)
    ]


def drain(cluster: Cluster, node: str, operation: str, *devices: str) -> dict[str, float]:
    """Drain unused GPUs with the module and return the times at which its rules were created, by name."""
    options = {
        "kubeconfig": cluster.world("kubeconfig").strip(),
        "state": "drained",
        "node": node,
        "operation": operation,
        "devices": devices,
    }
    module = "dra.accelerators.device_drain"
    execute(["ansible", "localhost", "--module-name", module, "--args", json.dumps(options)])
    return rule_creation_times(cluster, operation)


def rule_creation_times(cluster: Cluster, operation: str) -> dict[str, float]:
    """Return the creation times of the rules that the module wrote for an operation, by name, in seconds since 1970."""
    arguments = ("devicetaintrules", "--show-managed-fields", "-l", f"dra.accelerators/drain={operation}")
    return {
        each["metadata"]["name"]: _seconds(each["metadata"]["creationTimestamp"])
        for each in cluster.get(*arguments)["items"]
        if any(one["manager"] == "dra.accelerators.device-drain" for one in each["metadata"]["managedFields"])
    }


def rule_names(cluster: Cluster) -> set[str]:
    """Return the names of all rules in the cluster."""
    return {each["metadata"]["name"] for each in cluster.get("devicetaintrules")["items"]}


def removal_times(cluster: Cluster, node: str) -> dict[str, float]:
    """Return the times at which the controller removed rules of a node, by the rules' names, from its Events."""
    selector = f"involvedObject.name={node},reportingComponent={CONTROLLER},reason=DrainLifted"
    return {
        str(each["message"]).split()[2]: _seconds(each["metadata"]["creationTimestamp"])
        for each in cluster.get("events", "-n", "default", "--field-selector", selector)["items"]
    }


def verify_abandoned_rules_are_removed(
    cluster: Cluster, node: str, abandoned: dict[str, float], renewed: str, timeout: float
) -> None:
    """Assert that the controller removes the rules of an abandoned drain after ``timeout`` seconds, and no others.

    ``abandoned``: the creation times of these rules by name. ``renewed``: the name of a rule that this function renews meanwhile.
    """
    assert abandoned.keys() | MANUAL_RULES | {renewed} == rule_names(cluster), "a rule was removed too early"
    deadline = time.monotonic() + timeout + 60
    while abandoned.keys() & rule_names(cluster):
        assert time.monotonic() < deadline, rule_names(cluster)
        # A run of the module renews its drain with this annotation.
        now = datetime.now(tz=UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        cluster.kubectl("annotate", "devicetaintrule", renewed, f"{RENEWAL_ANNOTATION}={now}", "--overwrite")
        time.sleep(2.0)
    assert rule_names(cluster) == MANUAL_RULES | {renewed}
    cluster.wait("an Event for each removed rule", lambda: removal_times(cluster, node).keys() == abandoned.keys())
    ages = [removed - abandoned[name] for name, removed in removal_times(cluster, node).items()]
    print(f"removed after {ages} s")
    # Times of the API server are whole seconds.
    assert all(timeout - 1 <= each < timeout + 20 for each in ages), ages


def verify_rule_without_renewal_is_removed(cluster: Cluster, node: str, name: str, timeout: float) -> None:
    """Assert that the controller also removes the renewed rule when its renewals end, and that the manual rules stay."""
    cluster.wait("the rule is removed", lambda: name not in rule_names(cluster), timeout=timeout + 30)
    cluster.wait("an Event for the removed rule", lambda: name in removal_times(cluster, node))
    assert rule_names(cluster) == MANUAL_RULES


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()
