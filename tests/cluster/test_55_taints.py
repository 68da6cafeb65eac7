# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""An administrator taints a device: its pod is evicted, what the pod had is given back, and nobody gets the device."""

from __future__ import annotations

from tests.cluster.cluster import DRIVER, Cluster
from tests.cluster.manifests import claim, dynamic, pod


def test_the_pod_of_a_tainted_device_is_evicted_and_its_partition_given_back(clean: Cluster) -> None:
    node = clean.nodes()[1]
    clean.apply(
        claim("evicted", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
        pod("evicted", "evicted", node=node),
        claim("beside", device_class="mig.nvidia.com", expression=dynamic("2g.20gb")),
        pod("beside", "beside", node=node),
    )
    clean.wait_running("evicted", "beside")
    (held,) = clean.get("resourceclaim", "evicted")["status"]["allocation"]["devices"]["results"]
    rule = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "DeviceTaintRule",
        "metadata": {"name": "worn-out"},
        "spec": {
            "deviceSelector": {"driver": DRIVER, "pool": held["pool"], "device": held["device"]},
            "taint": {"key": "example.com/worn-out", "value": "yes", "effect": "NoExecute"},
        },
    }
    uid, beside = clean.uid("evicted"), clean.uid("beside")
    clean.apply(rule)
    try:
        clean.wait(
            "the pod is gone", lambda: "NotFound" in clean.kubectl("get", "pod", "evicted", check=False, merge=True)
        )
        clean.wait("the driver has given the partition back", lambda: clean.recorded(node) == {beside: "prepared"})
        assert len(clean.instances(node)) == 1
        assert clean.pod("beside")["status"]["phase"] == "Running"
        assert clean.uid("evicted") == uid, "the claim itself stays"
        clean.apply(pod("next", "evicted", node=node))
        clean.wait_running("next")
        (other,) = clean.get("resourceclaim", "evicted")["status"]["allocation"]["devices"]["results"]
        assert other["device"] != held["device"]
    finally:
        clean.delete(rule)
