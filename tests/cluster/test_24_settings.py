# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test device settings of claims and classes: visible in the pod and on the node, and restored afterwards."""

from __future__ import annotations

import json
import re

import yaml

from tests.cluster.cluster import DRIVER, EXAMPLES, Cluster
from tests.cluster.manifests import claim, pod, settings

FIELDS = "power.limit,compute_mode,clocks.gr"


def shown(cluster: Cluster, node: str, uuid: str) -> tuple[str, ...]:
    """Return power limit, compute mode, clock, and time slice of a GPU from the node's nvidia-smi."""
    fields = cluster.run(node, "nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader", "-i", uuid)
    slices = cluster.run(node, "nvidia-smi", "compute-policy", "-l", "-i", uuid)
    return (*fields.strip().split(", "), slices.split()[-1])


def uuid_in(log: str) -> str:
    (uuid,) = set(re.findall(r"GPU-[0-9a-f-]{36}", log))
    return str(uuid)


DEFAULT = ("700.00 W", "Default", "345 MHz", "Default")


def test_containers_of_one_claim_share_a_gpu_by_time_slicing(clean: Cluster) -> None:
    example = EXAMPLES / "time-slicing.yaml"
    clean.apply(example)
    clean.wait_running("time-slicing")
    logs = [
        clean.wait(f"list of {name}", lambda name=name: clean.log("time-slicing", container=name))
        for name in ("first", "second")
    ]
    uuid = uuid_in("".join(logs))
    node = clean.pod("time-slicing")["spec"]["nodeName"]
    assert shown(clean, node, uuid) == (*DEFAULT[:3], "Long")
    inside = clean.kubectl("exec", "time-slicing", "-c", "second", "--", "nvidia-smi", "compute-policy", "-l")
    assert uuid in inside and inside.split()[-1] == "Long"
    clean.delete(example)
    assert shown(clean, node, uuid) == DEFAULT


def test_settings_of_class_and_claim_are_merged(clean: Cluster) -> None:
    """Manually set values are restored after the claim was deleted."""
    example = EXAMPLES / "device-settings.yaml"
    documents = yaml.safe_load(example.read_text(encoding="utf-8"))["items"]
    (wanted,) = [each for each in documents if each["kind"] == "ResourceClaim"]
    sharing = {"strategy": "TimeSlicing", "timeSlicingConfig": {"interval": "Short"}}
    parameters = {"apiVersion": "resource.nvidia.com/v1beta1", "kind": "GpuConfig", "sharing": sharing}
    wanted["spec"]["devices"]["config"] = [{"opaque": {"driver": DRIVER, "parameters": parameters}}]
    nodes = clean.nodes()
    for node in nodes:
        clean.run(node, "nvidia-smi", "-pl", "650")
    try:
        clean.apply(*documents)
        clean.wait_running("device-settings")
        log = clean.wait("the output of the pod", lambda: clean.log("device-settings"))
        assert "400.00 W" in log
        uuid, node = uuid_in(log), clean.pod("device-settings")["spec"]["nodeName"]
        assert shown(clean, node, uuid) == ("400.00 W", *DEFAULT[1:3], "Short")
        clean.delete(*reversed(documents))
        assert shown(clean, node, uuid) == ("650.00 W", *DEFAULT[1:])
    finally:
        for node in nodes:
            clean.run(node, "nvidia-smi", "-pl", "700")
        clean.delete(documents[0])


def memory_lock(cluster: Cluster, node: str, uuid: str) -> tuple[int, int]:
    """Return the locked memory clocks of a GPU from the simulator, because NVML cannot query them."""
    gpus = json.loads(cluster.run(node, "accelerator-simulator", "show", "--json"))["gpus"]
    (gpu,) = [each for each in gpus if each["uuid"] == uuid]
    return gpu["locked_memory_clock_minimum_mhz"], gpu["locked_memory_clock_maximum_mhz"]


def test_settings_apply_only_to_the_gpu_of_the_claim(clean: Cluster) -> None:
    """Power, clocks, and compute mode at once. Hopper has no workload profiles and no locked memory clocks:
    test_81_blackwell.py tests them.
    """
    example = EXAMPLES / "tuned-gpu.yaml"
    clean.apply(example)
    clean.wait_running("tuned-gpu")
    log = clean.wait("the output of the pod", lambda: "done" in (said := clean.log("tuned-gpu")) and said)
    uuid, node = uuid_in(log), clean.pod("tuned-gpu")["spec"]["nodeName"]
    assert f"{uuid}, 450.00 W, Exclusive_Process, 900 MHz, 2619 MHz\n" in log
    assert "feature is not supported on this device" in log
    assert shown(clean, node, uuid) == ("450.00 W", "Exclusive_Process", "900 MHz", "Default")
    (result,) = clean.get("resourceclaim", "tuned-gpu")["status"]["allocation"]["devices"]["results"]
    assert result["request"] == "gpu/hopper"
    clean.delete(example)
    assert shown(clean, node, uuid) == DEFAULT


def test_settings_survive_a_driver_restart_and_end_with_the_claim(clean: Cluster) -> None:
    """A restarted driver applies the settings again: it cannot read all of them, and missed changes during its
    downtime.
    """
    node = clean.nodes()[1]
    wanted = claim("tuned", device_class="gpu.nvidia.com")
    wanted["spec"]["devices"]["config"] = [
        settings(graphicsClocks={"minimum": 900, "maximum": 1200}, computeMode="ExclusiveProcess")
    ]
    documents = (wanted, pod("tuned", "tuned", node=node))
    clean.apply(*documents)
    clean.wait_running("tuned")
    uuid = uuid_in(clean.wait("the pod's list", lambda: clean.log("tuned")))
    tuned = ("700.00 W", "Exclusive_Process", "900 MHz", "Default")
    assert shown(clean, node, uuid) == tuned
    clean.run(node, "nvidia-smi", "-rgc", "-i", uuid)
    assert shown(clean, node, uuid)[2] == "345 MHz"
    clean.restart_driver(node)
    clean.wait("the clocks are locked again", lambda: shown(clean, node, uuid) == tuned)
    clean.delete(*reversed(documents))
    assert shown(clean, node, uuid) == DEFAULT


def test_setting_out_of_range_is_rejected_with_the_range(clean: Cluster) -> None:
    wanted = claim("greedy", device_class="gpu.nvidia.com")
    wanted["spec"]["devices"]["config"] = [settings(powerLimit=900, graphicsClocks={"maximum": 100})]
    clean.apply(wanted, pod("greedy", "greedy"))
    events = clean.wait(
        "the refusal as an event",
        lambda: (
            "cannot set device gpu-" in (said := " ".join(clean.kubectl("get", "events", "-o", "yaml").split()))
            and said
        ),
    )
    assert "powerLimit is 900; expected a whole number from 200 to 700 W" in events
    assert "graphicsClocks.maximum is 100; expected a whole number from 345 to 1980 MHz" in events
    assert clean.pod("greedy")["status"]["phase"] == "Pending"
