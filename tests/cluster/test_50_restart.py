# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test reboots, a driver that starts before its dependencies, and failures or deletions at these times: the driver
recovers.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.cluster.cluster import DRIVER_UNIT, Cluster
from tests.cluster.manifests import claim, dynamic, pod, static


def test_reboot_with_pods_on_static_and_dynamic_partitions(clean: Cluster) -> None:
    node = clean.nodes()[0]
    static_before = sorted(re.sub(r"Device\s+\d+", "", line) for line in clean.instances(node))
    clean.apply(
        claim("static", device_class="mig.nvidia.com", expression=static("3g.40gb")),
        claim("dynamic", device_class="mig.nvidia.com", expression=dynamic("2g.20gb")),
        pod("static", "static", node=node, restart="Always"),
        pod("dynamic", "dynamic", node=node, restart="Always"),
    )
    clean.wait_running("static", "dynamic")
    files_before = clean.cdi_files(node)
    boot_before = clean.run(node, "cat", "/proc/sys/kernel/random/boot_id")

    clean.world("reboot", node)

    assert clean.run(node, "cat", "/proc/sys/kernel/random/boot_id") != boot_before
    clean.wait_registered(node, timeout=180)
    clean.wait(
        "the static layout is restored, and so is the dynamic partition",
        lambda: len(clean.instances(node)) == len(static_before) + 1,
        timeout=180,
    )

    def restarted() -> bool:
        statuses = [clean.pod(name)["status"]["containerStatuses"][0] for name in ("static", "dynamic")]
        return all(status["restartCount"] >= 1 and "running" in status["state"] for status in statuses)

    clean.wait("both pods run again", restarted, timeout=300)
    for name, profile in (("static", "3g.40gb"), ("dynamic", "2g.20gb")):
        assert profile in clean.wait("log", lambda name=name: clean.log(name))
    assert sorted(clean.cdi_files(node)) == sorted(files_before)
    clean.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    clean.wait(
        "only the static layout is left",
        lambda: sorted(re.sub(r"Device\s+\d+", "", line) for line in clean.instances(node)) == static_before,
        timeout=60,
    )
    assert clean.cdi_files(node) == []


@pytest.mark.prove
def test_pod_deleted_while_its_node_was_down_leaves_nothing(clean: Cluster) -> None:
    node = clean.nodes()[1]
    clean.apply(
        claim("lost", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("lost", "lost", node=node)
    )
    clean.wait_running("lost")
    # A reboot removes the partition and the CDI file. The record stays, and only the driver removes it.
    assert clean.recorded(node) == {clean.uid("lost"): "prepared"}
    clean.world("stop", node)
    clean.kubectl("delete", "pod", "lost", "--force", "--grace-period=0")
    clean.kubectl("delete", "resourceclaim", "lost", "--wait=false")
    clean.world("start", node)
    clean.wait_registered(node, timeout=180)
    clean.wait(
        "the claim's record is ended", lambda: clean.status(node)["ready"] and not clean.recorded(node), timeout=180
    )
    assert (clean.instances(node), clean.cdi_files(node)) == ([], [])


def test_driver_starts_before_the_kubelet_and_before_the_api_server(clean: Cluster) -> None:
    node = clean.nodes()[1]
    clean.run(node, "systemctl", "stop", "kubelet.service", DRIVER_UNIT)
    clean.kubectl("delete", "resourceslices", "--field-selector", f"spec.nodeName={node}")
    clean.world("component", "stop", "apiserver")
    clean.run(node, "systemctl", "start", DRIVER_UNIT)
    clean.wait_registered(node)
    clean.world("component", "start", "apiserver")
    clean.wait("the API answers", lambda: clean.kubectl("get", "--raw", "/readyz") == "ok", timeout=120)
    # Its watches were refused until the API server had read its roles, and reconnect after a pause. A pod that is
    # created and deleted in that pause leaves its claim reserved (seen with Kubernetes 1.37). A restart lists the
    # objects instead.
    clean.world("component", "restart", "controller-manager")
    clean.run(node, "systemctl", "start", "kubelet.service")
    clean.wait("slices are published", lambda: len(clean.devices(node)) == 8 * 26, timeout=180)
    clean.apply(claim("early", device_class="gpu.nvidia.com"), pod("early", "early", node=node))
    clean.wait_running("early", timeout=240)


def test_driver_starts_without_the_gpu_driver_and_publishes_after_its_installation(clean: Cluster) -> None:
    node = clean.nodes()[1]
    library = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
    clean.shell(node, f"systemctl stop {DRIVER_UNIT} && mv {library} {library}.away && systemctl start {DRIVER_UNIT}")
    try:
        clean.wait_registered(node)
        clean.wait("no device is published", lambda: clean.devices(node) == {}, timeout=120)
    finally:
        clean.shell(node, f"mv {library}.away {library}")
    clean.wait("all devices are published, without a restart", lambda: len(clean.devices(node)) == 8 * 26, timeout=120)


def test_deleted_slices_are_published_again(clean: Cluster) -> None:
    node = clean.nodes()[1]
    before = {item["metadata"]["uid"] for item in clean.slices(node)}
    clean.kubectl("delete", "resourceslices", "--field-selector", f"spec.nodeName={node}")
    clean.wait("all devices are published again", lambda: len(clean.devices(node)) == 8 * 26, timeout=120)
    assert before.isdisjoint(item["metadata"]["uid"] for item in clean.slices(node))


def named_store(cluster: Cluster, name: str) -> str:
    """Return the store that has the claim's record, from the claim's status; empty if the status is not written yet."""
    devices = cluster.get("resourceclaim", name)["status"].get("devices", ())
    return next((str(device["data"]["driverStore"]) for device in devices if "data" in device), "")


@pytest.mark.prove
def test_corrupt_store_is_set_aside_and_claims_survive(clean: Cluster) -> None:
    node = clean.nodes()[1]
    clean.apply(
        claim("kept", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("kept", "kept", node=node)
    )
    clean.wait_running("kept")
    before = clean.instances(node)
    old = clean.wait("the claim's status names the store", lambda: named_store(clean, "kept"))
    store = "/var/lib/kubelet/plugins/gpu.nvidia.com/state.db"
    clean.shell(
        node,
        f"systemctl stop {DRIVER_UNIT} && rm -f {store}-wal {store}-shm && "
        f"printf 'not a database, long enough to be read as a header page' > {store} && systemctl start {DRIVER_UNIT}",
    )
    # The partition and its CDI file are not affected. The record was only in the store.
    clean.wait(
        "the claim is in the new store",
        lambda: clean.status(node)["ready"] and clean.recorded(node) == {clean.uid("kept"): "prepared"},
    )
    # The status names the new store. This distinguishes a claim with a lost record from a released one.
    clean.wait(
        "the claim's status names the new store", lambda: named_store(clean, "kept") not in {"", old}, timeout=180
    )
    assert clean.instances(node) == before and len(clean.cdi_files(node)) == 1
    assert "state.db.damaged-" in clean.shell(node, "ls /var/lib/kubelet/plugins/gpu.nvidia.com")
    clean.kubectl("delete", "pods,resourceclaims", "--all", "-n", "default", "--timeout=240s", timeout=300)
    clean.wait("the partition is deleted with its claim", lambda: clean.instances(node) == [], timeout=120)


def uuid_of(device: dict[str, Any]) -> str:
    """Return the UUID of a published device."""
    return str(device["attributes"]["uuid"]["string"])


def tainted(cluster: Cluster, node: str) -> set[str]:
    """Return the names of the node's devices with a GPU-lost taint."""
    found = cluster.devices(node)
    wanted = {"key": "gpu.nvidia.com/gpu-lost"}
    return {
        name
        for name, device in found.items()
        if any(wanted == {key: taint.get(key) for key in wanted} for taint in device.get("taints", ()))
    }


@pytest.mark.prove  # test_56 is the short version
def test_gpu_lost_on_the_bus_gets_no_pods_until_it_returns(clean: Cluster) -> None:
    node = clean.nodes()[1]
    names = clean.devices(node)
    of_gpu_3 = {name for name in names if name == "gpu-3" or name.startswith("gpu-3-")}
    assert len(of_gpu_3) == 26
    on_gpu_3 = f"{dynamic('1g.10gb')} && device.attributes['gpu.nvidia.com'].parentUUID == '{uuid_of(names['gpu-3'])}'"
    clean.run(node, "accelerator-simulator", "fault", "3", "lost")
    try:
        clean.wait("its devices are tainted, no others", lambda: tainted(clean, node) == of_gpu_3, timeout=120)
        clean.apply(
            claim("lost", device_class="mig.nvidia.com", expression=on_gpu_3),
            pod("lost", "lost", node=node),
            claim("beside", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")),
            pod("beside", "beside", node=node),
        )
        clean.wait_running("beside")
        assert clean.get("pod", "lost")["status"]["phase"] == "Pending"
        assert "allocation" not in clean.get("resourceclaim", "lost").get("status", {})
    finally:
        clean.heal(node)
    clean.wait_running("lost")
    assert tainted(clean, node) == set()


def test_running_driver_loads_a_changed_configuration(clean: Cluster) -> None:
    """Edit the config file like an administrator: a rule for one GPU, then an invalid change that has no effect, and
    back.
    """
    node, file = clean.nodes()[1], "/etc/dra-accelerators/driver.yaml"
    pid, slices = clean.driver_pid(node), len(clean.devices(node))
    former = clean.run(node, "cat", file)
    clean.apply(
        claim("stays", device_class="mig.nvidia.com", expression=dynamic("1g.10gb")), pod("stays", "stays", node=node)
    )
    clean.wait_running("stays")
    try:
        whole = former.replace("layout:", "layout:\n- match:\n    index: 7\n  mode: whole", 1)
        assert whole != former
        clean.shell(node, f"cat > {file} <<'EOF'\n{whole}EOF\nsystemctl reload {DRIVER_UNIT}")
        clean.wait("GPU 7 is offered whole alone", lambda: len(clean.devices(node)) == slices - 25)
        clean.shell(node, f"sed -i 's/^node_name: .*/node_name: another/' {file}")
        refused = clean.shell(node, f"dra-driver reload --config {file} 2>&1; echo $?")
        assert "node_name cannot change while the driver runs" in refused and refused.split()[-1] == "1"
        assert clean.status(node)["ready"] and "a later configuration is refused" in clean.shell(
            node, "dra-driver status"
        )
    finally:
        clean.shell(node, f"cat > {file} <<'EOF'\n{former}EOF\nsystemctl reload {DRIVER_UNIT}")
    clean.wait("every placement is published again", lambda: len(clean.devices(node)) == slices)
    assert clean.driver_pid(node) == pid
    assert "1g.10gb" in clean.log("stays")
