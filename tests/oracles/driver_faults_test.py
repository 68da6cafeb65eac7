# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Inject each fault once into each API request of the node driver's process (driver_faults.py), with the role's
permissions.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.oracles import driver_faults
from tests.oracles.controller_process import NoNodes
from tests.oracles.controller_rights import driver_objects, node_objects

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cluster(administrator: Path, kubectl: Path) -> NoNodes:
    """Return an API server with the objects of the role, the Node, and the account that reads metrics."""
    made = NoNodes(kubectl, administrator)
    nodes = (
        {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        for name in (driver_faults.NODE, driver_faults.OTHER_NODE)
    )
    made.apply(*nodes, *driver_objects(read_pods=True, metrics_authorization=True), *node_objects(driver_faults.NODE))
    made.kubectl("create", "namespace", driver_faults.SPACE)
    for account in ("default", driver_faults.READER):
        made.kubectl("create", "serviceaccount", account, "-n", driver_faults.SPACE)
    made.kubectl("create", "clusterrole", "fault-metrics", "--verb=get", "--non-resource-url=/metrics")
    words = ("--clusterrole=fault-metrics", f"--serviceaccount={driver_faults.SPACE}:{driver_faults.READER}")
    made.kubectl("create", "clusterrolebinding", "fault-metrics", *words)
    return made


def inject(cluster: NoNodes, *words: str, timeout: float) -> None:
    command = [sys.executable, "-m", "tests.oracles.driver_faults", f"--kubeconfig={cluster.kubeconfig}", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-20000:]


def test_each_request_meets_a_fault_by_rotation(cluster: NoNodes) -> None:
    inject(cluster, "--rotate", timeout=300)


@pytest.mark.prove
def test_each_request_meets_each_fault(cluster: NoNodes) -> None:
    inject(cluster, timeout=7200)
