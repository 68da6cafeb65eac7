# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Shared parts of tests of the driver as a pod: a world, a base image, the fleet's variables, and the pod."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.cluster.cluster import ROOT, Cluster, Recap, execute
from tests.cluster.manifests import claim, dynamic, pod
from tests.cluster.npus import NpuCluster
from tests.cluster.token_requests import pod_token

NAMESPACE = "dra-accelerators-driver"
#: The label of nodes whose driver is a pod, and the name of the pod that can replace it.
LABEL, STAND_IN = "dra-accelerators/driver", "with-less"
#: The state file of the simulated library, which a real library does not have.
STATE = "/usr/lib/x86_64-linux-gnu/libnvidia-gpusim.so.580.95.05"
NPU_STATE = "/usr/local/Ascend/driver/lib64/driver/libdcmi-sim.so.*"

DYNAMIC = [{"match": {}, "mode": "dynamic"}]

# Run in the pod before it enters the node's file system: which of the node's file systems are writable, and the result
# of opening files for writing that exist on every node. Nothing is written, even if a file can be opened.
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
    """Build an image with Python like one from a registry: the world's image with the libraries that gRPC links."""
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
    """Return the variables of a fleet whose drivers are pods, from an image that nodes import."""
    return {
        "dra_driver_deploy_as": "daemonset",
        "driver_image_delivery": "import",
        "driver_image_base": base,
        "driver_image_require_digest": False,
        "driver_image_python": "3.11",
        "dra_driver_image_pull_policy": "Never",
        "dra_driver_pod_writable_paths": [STATE],
        **more,
    }


def the_pod(cluster: Cluster) -> dict[str, Any]:
    """Wait until the driver has one pod that is not being deleted, and return it.

    A DaemonSet creates the replacement of a deleted pod with a short delay.
    """

    def found() -> dict[str, Any] | None:
        items = cluster.get("pods", "-n", NAMESPACE)["items"]
        stay = [each for each in items if not each["metadata"].get("deletionTimestamp")]
        return dict(stay[0]) if len(stay) == 1 else None

    return cluster.wait("the driver has exactly one pod", found)


class PodForm:
    """The world, its footprint before the first run, and the variables of its fleet."""

    def __init__(
        self, cluster: Cluster, before: dict[str, str], base: str, layout: list[dict[str, Any]] | None = None
    ) -> None:
        self.cluster, self.before, self.base, self.layout = cluster, before, base, layout or DYNAMIC
        (self.node,) = cluster.nodes()
        # The file name contains the version of the driver.
        self.state = STATE
        if cluster.driver == NpuCluster.driver:
            self.state = cluster.shell(self.node, f"ls {NPU_STATE}").strip()

    def playbook(self, name: str, *arguments: object, check: bool = True, **more: Any) -> Recap:
        """Run a playbook with the fleet's variables and these."""
        fleet = {
            "accelerator_layouts": [{"hosts": "all", "layout": self.layout}],
            "dra_driver_metrics_address": "0.0.0.0:9817",
        }
        fleet |= variables(self.base, **{"dra_driver_pod_writable_paths": [self.state], **more})
        return self.cluster.playbook(name, "-e", json.dumps(fleet), *arguments, check=check)

    def process(self) -> tuple[str, int]:
        """Return the UID of the driver's pod and the restart count of its container."""
        found = the_pod(self.cluster)
        return found["metadata"]["uid"], found["status"]["containerStatuses"][0]["restartCount"]

    def restart(self) -> None:
        """Delete the driver's pod and wait until another one is ready."""
        before = the_pod(self.cluster)["metadata"]
        self.cluster.kubectl("delete", "pod", before["name"], "-n", NAMESPACE, "--timeout=120s", timeout=150)
        self.cluster.wait("another pod", lambda: the_pod(self.cluster)["metadata"]["uid"] != before["uid"])
        self.cluster.wait("the driver is ready", lambda: self.cluster.status(self.node)["ready"])

    def token(self) -> str:
        """Return the token of the pod's service account."""
        return pod_token(self.cluster, NAMESPACE, the_pod(self.cluster)["metadata"]["name"], "driver")

    def sees(self) -> dict[str, Any]:
        """Return the paths of the node that the pod's container can write, by its mounts and by trying."""
        name = the_pod(self.cluster)["metadata"]["name"]
        said = self.cluster.kubectl("exec", name, "-n", NAMESPACE, "-c", "driver", "--", "python3", "-c", LOOK)
        return dict(json.loads(said))

    def held(self, name: str, profile: str = "1g.10gb") -> list[dict[str, Any]]:
        """Create a claim for a partition and its pod, and wait until the pod runs."""
        documents = [
            claim(name, device_class="mig.nvidia.com", expression=dynamic(profile)),
            pod(name, name, node=self.node),
        ]
        self.cluster.apply(*documents)
        self.cluster.wait_running(name)
        return documents


def images(cluster: Cluster, node: str) -> dict[str, str]:
    """Return the images of a node's containerd, which the footprint excludes."""
    return {f"image {name}": "" for name in cluster.run(node, "ctr", "-n", "k8s.io", "images", "ls", "-q").split()}


@contextlib.contextmanager
def bare_world(
    name: str,
    silicon: str = "8xH100",
    kind: type[Cluster] = Cluster,
    layout: list[dict[str, Any]] | None = None,
) -> Iterator[PodForm]:
    """Yield a world of one node, with eight GPUs by default, without anything of the collection."""
    cluster, kept = kind(name), os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
    if not kept:
        cluster.world("down")
    cluster.world("up", "--nodes", "1", "--silicon", silicon, timeout=3000)
    try:
        (node,) = cluster.nodes()
        before = cluster.footprint() | images(cluster, node)
        yield PodForm(cluster, before, make_base_image(cluster), layout)
    finally:
        if not kept:
            cluster.world("down")


#: Changes a pod's spec before it replaces the DaemonSet's pod.
Change = Callable[[dict[str, Any]], None]


def nothing(spec: dict[str, Any]) -> None:
    """Do not change a pod."""


def no_capability(name: str) -> Change:
    """Return a change that removes one capability from a pod."""

    def change(spec: dict[str, Any]) -> None:
        spec["containers"][0]["securityContext"]["capabilities"]["add"].remove(name)

    return change


def no_mount(path: str) -> Change:
    """Return a change that removes a mount from a pod. Without it the pod sees the node's path read-only."""

    def change(spec: dict[str, Any]) -> None:
        mounts = spec["containers"][0]["volumeMounts"]
        (gone,) = (each for each in mounts if each["mountPath"] == f"/host{path}")
        mounts.remove(gone)
        spec["volumes"] = [each for each in spec["volumes"] if each["name"] != gone["name"]]

    return change


def no_handler(spec: dict[str, Any]) -> None:
    """Remove the runtime handler from a pod, which permits it to open devices."""
    del spec["runtimeClassName"]


class Rights:
    """The node without the DaemonSet's pod, and replacement pods from the DaemonSet's template, unchanged or with
    fewer permissions.
    """

    def __init__(self, form: PodForm) -> None:
        self.form, self.cluster, self.node = form, form.cluster, form.node
        (daemons,) = self.cluster.get("daemonsets", "-n", NAMESPACE)["items"]
        self.spec: dict[str, Any] = daemons["spec"]["template"]["spec"]
        self.label("-")
        self.cluster.wait(
            "the DaemonSet's pod is deleted",
            lambda: not self.cluster.get("pods", "-n", NAMESPACE)["items"],
            timeout=120,
        )

    def label(self, value: str) -> None:
        """Label the node so that the DaemonSet runs its pod there, or not."""
        self.cluster.kubectl("label", "node", self.node, f"{LABEL}{value}", "--overwrite")

    @contextlib.contextmanager
    def standing_in(self, change: Change) -> Iterator[None]:
        """Run a changed pod instead of the DaemonSet's. Neither exists before and after."""
        spec = copy.deepcopy(self.spec)
        change(spec)
        wanted = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": STAND_IN, "namespace": NAMESPACE},
            "spec": {**spec, "nodeSelector": {"kubernetes.io/hostname": self.node}},
        }
        self.cluster.apply(wanted)
        try:
            yield
        finally:
            self.cluster.kubectl("delete", "pod", STAND_IN, "-n", NAMESPACE, "--timeout=120s", timeout=150)

    @contextlib.contextmanager
    def asking(self, documents: list[dict[str, Any]]) -> Iterator[None]:
        """Delete a claim and its pod at the end. A pod with all permissions completes the cleanup."""
        try:
            yield
        finally:
            self.cluster.delete(*reversed(documents), wait=False)
            with self.standing_in(nothing):
                self.cluster.wait("the pod serves", self.ready)
                self.cluster.wait(
                    "nothing is left of it",
                    lambda: not self.cluster.get("pods,resourceclaims", "-n", "default")["items"],
                )
                self.cluster.wait("nor in the store", lambda: not self.cluster.recorded(self.node))

    def ready(self) -> bool:
        """Return whether the replacement pod is ready."""
        found = self.cluster.pod(STAND_IN, NAMESPACE).get("status", {}).get("containerStatuses", [])
        return bool(found) and bool(found[0]["ready"])

    def words(self) -> str:
        """Return the replacement pod's log, including that of its previous container."""
        said = []
        for before in ((), ("--previous",)):
            said.append(self.cluster.kubectl("logs", STAND_IN, "-n", NAMESPACE, *before, check=False))
        return " ".join(" ".join(said).split())

    def opened(self, path: str) -> str:
        """Return the result of opening a device of the node in the replacement pod: "opened", or the name of the
        error.

        A simulated device with permission fails with ENXIO, because its number has no driver.
        """
        program = (
            "import errno, os, sys\ntry:\n    os.close(os.open(sys.argv[1], os.O_RDWR))\n    print('opened')\n"
            "except OSError as error:\n    print(errno.errorcode[error.errno])\n"
        )
        return self.cluster.kubectl(
            *("exec", STAND_IN, "-n", NAMESPACE, "--", "python3", "-c", program, f"/host{path}")
        ).strip()

    def events(self, name: str, namespace: str = "default") -> str:
        """Return the messages of Events for a claim or pod of this name."""
        chosen = ("--field-selector", f"involvedObject.name={name}")
        items = self.cluster.get("events", "-n", namespace, *chosen)["items"]
        return " ".join(" ".join(each["message"] for each in items).split())

    def verify_rejected(self, change: Change, documents: list[dict[str, Any]], said: tuple[str, ...]) -> None:
        """Assert that a pod with fewer permissions is ready, and that it rejects this claim with a message of these
        texts.
        """
        name = documents[0]["metadata"]["name"]
        with self.asking(documents), self.standing_in(change):
            self.cluster.wait("the pod serves", self.ready)
            self.cluster.apply(*documents)
            self.cluster.wait(
                f"an Event with {' and '.join(said)}",
                lambda: all(each in self.events(name) for each in said),
                timeout=60,
            )
