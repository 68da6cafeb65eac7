# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that an administrator taints a device: its pod is evicted, its partition is released, and no pod gets the
device.
"""

from __future__ import annotations

import json
from typing import Any

from tests.cluster.cluster import Cluster
from tests.cluster.manifests import claim, dynamic, example, pod


def worn_out(pool: str, device: str) -> dict[str, Any]:
    """Return the rule of the example for this device."""
    rule = example("device-taint.yaml")[0]
    rule["spec"]["deviceSelector"].update(pool=pool, device=device)
    return rule


def test_a_claim_that_tolerates_a_taint_gets_the_device_and_keeps_it(clean: Cluster) -> None:
    """Only one tainted GPU fits both claims: the claim without a toleration is pending until the taint is removed."""
    node = clean.nodes()[1]
    address = clean.devices(node)["gpu-3"]["attributes"]["resource.kubernetes.io/pciBusID"]["string"]
    there = [{"cel": {"expression": f"device.attributes['resource.kubernetes.io'].pciBusID == '{address}'"}}]
    rule = worn_out(node, "gpu-3")
    _rule, diagnosis, user = example("device-taint.yaml", node)
    diagnosis["spec"]["devices"]["requests"][0]["exactly"]["selectors"] = there
    other = claim("other", device_class="gpu.nvidia.com", expression=there[0]["cel"]["expression"])
    clean.apply(rule)
    try:
        clean.apply(other, pod("other", "other", node=node))
        clean.wait(
            "the reason of the scheduler",
            lambda: "Unschedulable" in json.dumps(clean.pod("other")["status"]),
            timeout=60,
        )
        clean.apply(diagnosis, user)
        clean.wait_running("diagnosis")
        (held,) = clean.get("resourceclaim", "diagnosis")["status"]["allocation"]["devices"]["results"]
        assert (held["pool"], held["device"]) == (node, "gpu-3")
        clean.delete(user, diagnosis)
        assert clean.pod("other")["status"]["phase"] == "Pending"
    finally:
        clean.delete(rule)
    clean.wait_running("other")


def test_pod_of_a_tainted_device_is_evicted_and_its_partition_released(clean: Cluster) -> None:
    node = clean.nodes()[1]
    clean.apply(
        claim("evicted", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
        pod("evicted", "evicted", node=node),
        claim("beside", device_class="mig.nvidia.com", expression=dynamic("2g.20gb")),
        pod("beside", "beside", node=node),
    )
    clean.wait_running("evicted", "beside")
    (held,) = clean.get("resourceclaim", "evicted")["status"]["allocation"]["devices"]["results"]
    rule = worn_out(held["pool"], held["device"])
    uid, beside = clean.uid("evicted"), clean.uid("beside")
    clean.apply(rule)
    try:
        clean.wait(
            "the pod is deleted", lambda: "NotFound" in clean.kubectl("get", "pod", "evicted", check=False, merge=True)
        )
        clean.wait("the driver has deleted the partition", lambda: clean.recorded(node) == {beside: "prepared"})
        assert len(clean.instances(node)) == 1
        assert clean.pod("beside")["status"]["phase"] == "Running"
        assert clean.uid("evicted") == uid, "the claim still exists"
        clean.apply(pod("next", "evicted", node=node))
        clean.wait_running("next")
        (other,) = clean.get("resourceclaim", "evicted")["status"]["allocation"]["devices"]["results"]
        assert other["device"] != held["device"]
    finally:
        clean.delete(rule)
