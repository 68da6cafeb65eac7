# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""A controller on the test host with the operator's access, for tests of nodes that need one."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.cluster.cluster import Cluster

NAMESPACE = "dra-accelerators"
LEASE = "acting"


@contextlib.contextmanager
def acting_controller(cluster: Cluster, folder: Path) -> Iterator[None]:
    """Run a controller until the context ends. On entry it lists the claims that nodes prepare before pods are bound."""
    labels = {"app.kubernetes.io/managed-by": "dra-accelerators", "pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", text=json.dumps(namespace))
    settings = {
        "name": "here",
        "kubeconfig": cluster.world("kubeconfig").strip(),
        "namespace": "default",
        "lease": LEASE,
        "driver_namespace": NAMESPACE,
        "drivers": ["gpu.nvidia.com", "npu.huawei.com"],
        "lease_seconds": 3,
    }
    file = folder / "acting.yaml"
    file.write_text(yaml.safe_dump(settings), encoding="utf-8")
    with (folder / "acting.log").open("w") as log:
        command = [sys.executable, "-m", "dra_driver.controller", "run", "--config", str(file)]
        running = subprocess.Popen(command, stderr=log)
        try:
            cluster.wait(
                "the sign of the controller",
                lambda: cluster.kubectl("get", "configmap", "-n", NAMESPACE, "waiting-claims", "--ignore-not-found"),
            )
            yield
        finally:
            running.terminate()
            assert running.wait(timeout=30) == 0, (folder / "acting.log").read_text()
            cluster.kubectl("delete", "lease", LEASE, "-n", "default")
            labelled = "app.kubernetes.io/component=controller"
            cluster.kubectl("delete", "configmaps", "-n", NAMESPACE, "-l", labelled, "--ignore-not-found")
