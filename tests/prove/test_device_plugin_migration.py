# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Migrate a cluster from a device plugin to claims and back under unchanged running workloads: first with this
collection's plugin, then with another.

A separate world with two nodes. Each test starts from the state that the previous one left.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Iterator
from typing import Any, Self

import pytest
import yaml

from tests.cluster.cluster import EXAMPLES, Cluster, CommandFailed, Recap
from tests.cluster.manifests import IMAGE, PRINT_AND_STAY, claim, deployed, pod

LAYOUT: list[dict[str, Any]] = [
    {"match": {"index": 0}, "mode": "static", "partitions": {"1g.10gb": 4}},
    {"match": {}, "mode": "whole"},
]
GPU, PART = "nvidia.com/gpu", "nvidia.com/mig-1g.10gb"
TAINT, OFF = "dra.accelerators/migration", "dra.accelerators/device-plugin"
DEVICES = 7 + 4
VENDOR = "/opt/vendor-plugin"

#: A device plugin of another vendor: eight devices that pods can request, and its own socket in the kubelet's
#: directory.
PLUGIN = """
import os, signal, threading
from concurrent import futures

import grpc
from dra_driver.protocol import device_plugin_pb2 as messages
from dra_driver.protocol import device_plugin_pb2_grpc as stubs

FOLDER = "/var/lib/kubelet/device-plugins"
SOCKET = FOLDER + "/nvidia-gpu.sock"
ended = threading.Event()


class Plugin(stubs.DevicePluginServicer):
    def GetDevicePluginOptions(self, request, context):
        return messages.DevicePluginOptions()

    def ListAndWatch(self, request, context):
        yield messages.ListAndWatchResponse(devices=[messages.Device(ID=f"GPU-{n}", health="Healthy") for n in range(8)])
        ended.wait()

    def Allocate(self, request, context):
        return messages.AllocateResponse(
            container_responses=[messages.ContainerAllocateResponse() for _ in request.container_requests]
        )


if os.path.exists(SOCKET):
    os.unlink(SOCKET)
server = grpc.server(futures.ThreadPoolExecutor(4))
stubs.add_DevicePluginServicer_to_server(Plugin(), server)
server.add_insecure_port("unix:" + SOCKET)
server.start()
signal.signal(signal.SIGTERM, lambda *_: ended.set())
with grpc.insecure_channel("unix:" + FOLDER + "/kubelet.sock") as channel:
    stubs.RegistrationStub(channel).Register(
        messages.RegisterRequest(version="v1beta1", endpoint="nvidia-gpu.sock", resource_name="nvidia.com/gpu"), timeout=10
    )
ended.wait()
server.stop(1).wait()
if os.path.exists(SOCKET):
    os.unlink(SOCKET)
"""


def deployment(name: str, resource: str, replicas: int) -> dict[str, Any]:
    """Return a workload that uses a device plugin."""
    container = {
        "name": "probe",
        "image": IMAGE,
        "imagePullPolicy": "Never",
        "command": ["sh", "-c", PRINT_AND_STAY],
        "resources": {"limits": {resource: "1"}},
    }
    spec = {"terminationGracePeriodSeconds": 2, "dnsPolicy": "Default", "containers": [container]}
    return deployed(name, replicas, spec)


BUDGET = {
    "apiVersion": "policy/v1",
    "kind": "PodDisruptionBudget",
    "metadata": {"name": "web", "namespace": "default"},
    "spec": {"minAvailable": 1, "selector": {"matchLabels": {"app": "web"}}},
}
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "gpus", "namespace": "default"},
    "spec": {"hard": {f"requests.{GPU}": "6"}},
}
# In a namespace without pods: a LimitRange would give a device to every container that requests none.
LIMITS = {
    "apiVersion": "v1",
    "kind": "LimitRange",
    "metadata": {"name": "gpus", "namespace": "kube-public"},
    "spec": {"limits": [{"type": "Container", "max": {GPU: "2"}}]},
}


def daemon_set(node: str) -> dict[str, Any]:
    """Return another device plugin for one node. It runs in the node's file system."""
    start = (
        "import os; os.chroot('/host'); os.chdir('/'); "
        f"os.execve('{VENDOR}/venv/bin/python', ['{VENDOR}/venv/bin/python', '{VENDOR}/plugin.py'], {{'PYTHONPATH': '{VENDOR}/current'}})"
    )
    container = {
        "name": "plugin",
        "image": "localhost/python:latest",
        "imagePullPolicy": "Never",
        "command": ["python3", "-c", start],
        "securityContext": {"privileged": True},
        "volumeMounts": [
            {"name": "host", "mountPath": "/host"},
            {"name": "plugins", "mountPath": "/var/lib/kubelet/device-plugins"},
        ],
    }
    spec = {
        "nodeSelector": {"kubernetes.io/hostname": node},
        "terminationGracePeriodSeconds": 5,
        "containers": [container],
        "volumes": [
            {"name": "host", "hostPath": {"path": "/"}},
            {"name": "plugins", "hostPath": {"path": "/var/lib/kubelet/device-plugins"}},
        ],
    }
    labels = {"app": "what-a-name"}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": "what-a-name", "namespace": "kube-system"},
        "spec": {"selector": {"matchLabels": labels}, "template": {"metadata": {"labels": labels}, "spec": spec}},
    }


def variables(interface: str) -> str:
    """Return the fleet's variables: the same layout on all nodes, and the kubelet interface."""
    return json.dumps(
        {
            "accelerator_layouts": [{"hosts": "all", "layout": LAYOUT}],
            "dra_driver_kubelet_interface": interface,
            "dra_driver_inventory_interval": 10,
        }
    )


def move(cluster: Cluster, direction: str = "forward", *arguments: str, interface: str = "", **more: Any) -> Recap:
    """Run the migration playbook. Evictions are permitted unless ``more`` changes that."""
    said = {"device_plugin_migration_direction": direction, "device_plugin_migration_evict": True, **more}
    wanted = interface or {"forward": "dra", "back": "device-plugin"}[direction]
    return cluster.playbook(
        "device_plugin_migration.yml", "-e", variables(wanted), "-e", json.dumps(said), *arguments, check=False
    )


def node_of(cluster: Cluster, name: str) -> dict[str, Any]:
    found: dict[str, Any] = cluster.get("node", name)
    return found


def offered(cluster: Cluster, node: str) -> dict[str, int]:
    """Return a Node's allocatable resources of the vendor, without those of quantity 0."""
    found = node_of(cluster, node)["status"].get("allocatable", {})
    return {name: int(number) for name, number in found.items() if name.startswith("nvidia.com/") and number != "0"}


def taints(cluster: Cluster, node: str) -> list[str]:
    return [each["key"] for each in node_of(cluster, node)["spec"].get("taints", []) if each["key"] == TAINT]


def pods_of(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    """Return a workload's pods that are not terminating."""
    items = cluster.get("pods", "-n", "default", "-l", f"app={name}")["items"]
    return [each for each in items if not each["metadata"].get("deletionTimestamp")]


def uids(cluster: Cluster) -> dict[str, str]:
    return {each["metadata"]["name"]: each["metadata"]["uid"] for each in cluster.get("pods", "-n", "default")["items"]}


def wait_ready(cluster: Cluster) -> None:
    for name, number in (("web", 2), ("parts", 1)):
        cluster.wait(
            f"{number} of {name} are ready",
            lambda name=name, number=number: (
                cluster.get("deployment", name, "-n", "default")["status"].get("readyReplicas", 0) == number
            ),
        )


def seen(cluster: Cluster, name: str) -> list[str]:
    """Return the UUIDs of the GPUs and MIG devices that NVML shows in each pod of a workload."""
    found = []
    for each in pods_of(cluster, name):
        pod_name = each["metadata"]["name"]
        log = cluster.wait("the pod's list", lambda pod_name=pod_name: cluster.log(pod_name))
        found += re.findall(r"UUID: ((?:GPU|MIG)-[0-9a-f-]+)", log)
    return found


class Readiness(threading.Thread):
    """Thread that polls the number of ready pods of ``web``. ``least`` is the minimum."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self._cluster = cluster
        self._ended = threading.Event()
        self.least = 2

    def run(self) -> None:
        while not self._ended.wait(1.0):
            try:
                status = self._cluster.get("deployment", "web", "-n", "default")["status"]
            except CommandFailed:
                continue
            self.least = min(self.least, int(status.get("readyReplicas", 0)))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        self.join()


@pytest.fixture(scope="module")
def plugged() -> Iterator[Cluster]:
    """Start two nodes with the device plugin, workloads for it, and a pod without a device; yield the cluster."""
    cluster, kept = Cluster("moved"), os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
    if not kept:
        cluster.world("down")
    cluster.world("up", "--nodes", "2", "--silicon", "8xH100", timeout=3000)
    first = cluster.playbook("site.yml", "-e", variables("device-plugin"), check=False)
    assert not first.failed, first.output
    for node in cluster.nodes():
        cluster.wait("offered", lambda node=node: offered(cluster, node) == {GPU: 7, PART: 4})
    bystander = pod("bystander", node=cluster.nodes()[0])
    cluster.apply(BUDGET, QUOTA, LIMITS, deployment("web", GPU, 2), deployment("parts", PART, 1), bystander)
    wait_ready(cluster)
    cluster.wait_running("bystander")
    yield cluster
    if not kept:
        cluster.world("down")


def test_report_shows_the_migration_and_changes_nothing(plugged: Cluster) -> None:
    before = uids(plugged)
    answer = move(plugged, "forward", "--check")
    assert not answer.failed, answer.output
    for line in (
        f"{GPU} becomes: unchanged in the pod. The DeviceClass gpu.nvidia.com, which ",
        f"{PART} becomes: unchanged in the pod. The DeviceClass mig-1g.10gb.nvidia.com, which the migration creates, provides it",
        f"ResourceQuota default/gpus, requests.{GPU} (2 of 6): still counts pods",
        f"LimitRange kube-public/gpus ({GPU}): still limits pods",
        "Deployment default/web",
        "these pods are evicted:",
    ):
        assert line in answer.output, line
    assert "default/bystander" not in answer.output
    assert uids(plugged) == before and plugged.slices() == []
    assert not any(taints(plugged, node) for node in plugged.nodes())


def test_no_pod_is_evicted_without_consent_or_against_the_fleet_file(plugged: Cluster) -> None:
    before = uids(plugged)
    silent = move(plugged, device_plugin_migration_evict="")
    assert (
        silent.failed
        and "The option evict does not allow the eviction" in silent.output
        and "default/web-" in silent.output
    )
    contradicted = move(plugged, interface="device-plugin")
    assert contradicted.failed and "Set it in the fleet file" in contradicted.output
    assert uids(plugged) == before and not any(taints(plugged, node) for node in plugged.nodes())


def test_migration_to_claims_node_by_node_keeps_pod_specs(plugged: Cluster) -> None:
    bystander = plugged.pod("bystander")["metadata"]["uid"]
    with Readiness(plugged) as readiness:
        recap = move(plugged)
    assert not recap.failed, recap.output
    assert readiness.least >= 1, "the budget allows one eviction at a time"
    wait_ready(plugged)
    for node in plugged.nodes():
        assert len(plugged.devices(node)) == DEVICES and offered(plugged, node) == {} and not taints(plugged, node)
    for name, resource in (("web", GPU), ("parts", PART)):
        for each in pods_of(plugged, name):
            assert "resourceClaims" not in each["spec"], "the pod was changed"
            assert each["spec"]["containers"][0]["resources"]["limits"] == {resource: "1"}
            (mapping,) = each["status"]["extendedResourceClaimStatus"]["requestMappings"]
            assert mapping["resourceName"] == resource
    gpus, parts = seen(plugged, "web"), seen(plugged, "parts")
    assert len(gpus) == 2 and len([each for each in parts if each.startswith("MIG-")]) == 1, (gpus, parts)
    claims = plugged.get("resourceclaims", "-n", "default")["items"]
    assert len(claims) == 3 and all("extended-resource-claim" in json.dumps(each["metadata"]) for each in claims)
    # The pod without a device was not affected.
    now = plugged.pod("bystander")
    assert now["metadata"]["uid"] == bystander and now["status"]["containerStatuses"][0]["restartCount"] == 0
    used = plugged.get("resourcequota", "gpus", "-n", "default")["status"]["used"]
    assert used[f"requests.{GPU}"] == "2", "counted once, as before"


def test_second_run_changes_nothing(plugged: Cluster) -> None:
    before = uids(plugged)
    again = move(plugged)
    assert (again.failed, again.changed) == (0, 0), again.output
    assert uids(plugged) == before


def test_interrupted_run_is_resumed(plugged: Cluster) -> None:
    node = plugged.nodes()[0]
    plugged.kubectl("taint", "node", node, f"{TAINT}=forward:NoSchedule")
    answer = move(plugged, "forward", "--check")
    assert f"left over: Node {node} has the taint" in answer.output
    recap = move(plugged)
    assert not recap.failed and not taints(plugged, node), recap.output


def test_claims_of_users_are_named_before_the_migration_back(plugged: Cluster) -> None:
    node = plugged.nodes()[0]
    documents = [claim("own", device_class="gpu.nvidia.com"), pod("written", "own", node=node)]
    plugged.apply(*documents)
    plugged.wait_running("written")
    before = uids(plugged)
    refused = move(plugged, "back")
    assert refused.failed and "default/written has claims that users wrote" in refused.output
    assert uids(plugged) == before and not any(taints(plugged, each) for each in plugged.nodes())
    plugged.delete(*reversed(documents))  # the claim stays as long as its pod


def test_migration_back_runs_the_same_pods_with_the_plugin(plugged: Cluster) -> None:
    with Readiness(plugged) as readiness:
        recap = move(plugged, "back")
    assert not recap.failed, recap.output
    assert readiness.least >= 1
    wait_ready(plugged)
    plugged.wait("no claim is left", lambda: not plugged.get("resourceclaims", "-n", "default")["items"])
    assert plugged.slices() == []
    for node in plugged.nodes():
        plugged.wait("the GPUs are offered again", lambda node=node: offered(plugged, node) == {GPU: 7, PART: 4})
        assert not taints(plugged, node)
    assert all("extendedResourceClaimStatus" not in each["status"] for each in pods_of(plugged, "web"))
    classes = [each["metadata"]["name"] for each in plugged.get("deviceclasses")["items"]]
    assert "mig-1g.10gb.nvidia.com" not in classes, "it was the move's own"
    again = move(plugged, "back")
    assert (again.failed, again.changed) == (0, 0), again.output


# ---------------------------------------------------------------------- another device plugin


@pytest.fixture(scope="module")
def foreign(plugged: Cluster) -> str:
    """Return the second node with another device plugin instead of our software; a pod has one of its devices."""
    first, node = plugged.nodes()
    plugged.kubectl("delete", "deployment", "web", "parts", "-n", "default")
    plugged.wait("all pods are deleted", lambda: not pods_of(plugged, "web") and not pods_of(plugged, "parts"))
    plugged.shell(node, f"cp -a /opt/dra-accelerators {VENDOR}")
    plugged.run(node, "sh", "-c", f"cat > {VENDOR}/plugin.py", text=PLUGIN)
    removed = plugged.playbook("remove.yml", "--limit", node, "-e", variables("device-plugin"), check=False)
    assert not removed.failed, removed.output
    plugged.apply(daemon_set(node))
    plugged.wait("the other plugin offers", lambda: offered(plugged, node).get(GPU) == 8)
    wanted = deployment("web", GPU, 1)
    wanted["spec"]["template"]["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    plugged.apply(wanted)
    plugged.kubectl("delete", "pdb", "web", "-n", "default")
    plugged.wait(
        "it runs", lambda: plugged.get("deployment", "web", "-n", "default")["status"].get("readyReplicas") == 1
    )
    assert first != node
    return node


#: The example's variables, with this DaemonSet instead of NVIDIA's.
NAMED = {
    **yaml.safe_load((EXAMPLES / "device-plugin-migration.yml").read_text(encoding="utf-8")),
    "device_plugin_migration_plugins": ["kube-system/what-a-name"],
}


def plugin_pods(cluster: Cluster) -> list[str]:
    items = cluster.get("pods", "-n", "kube-system", "-l", "app=what-a-name")["items"]
    return [each["spec"]["nodeName"] for each in items if not each["metadata"].get("deletionTimestamp")]


def test_another_plugin_is_found_by_its_resource_and_removed_only_if_named(plugged: Cluster, foreign: str) -> None:
    refused = move(plugged, "forward", "--limit", foreign)
    assert refused.failed and "kube-system/what-a-name serves device plugins on this node" in refused.output
    assert plugin_pods(plugged) == [foreign] and not taints(plugged, foreign)


def test_migration_from_another_plugin_to_claims(plugged: Cluster, foreign: str) -> None:
    recap = move(plugged, "forward", "--limit", foreign, **NAMED)
    assert not recap.failed, recap.output
    assert plugin_pods(plugged) == [] and node_of(plugged, foreign)["metadata"]["labels"][OFF] == "off"
    assert len(plugged.devices(foreign)) == DEVICES and not taints(plugged, foreign)
    plugged.wait(
        "it runs", lambda: plugged.get("deployment", "web", "-n", "default")["status"].get("readyReplicas") == 1
    )
    (each,) = pods_of(plugged, "web")
    assert each["status"]["extendedResourceClaimStatus"]["requestMappings"][0]["resourceName"] == GPU
    again = move(plugged, "forward", "--limit", foreign, **NAMED)
    assert (again.failed, again.changed) == (0, 0), again.output


def test_migration_back_to_another_plugin(plugged: Cluster, foreign: str) -> None:
    recap = move(plugged, "back", "--limit", foreign, interface="dra")
    assert not recap.failed, recap.output
    plugged.wait("the other plugin offers", lambda: offered(plugged, foreign).get(GPU) == 8)
    found = node_of(plugged, foreign)["metadata"]
    assert OFF not in found["labels"] and "dra.accelerators/device-plugin-migration" not in found.get("annotations", {})
    spec = plugged.get("daemonset", "what-a-name", "-n", "kube-system")["spec"]["template"]["spec"]
    assert not spec.get("affinity") and plugin_pods(plugged) == [foreign] and not taints(plugged, foreign)
    assert plugged.slices(foreign) == []
    plugged.wait(
        "it runs", lambda: plugged.get("deployment", "web", "-n", "default")["status"].get("readyReplicas") == 1
    )
    (each,) = pods_of(plugged, "web")
    assert "extendedResourceClaimStatus" not in each["status"]
