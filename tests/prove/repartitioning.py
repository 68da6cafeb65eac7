# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""What tests of a new layout on a living cluster share: the playbook, who runs and has what, and what is left or told of an operation."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from collections import Counter
from typing import Any

from tests.cluster.cluster import EXAMPLES, Cluster, Recap

#: What is told of an operation that succeeds, and of one whose change fails.
DONE = ["RepartitionBegun", "RepartitionChanging", "RepartitionApplied", "RepartitionDone"]
UNDONE = ["RepartitionBegun", "RepartitionChanging", "RepartitionFailed", "RepartitionUndone"]


def repartition(cluster: Cluster, fleet: str = "{}", *arguments: str, **more: Any) -> Recap:
    """The playbook, with the example's variables, those of the fleet and ``more``."""
    example = f"@{EXAMPLES / 'repartition.yml'}"
    return cluster.playbook(
        "repartition.yml", "-e", example, "-e", fleet, "-e", json.dumps(more), *arguments, check=False
    )


def killed_at(cluster: Cluster, task: str, *words: object) -> str:
    """Run the playbook and kill all of Ansible, beyond remedy, as soon as it says that a task begins; returns what it said."""
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
    """The pods that are not on their way out, by name."""
    items = cluster.get("pods", "-n", "default")["items"]
    return {each["metadata"]["name"]: each for each in items if not each["metadata"].get("deletionTimestamp")}


def containers(cluster: Cluster) -> dict[str, tuple[str, int]]:
    """What runs in each pod: the container's id, and how often it was started anew."""
    return {
        name: (
            each["status"]["containerStatuses"][0]["containerID"],
            each["status"]["containerStatuses"][0]["restartCount"],
        )
        for name, each in pods(cluster).items()
        if (each["status"].get("containerStatuses") or [{}])[0].get("containerID")
    }


def wait_ready(cluster: Cluster, timeout: float = 300, **numbers: int) -> None:
    """Wait until so many pods of each of these Deployments are ready."""
    for name, number in numbers.items():
        cluster.wait(
            f"{number} of {name} are ready",
            lambda name=name, number=number: (
                cluster.get("deployment", name, "-n", "default")["status"].get("readyReplicas", 0) == number
            ),
            timeout,
        )


def holders(cluster: Cluster) -> dict[str, str]:
    """By node and device, the pod that has it."""
    found = {}
    for claim in cluster.get("resourceclaims", "-n", "default")["items"]:
        status = claim.get("status", {})
        for result in status.get("allocation", {}).get("devices", {}).get("results", []):
            for user in status.get("reservedFor", []):
                found[f"{result['pool']}/{result['device']}"] = user["name"]
    return found


def numbered(place: str) -> tuple[str, int]:
    """The node, and the number of the physical device, of what ``holders`` has."""
    node, device = place.split("/")
    match = re.match(r"[gn]pu-(\d+)", device)
    assert match, device
    return node, int(match[1])


def rules(cluster: Cluster) -> list[str]:
    return [each["metadata"]["name"] for each in cluster.get("devicetaintrules")["items"]]


def records(cluster: Cluster) -> list[str]:
    """The nodes on which an operation is written down."""
    path = f"/var/lib/kubelet/plugins/{cluster.driver}/repartition.json"
    return [node for node in cluster.nodes() if cluster.shell(node, f"test -e {path} && echo yes || true").strip()]


def profiles(cluster: Cluster, node: str, gpu: int) -> Counter[str]:
    """The partitions of one GPU, as nvidia-smi lists them."""
    found: Counter[str] = Counter()
    inside = False
    for line in cluster.run(node, "nvidia-smi", "-L").splitlines():
        if line.startswith("GPU "):
            inside = line.startswith(f"GPU {gpu}:")
        elif inside:
            found[line.split()[1]] += 1
    return found


def consistent(cluster: Cluster, node: str, gpu: int, partitions: dict[str, int]) -> None:
    """One static layout, altogether: silicon, what is published, and nothing left over."""
    assert profiles(cluster, node, gpu) == partitions
    assert not rules(cluster) and not records(cluster)
    prefix = f"gpu-{gpu}-mig-"
    published = [each for name, each in cluster.devices(node).items() if name.startswith(prefix)]
    found = Counter(each["attributes"]["profile"]["string"] for each in published)
    assert found == partitions, found


def told(
    cluster: Cluster, node: str, component: str = "dra-accelerators-driver", after: int = 0
) -> list[tuple[str, str]]:
    """The Events of a component on a Node: the reason and the text of each, in the order in which the API server has got them.

    Those ``after`` a resource version alone, which ``told_until`` gives.
    """
    found = sorted(events(cluster, f"involvedObject.name={node},reportingComponent={component}").items())
    return [(each["reason"], each["message"]) for version, each in found if version > after]


def told_until(cluster: Cluster, node: str) -> int:
    """The resource version of the last Event on a Node."""
    return max(events(cluster, f"involvedObject.name={node}"), default=0)


def events(cluster: Cluster, selector: str) -> dict[int, Any]:
    """The Events that a field selector finds, by their resource version: a number that grows with each that is written."""
    found = cluster.get("events", "-n", "default", "--field-selector", selector)["items"]
    return {int(each["metadata"]["resourceVersion"]): each for each in found}


def steps_told(cluster: Cluster, node: str) -> dict[str, list[tuple[str, str]]]:
    """What the node's driver has told of each operation of a repartitioning, by its name."""
    found: dict[str, list[tuple[str, str]]] = {}
    for reason, text in told(cluster, node):
        if reason.startswith("Repartition"):
            found.setdefault(text.split(": operation ")[1].partition(":")[0], []).append((reason, text))
    return found


def reasons(told_of_one: list[tuple[str, str]]) -> list[str]:
    return [reason for reason, _text in told_of_one]
