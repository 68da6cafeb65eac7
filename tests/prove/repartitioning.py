# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of the repartitioning tests: the playbook, running pods and their devices, and the records and Events
of an operation.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from typing import Any

from tests.cluster.cluster import EXAMPLES, Cluster, Recap

#: Event reasons of an operation that succeeds, and of one whose change fails.
DONE = ["RepartitionBegun", "RepartitionChanging", "RepartitionApplied", "RepartitionDone"]
UNDONE = ["RepartitionBegun", "RepartitionChanging", "RepartitionFailed", "RepartitionUndone"]


def repartition(cluster: Cluster, fleet: str = "{}", *arguments: str, **more: Any) -> Recap:
    """Run the playbook with the example's variables, those of the fleet, and ``more``."""
    example = f"@{EXAMPLES / 'repartition.yml'}"
    return cluster.playbook(
        "repartition.yml", "-e", example, "-e", fleet, "-e", json.dumps(more), *arguments, check=False
    )


def killed_at(cluster: Cluster, task: str, *words: object) -> str:
    """Run the playbook and kill all of Ansible with SIGKILL as soon as a task starts; return the output."""
    said: list[str] = []
    argv, environment = cluster.playbook_command("repartition.yml", *words)
    with subprocess.Popen(
        argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            if line.startswith(f"TASK [{task}]"):
                os.killpg(process.pid, signal.SIGKILL)
                break
        else:
            raise AssertionError(f"there was no task {task!r}\n" + "".join(said))
    return "".join(said)


def pods(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Return the pods that are not terminating, by name."""
    items = cluster.get("pods", "-n", "default")["items"]
    return {each["metadata"]["name"]: each for each in items if not each["metadata"].get("deletionTimestamp")}


def containers(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """Return the container ID and restart count of each pod."""
    return {
        name: (
            each["status"]["containerStatuses"][0]["containerID"],
            each["status"]["containerStatuses"][0]["restartCount"],
        )
        for name, each in pods(cluster).items()
        if (each["status"].get("containerStatuses") or [{}])[0].get("containerID")
    }


def wait_ready(cluster: Cluster, timeout: float = 300, **numbers: int) -> None:
    """Wait until each Deployment has the given number of ready pods."""
    for name, number in numbers.items():
        cluster.wait(
            f"{number} of {name} are ready",
            lambda name=name, number=number: (
                cluster.get("deployment", name, "-n", "default")["status"].get("readyReplicas", 0) == number
            ),
            timeout,
        )


def holders(cluster: Cluster) -> dict[str, str]:
    """Return the pod that uses each device, by node and device."""
    found = {}
    for claim in cluster.get("resourceclaims", "-n", "default")["items"]:
        status = claim.get("status", {})
        for result in status.get("allocation", {}).get("devices", {}).get("results", []):
            for user in status.get("reservedFor", []):
                found[f"{result['pool']}/{result['device']}"] = user["name"]
    return found


def numbered(place: str) -> tuple[str, int]:
    """Return the node and the index of the physical device of a key of ``holders``."""
    node, device = place.split("/")
    match = re.match(r"[gn]pu-(\d+)", device)
    assert match, device
    return node, int(match[1])


def rules(cluster: Cluster) -> list[str]:
    return [each["metadata"]["name"] for each in cluster.get("devicetaintrules")["items"]]


def records(cluster: Cluster) -> list[str]:
    """Return the nodes with a recorded operation."""
    path = f"/var/lib/kubelet/plugins/{cluster.driver}/repartition.json"
    return [node for node in cluster.nodes() if cluster.shell(node, f"test -e {path} && echo yes || true").strip()]


def profiles(cluster: Cluster, node: str, gpu: int) -> Counter[str]:
    """Return the partitions of one GPU as nvidia-smi lists them."""
    found: Counter[str] = Counter()
    inside = False
    for line in cluster.run(node, "nvidia-smi", "-L").splitlines():
        if line.startswith("GPU "):
            inside = line.startswith(f"GPU {gpu}:")
        elif inside:
            found[line.split()[1]] += 1
    return found


def consistent(cluster: Cluster, node: str, gpu: int, partitions: dict[str, int]) -> None:
    """Assert that one static layout is complete: the partitions, the published devices, and no rule or record."""
    assert profiles(cluster, node, gpu) == partitions
    assert not rules(cluster) and not records(cluster)
    prefix = f"gpu-{gpu}-mig-"
    published = [each for name, each in cluster.devices(node).items() if name.startswith(prefix)]
    found = Counter(each["attributes"]["profile"]["string"] for each in published)
    assert found == partitions, found


def node_events(
    cluster: Cluster, node: str, component: str = "dra-accelerators-driver", after: int = 0
) -> list[tuple[str, str]]:
    """Return the reasons and messages of a component's Events on a Node, in the order of their resource versions.

    ``after`` excludes Events up to a resource version, as ``last_event_version`` returns it.
    """
    found = sorted(events(cluster, f"involvedObject.name={node},reportingComponent={component}").items())
    return [(each["reason"], each["message"]) for version, each in found if version > after]


def last_event_version(cluster: Cluster, node: str) -> int:
    """Return the resource version of the last Event on a Node."""
    return max(events(cluster, f"involvedObject.name={node}"), default=0)


def events(cluster: Cluster, selector: str) -> dict[int, Any]:
    """Return the Events that match a field selector, by resource version, which increases with each write."""
    found = cluster.get("events", "-n", "default", "--field-selector", selector)["items"]
    return {int(each["metadata"]["resourceVersion"]): each for each in found}


def repartition_events(cluster: Cluster, node: str) -> dict[str, list[tuple[str, str]]]:
    """Return the Events of the node's driver about each repartitioning operation, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for reason, text in node_events(cluster, node):
        if reason.startswith("Repartition"):
            found.setdefault(text.split(": operation ")[1].partition(":")[0], []).append((reason, text))
    return found


def reasons(found: list[tuple[str, str]]) -> list[str]:
    return [reason for reason, _text in found]
