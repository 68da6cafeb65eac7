# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""What tests of the driver as a pod share: a world, an image that it can be built upon, its variables, and its pod."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.cluster.cluster import ROOT, Cluster, Recap, execute
from tests.cluster.manifests import claim, dynamic, pod

NAMESPACE = "dra-accelerators-driver"
#: What the simulated library writes to, as no real one does.
STATE = "/usr/lib/x86_64-linux-gnu/libnvidia-gpusim.so.580.95.05"

DYNAMIC = [{"match": {}, "mode": "dynamic"}]

# What the pod sees of the node's own file systems, as it starts and before it moves into them: which of them it may write, and what
# comes of opening files to write that are there on every node. None is written, also where one can be opened.
LOOK = """
import errno, json, os
below = ("/host/run", "/host/proc", "/host/sys")
seen = {line.split()[4] for line in open("/proc/self/mountinfo")}
seen = {"/host"} | {each for each in seen if each.startswith(below) and os.path.exists(each)}
def opened(path):
    try:
        os.close(os.open(path, os.O_WRONLY))
    except OSError as error:
        return errno.errorcode[error.errno]
    return "opened"
wanted = ("/host/run/systemd/container", "/host/proc/sys/kernel/core_pattern")
# Version 2 and version 1 of control groups.
groups = ("/host/sys/fs/cgroup/cgroup.procs", "/host/sys/fs/cgroup/pids/cgroup.procs")
print(json.dumps({
    "writable": [each for each in seen if not os.statvfs(each).f_flag & os.ST_RDONLY],
    "opened": {each: opened(each) for each in wanted + tuple(filter(os.path.exists, groups))},
}))
"""


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


class PodForm:
    """The world, what was in it before the first run, and the variables of its fleet."""

    def __init__(self, cluster: Cluster, before: dict[str, str], base: str) -> None:
        self.cluster, self.before, self.base = cluster, before, base
        (self.node,) = cluster.nodes()

    def playbook(self, name: str, *arguments: object, check: bool = True, **more: Any) -> Recap:
        """Run a playbook with the fleet's variables and these."""
        fleet = {
            "accelerator_layouts": [{"hosts": "all", "layout": DYNAMIC}],
            "dra_driver_metrics_address": "0.0.0.0:9817",
        }
        fleet |= variables(self.base, **more)
        return self.cluster.playbook(name, "-e", json.dumps(fleet), *arguments, check=check)

    def process(self) -> tuple[str, int]:
        """The pod that serves, and how often its container was started again."""
        found = the_pod(self.cluster)
        return found["metadata"]["uid"], found["status"]["containerStatuses"][0]["restartCount"]

    def sees(self) -> dict[str, Any]:
        """What the pod's container may write of the node, by its mounts and by trying."""
        name = the_pod(self.cluster)["metadata"]["name"]
        said = self.cluster.kubectl("exec", name, "-n", NAMESPACE, "-c", "driver", "--", "python3", "-c", LOOK)
        return dict(json.loads(said))

    def held(self, name: str, profile: str = "1g.10gb") -> list[dict[str, Any]]:
        """A claim for a partition and the pod that has it, which runs."""
        documents = [
            claim(name, device_class="mig.nvidia.com", expression=dynamic(profile)),
            pod(name, name, node=self.node),
        ]
        self.cluster.apply(*documents)
        self.cluster.wait_running(name)
        return documents


def images(cluster: Cluster, node: str) -> dict[str, str]:
    """What a node's containerd has, which is no part of the node's files."""
    return {f"image {name}": "" for name in cluster.run(node, "ctr", "-n", "k8s.io", "images", "ls", "-q").split()}


@contextlib.contextmanager
def bare_world(name: str) -> Iterator[PodForm]:
    """A world of one node with eight GPUs, on which nothing of the collection is yet."""
    cluster, kept = Cluster(name), os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
    if not kept:
        cluster.world("down")
    cluster.world("up", "--nodes", "1", "--silicon", "8xH100", timeout=3000)
    try:
        (node,) = cluster.nodes()
        before = cluster.footprint() | images(cluster, node)
        yield PodForm(cluster, before, make_base_image(cluster))
    finally:
        if not kept:
            cluster.world("down")
