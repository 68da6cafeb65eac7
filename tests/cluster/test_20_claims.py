# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that pods claim, share, and release exactly the requested device or partition, with the examples unchanged."""

from __future__ import annotations

import json
import re
from typing import Any

import yaml

from tests.cluster.cluster import EXAMPLES, PLUGIN_DIRECTORY, Cluster
from tests.cluster.manifests import claim, dynamic, pod


def pods_of(example: str) -> list[str]:
    """Return the names of the pods in an example's file."""
    objects = yaml.safe_load((EXAMPLES / example).read_text(encoding="utf-8"))["items"]
    return [each["metadata"]["name"] for each in objects if each["kind"] == "Pod"]


def lines(log: str, word: str) -> list[str]:
    return [line.strip() for line in log.splitlines() if line.strip().startswith(word)]


def test_whole_gpu_chosen_by_memory(clean: Cluster) -> None:
    example = EXAMPLES / "whole-gpu-by-memory.yaml"
    clean.apply(example)
    (name,) = pods_of(example.name)
    clean.wait_running(name)
    log = clean.wait("the pod's list", lambda: clean.log(name))
    assert len(lines(log, "GPU ")) == 1, log
    assert not lines(log, "MIG "), log


def test_two_pods_get_two_dynamic_partitions(clean: Cluster) -> None:
    example = EXAMPLES / "two-dynamic-mig.yaml"
    clean.apply(example)
    names = pods_of(example.name)
    assert len(names) == 2
    clean.wait_running(*names)
    seen = set()
    for name in names:
        log = clean.wait(f"the list of {name}", lambda name=name: clean.log(name))
        (partition,) = lines(log, "MIG ")
        assert "1g.10gb" in partition
        seen.add(re.search(r"MIG-[0-9a-f-]+", partition).group(0))  # type: ignore[union-attr]
    assert len(seen) == 2, "each pod has a separate partition"


def test_static_partition_is_allocated_to_the_requesting_pod(clean: Cluster) -> None:
    example = EXAMPLES / "static-mig.yaml"
    before = clean.instances(clean.nodes()[0])
    clean.apply(example)
    (name,) = pods_of(example.name)
    clean.wait_running(name)
    log = clean.wait("the pod's list", lambda: clean.log(name))
    (partition,) = lines(log, "MIG ")
    assert "3g.40gb" in partition
    uuid = re.search(r"MIG-[0-9a-f-]+", partition).group(0)  # type: ignore[union-attr]
    assert any(uuid in line for line in before), "the partition is the one that the layout made"
    clean.delete(example)
    assert clean.instances(clean.nodes()[0]) == before, "a static partition outlives its claim"


def test_two_containers_share_one_claim(clean: Cluster) -> None:
    example = EXAMPLES / "shared-claim.yaml"
    clean.apply(example)
    (name,) = pods_of(example.name)
    clean.wait_running(name)
    containers = [container["name"] for container in clean.pod(name)["spec"]["containers"]]
    assert len(containers) == 2
    logs = [
        clean.wait(f"list of {container}", lambda container=container: clean.log(name, container=container))
        for container in containers
    ]
    first, second = (re.findall(r"(?:GPU|MIG)-[0-9a-f-]{36}", log) for log in logs)
    assert first and first == second


def test_claim_that_cannot_fit_waits_with_a_reason(clean: Cluster) -> None:
    example = EXAMPLES / "does-not-fit.yaml"
    clean.apply(example)
    (name,) = pods_of(example.name)
    clean.wait("the scheduler's reason", lambda: "cannot allocate all claims" in clean.kubectl("describe", "pod", name))
    assert clean.pod(name)["status"]["phase"] == "Pending"


def test_pod_sees_only_its_partition(clean: Cluster) -> None:
    clean.apply(claim("only", device_class="mig.nvidia.com", expression=dynamic("2g.20gb")), pod("only", "only"))
    clean.wait_running("only")
    clean.wait("the pod's list", lambda: clean.log("only"))
    others = clean.kubectl("exec", "only", "--", "sh", "-c", "ls /dev | grep -E '^nvidia[0-9]+$'; ls /dev/nvidia-caps")
    assert len(re.findall(r"^nvidia\d+$", others, re.MULTILINE)) == 1, others
    assert len(re.findall(r"^nvidia-cap\d+$", others, re.MULTILINE)) == 2, others
    made = clean.kubectl(
        "exec",
        "only",
        "--",
        "sh",
        "-c",
        "for n in 0 1 2 3 4 5 6 7; do mknod /tmp/n$n c 195 $n; (: < /tmp/n$n) 2>&1; done; true",
    )
    assert made.count("Operation not permitted") == 7, made


def test_prepare_is_idempotent_after_a_kubelet_restart(clean: Cluster) -> None:
    """A restarted kubelet does not know the prepared claims. It prepares them again when it recreates the pod's
    sandbox.
    """
    clean.apply(
        claim("again", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
        pod("again", "again", restart="Always"),
    )
    clean.wait_running("again")
    node, uid = clean.pod("again")["spec"]["nodeName"], clean.uid("again")
    before = clean.instances(node)
    assert clean.said(node, ": prepared claim", uid) == 1
    clean.run(node, "systemctl", "stop", "kubelet.service")
    clean.shell(node, "crictl stopp $(crictl pods --quiet --name again)")
    clean.run(node, "systemctl", "start", "kubelet.service")
    clean.wait("the kubelet prepares the claim again", lambda: clean.said(node, ": prepared claim", uid) == 2)
    clean.wait(
        "the pod runs in its new sandbox",
        lambda: (
            clean.pod("again")["status"]["containerStatuses"][0]["restartCount"] == 1
            and "MIG 1g.10gb" in clean.log("again")
        ),
    )
    assert clean.instances(node) == before and clean.recorded(node) == {uid: "prepared"}


#: Runs on a node with the driver's own stubs: the call of a kubelet that supports only v1beta1.
OLDER_KUBELET = """
import json, sys, grpc
from dra_driver.protocol import dra_v1beta1_pb2 as messages, dra_v1beta1_pb2_grpc as service
verb, directory, uid, name = sys.argv[1:]
with grpc.insecure_channel(f"unix:{directory}/dra.sock") as channel:
    plugin = service.DRAPluginStub(channel)
    claim = messages.Claim(namespace="default", uid=uid, name=name)
    if verb == "prepare":
        answer = plugin.NodePrepareResources(messages.NodePrepareResourcesRequest(claims=[claim])).claims[uid]
        devices = [[each.pool_name, each.device_name, list(each.cdi_device_ids)] for each in answer.devices]
    else:
        answer = plugin.NodeUnprepareResources(messages.NodeUnprepareResourcesRequest(claims=[claim])).claims[uid]
        devices = []
    print(json.dumps({"error": answer.error, "devices": devices}))
"""


def call_as_older_kubelet(cluster: Cluster, node: str, verb: str, uid: str, name: str) -> dict[str, Any]:
    """Return the driver's answer to a v1beta1 call."""
    python = ("env", "PYTHONPATH=/opt/dra-accelerators/current", "/opt/dra-accelerators/venv/bin/python")
    said = cluster.run(node, *python, "-c", OLDER_KUBELET, verb, PLUGIN_DIRECTORY, uid, name)
    answer: dict[str, Any] = json.loads(said)
    return answer


def test_kubelet_with_v1beta1_gets_the_same_devices(clean: Cluster) -> None:
    clean.apply(claim("older", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("older", "older"))
    clean.wait_running("older")
    node = clean.pod("older")["spec"]["nodeName"]
    stored = clean.get("resourceclaim", "older", "-n", "default")
    (allocated,) = stored["status"]["allocation"]["devices"]["results"]
    uid = stored["metadata"]["uid"]
    before = clean.instances(node), clean.cdi_files(node)
    answer = call_as_older_kubelet(clean, node, "prepare", uid, "older")
    assert answer["error"] == ""
    ((pool, device, identifiers),) = answer["devices"]
    assert (pool, device) == (allocated["pool"], allocated["device"])
    assert identifiers and all(uid in each for each in identifiers)
    assert (clean.instances(node), clean.cdi_files(node)) == before
    answer = call_as_older_kubelet(clean, node, "prepare", "00000000-0000-0000-0000-000000000000", "older")
    assert answer["error"] and not answer["devices"]
    clean.kubectl("delete", "pod", "older", "-n", "default")
    # Unpreparing a released claim succeeds.
    assert call_as_older_kubelet(clean, node, "unprepare", uid, "older") == {"error": "", "devices": []}


def test_claim_with_an_invalid_configuration_is_rejected_with_a_reason(clean: Cluster) -> None:
    wish = claim("sharing", device_class="gpu.nvidia.com")
    wish["spec"]["devices"]["config"] = [
        {
            "opaque": {
                "driver": "gpu.nvidia.com",
                "parameters": {
                    "apiVersion": "resource.nvidia.com/v1beta1",
                    "kind": "GpuConfig",
                    "sharing": {"strategy": "MPS", "mpsConfig": {"defaultActiveThreadPercentage": 150}},
                },
            }
        }
    ]
    clean.apply(wish, pod("sharing", "sharing"))
    clean.wait(
        "the refusal as an event",
        lambda: (
            "defaultActiveThreadPercentage is 150; expected a whole number from 1 to 100 percent"
            in " ".join(clean.kubectl("get", "events", "-n", "default", "-o", "yaml").split())
        ),
    )
    assert clean.pod("sharing")["status"]["phase"] == "Pending"
