# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Measure the scheduler's cost of a node's slices: the driver's single slice for all GPUs, and one slice per GPU, on
the oldest and the pinned Kubernetes.

The scheduler's processor time is measured, not elapsed time, because the API server runs on the same processors. Each
pod claims one whole GPU in a fleet of nodes with eight GPUs.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.bench import fleet
from tests.bench.api_server import OLDEST_SERVED, Served
from tests.bench.figures import Figures
from tests.cluster.manifests import claim
from tests.oracles.scheduler import PATHS, Cluster

NODES = int(os.environ.get("DRA_ACCELERATORS_SCHEDULER_NODES", "1000"))
PODS = 100
RELEASES = {"oldest": OLDEST_SERVED, "pinned": Served(gates={}, options=())}


def device_class() -> dict[str, Any]:
    selector = {"cel": {"expression": f"device.driver == '{fleet.DRIVER}'"}}
    return {"kind": "DeviceClass", "metadata": {"name": "gpu"}, "spec": {"selectors": [selector]}}


def pod(name: str) -> dict[str, Any]:
    """Return a pod with a claim of its name."""
    container = {"name": "one", "image": "none", "resources": {"claims": [{"name": "gpu"}]}}
    spec = {"containers": [container], "resourceClaims": [{"name": "gpu", "resourceClaimName": name}]}
    return {"kind": "Pod", "metadata": {"name": name}, "spec": spec}


class FleetCluster(Cluster):
    """A fleet without kubelets, and its scheduler."""

    def schedule(self, names: list[str]) -> None:
        """Create pods with a GPU each, and wait until they are bound."""
        self.create([each for name in names for each in (claim(name, device_class="gpu"), pod(name))])
        self.until(lambda: [one["metadata"]["name"] for one in self._pods() if not one["spec"].get("nodeName")])

    def processor_seconds(self) -> float:
        """Return the processor time of the scheduler until now."""
        process = dict(self._processes)["kube-scheduler"]
        numbers = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")

    def _pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.request("GET", PATHS["Pod"])["items"]
        return found


def split(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the slices of a node with one device in each."""
    devices = [(body, device) for body in bodies for device in body["spec"]["devices"]]
    return [
        {
            **body,
            "metadata": {"generateName": f"{number}-{body['metadata']['generateName']}"},
            "spec": {
                **body["spec"],
                "devices": [device],
                "pool": {**body["spec"]["pool"], "resourceSliceCount": len(devices)},
            },
        }
        for number, (body, device) in enumerate(devices)
    ]


def measure(folder: Path, served: Served, text: str) -> float:
    """Return the processor time of the scheduler for one pod in milliseconds. ``text`` contains the slices of a node."""
    folder.mkdir()
    cluster = FleetCluster(folder, served=served)
    with cluster.running():
        nodes = [{**fleet.node(name), "kind": "Node"} for name in fleet.names(NODES)]
        bodies = [body for name in fleet.names(NODES) for body in json.loads(text.replace(fleet.ANY_NAME, name))]
        cluster.create([*nodes, *bodies, device_class()])
        cluster.start_scheduler()
        cluster.schedule(["first"])
        before = cluster.processor_seconds()
        cluster.schedule([f"pod-{number}" for number in range(PODS)])
        used = cluster.processor_seconds() - before
    return used * 1000 / PODS


@pytest.mark.parametrize("release", RELEASES)
def test_scheduler_time_by_the_slices_of_a_node(release: str, tmp_path: Path, figures: Figures) -> None:
    bodies = json.loads(fleet.slices(partitioned=False))
    parts = split(bodies)
    assert (len(bodies), len(parts)) == (1, fleet.GPUS)
    slow, fast = (measure(tmp_path / f"{len(each)}", RELEASES[release], json.dumps(each)) for each in (parts, bodies))
    figures.add_line(
        f"scheduler, {release} Kubernetes, {NODES} nodes of {fleet.GPUS} GPUs: {slow:.1f} ms of a processor for each pod with a slice for each "
        f"GPU, {fast:.1f} with one for all: {slow / fast:.1f} times as much"
    )
