# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""What tests of the driver as a pod share: an image that it can be built upon, its variables, and its pod."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from tests.cluster.cluster import ROOT, Cluster, execute

NAMESPACE = "dra-accelerators-driver"
#: What the simulated library writes to, as no real one does.
STATE = "/usr/lib/x86_64-linux-gnu/libnvidia-gpusim.so.580.95.05"


def make_base_image(cluster: Cluster) -> str:
    """Make an image with Python, as a user has one from a registry: the world's, with the library that gRPC links."""
    name = "localhost/driver-base:1"
    archive = next(Path(execute([ROOT / "tests/tools/cache"]).stdout.strip()).glob("world/pods-*/images.tar"))
    execute(["docker", "load", "--quiet", "--input", archive])
    recipe = "FROM localhost/python:latest\nCOPY libstdc++.so.6 libgcc_s.so.1 /usr/lib/x86_64-linux-gnu/\n"
    node = cluster.nodes()[0]
    folder = Path(os.environ.get("PYTEST_CLUSTER_TMP", "/tmp")) / f"base-{cluster.name}"
    folder.mkdir(exist_ok=True)
    (folder / "Containerfile").write_text(recipe)
    for library in ("libstdc++.so.6", "libgcc_s.so.1"):
        with (folder / library).open("wb") as file:
            subprocess.run(
                [*cluster._command(f"run {node}"), "cat", f"/usr/lib/x86_64-linux-gnu/{library}"],
                stdout=file,
                check=True,
            )
    execute(["docker", "build", "--quiet", "--tag", name, "--file", folder / "Containerfile", folder])
    return name


def variables(base: str, **more: Any) -> dict[str, Any]:
    """The variables of a fleet whose drivers are pods, from an image that nodes import."""
    return {
        "dra_driver_form": "daemonset",
        "driver_image_delivery": "import",
        "driver_image_base": base,
        "driver_image_python": "3.11",
        "dra_driver_image_pull_policy": "Never",
        "dra_driver_pod_writable_paths": [STATE],
        **more,
    }


def the_pod(cluster: Cluster) -> dict[str, Any]:
    """The one pod of the driver that is not on its way out."""
    items = cluster.get("pods", "-n", NAMESPACE)["items"]
    (found,) = (each for each in items if not each["metadata"].get("deletionTimestamp"))
    return dict(found)
