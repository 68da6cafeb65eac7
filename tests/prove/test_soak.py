# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Run and delete pods for 15 min: the driver is the same process at the end and uses no more resources than after the
start.

``DRA_ACCELERATORS_SOAK_SECONDS`` sets another duration, for example a night.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import yaml

from tests.cluster.cluster import PLUGIN_DIRECTORY, Cluster
from tests.cluster.manifests import claim, dynamic, pod

SECONDS = float(os.environ.get("DRA_ACCELERATORS_SOAK_SECONDS", "900"))
KINDS = (
    ("mig.nvidia.com", dynamic("1g.10gb")),
    ("mig.nvidia.com", dynamic("3g.40gb")),
    ("mig.nvidia.com", dynamic("1g.10gb")),
    ("gpu.nvidia.com", None),
)
#: Rounds after which everything that is created once exists.
WARM = 3


@dataclass(frozen=True)
class Held:
    """Resources of the driver's process."""

    pid: int
    descriptors: int
    threads: int
    resident_kib: int
    files: int


def held(cluster: Cluster, node: str) -> Held:
    """Return the current resources of the driver on a node, from the kernel and from its directory."""
    pid = cluster.driver_pid(node)
    script = (
        f"ls /proc/{pid}/fd | wc -l; sed -n 's/^\\(Threads\\|VmRSS\\):[[:space:]]*\\([0-9]*\\).*/\\1 \\2/p' /proc/{pid}/status; "
        f"ls {PLUGIN_DIRECTORY} | wc -l"
    )
    descriptors, *named, files = cluster.shell(node, script).splitlines()
    values = dict(line.split() for line in named)
    return Held(pid, int(descriptors), int(values["Threads"]), int(values["VmRSS"]), int(files))


def one_round(cluster: Cluster) -> None:
    """Run pods of every kind on every node at once, delete them, and assert that nothing is left."""
    documents, names = [], []
    for node in cluster.nodes():
        for number, (device_class, expression) in enumerate(KINDS):
            name = f"soak-{node}-{number}"
            documents += [claim(name, device_class=device_class, expression=expression), pod(name, name, node=node)]
            names.append(name)
    cluster.kubectl("apply", "-f", "-", text=yaml.safe_dump_all(documents))
    cluster.wait_running(*names)
    cluster.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)


def test_driver_uses_no_more_resources_after_many_pods(clean: Cluster) -> None:
    nodes = clean.nodes()
    before = {node: sorted(clean.instances(node)) for node in nodes}
    warm: dict[str, Held] = {}
    rounds, end = 0, time.monotonic() + SECONDS
    while rounds <= WARM or time.monotonic() < end:
        one_round(clean)
        for node in nodes:
            clean.wait(
                f"nothing of round {rounds} left on {node}",
                lambda node=node: sorted(clean.instances(node)) == before[node] and not clean.cdi_files(node),
            )
        rounds += 1
        if rounds == WARM:
            warm = {node: held(clean, node) for node in nodes}
    for node in nodes:
        last = held(clean, node)
        print(f"{node} after {rounds} rounds: {last}; after {WARM}: {warm[node]}")
        assert last.pid == warm[node].pid
        assert last.files == warm[node].files
        # The number of connections and worker threads varies slightly. Growth with every round is a leak.
        assert last.descriptors <= warm[node].descriptors + 8
        assert last.threads <= warm[node].threads + 4
        assert last.resident_kib <= warm[node].resident_kib * 1.25
