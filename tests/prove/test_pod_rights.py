# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test that the driver's pod needs each of its permissions: without one, the related operation is rejected or fails
with a message that names it.

The replacement pod is created from the DaemonSet's template. With all permissions the same claims run before and
after, so that a failure is caused by the missing permission only. test_pod_form.py tests hostPID.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.manifests import claim, device_named, dynamic, example, mps, pod
from tests.cluster.test_28_mps import computing
from tests.prove.pods import NAMESPACE, STAND_IN, Rights, bare_world, no_capability, no_handler, no_mount, nothing

MACHINES = [
    {"match": {"index": [5, 6]}, "mode": "dynamic", "passthrough": True},
    {"match": {"index": [3]}, "mode": "whole"},
    {"match": {}, "mode": "dynamic"},
]
KINDS = ("partition", "shared", "shared partition", "machine")
# Without these the pod does not become ready: the change, and the expected message.
STARTS = {
    "SYS_CHROOT": (no_capability("SYS_CHROOT"), ("CAP_SYS_CHROOT",)),
    "plugin-folder": (no_mount("/var/lib/kubelet/plugins/gpu.nvidia.com"), ("/plugins/gpu.nvidia.com", "Read-only")),
    "registration": (no_mount("/var/lib/kubelet/plugins_registry"), ("/plugins_registry", "Read-only")),
}
# Without these the pod is ready but cannot prepare this kind of claim.
CLAIMS = {
    "SYS_ADMIN": (no_capability("SYS_ADMIN"), "partition", ("lacks the permission", "CAP_SYS_ADMIN")),
    "MKNOD": (no_capability("MKNOD"), "shared partition", ("cannot be made", "not permitted")),
    "SYS_PTRACE": (no_capability("SYS_PTRACE"), "machine", ("this process has no CAP_SYS_PTRACE",)),
    "DAC_READ_SEARCH": (no_capability("DAC_READ_SEARCH"), "machine", ("(sleep) keeps its open files to itself",)),
    "cdi": (no_mount("/run/cdi"), "partition", ("cannot be written", "Read-only", "/run/cdi")),
    "companions": (no_mount("/run/dra-accelerators/companions"), "shared", ("cannot be written: Read-only",)),
    "devices": (no_mount("/sys/devices"), "machine", ("driver_override", "Read-only")),
    "drivers": (no_mount("/sys/bus/pci/drivers"), "machine", ("/sys/bus/pci/drivers", "Read-only")),
}


@pytest.fixture(scope="module")
def rights() -> Iterator[Rights]:
    """Yield a node whose driver's pod has all permissions for GPUs. Then the DaemonSet does not run there, and
    replacement pods do.

    A process of another user runs there, as on every node: root without a capability cannot read its directory in
    /proc.
    """
    with bare_world("pod") as form:
        layouts = [{"hosts": form.node, "layout": MACHINES}]
        made = form.playbook("site.yml", dra_driver_pod_passthrough=True, accelerator_layouts=layouts)
        assert not made.failed, made.output
        form.cluster.run(form.node, "systemd-run", "--unit=of-another-user", "--uid=65534", "sleep", "infinity")
        yield Rights(form)


def wanted(rights: Rights, kind: str, name: str) -> list[dict[str, Any]]:
    """Return a claim of one kind and its pod."""
    node = rights.node
    if kind == "machine":
        documents = example("vfio.yaml", node)
        for each in documents:
            each["metadata"]["name"] = name
        documents[1]["spec"]["resourceClaims"][0]["resourceClaimName"] = name
        return documents
    if kind == "partition":
        part = claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb"))
        return [part, pod(name, name, node=node)]
    if kind == "shared partition":
        first = claim(name, device_class="mig.nvidia.com", expression=dynamic("1g.10gb"))
        first["spec"]["devices"]["config"] = [mps("MigDeviceConfig", defaultActiveThreadPercentage=50)]
    else:
        asked = ("nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader", "-i", "3")
        uuid = rights.cluster.run(node, *asked).strip()
        first = claim(name, device_class="gpu.nvidia.com", expression=device_named(uuid))
        first["spec"]["devices"]["config"] = [mps(defaultActiveThreadPercentage=25)]
    return [first, computing(name, name, node)]


def run_each_kind(rights: Rights, suffix: str) -> None:
    """Run and delete each kind of claim."""
    for kind in KINDS:
        name = f"{kind.replace(' ', '-')}-{suffix}"
        documents = wanted(rights, kind, name)
        rights.cluster.apply(*documents)
        rights.cluster.wait_running(name)
        rights.cluster.delete(*reversed(documents))
    rights.cluster.wait("nothing is left of them", lambda: not rights.cluster.recorded(rights.node))


def test_pod_with_all_rights_serves_each_kind_of_claim(rights: Rights) -> None:
    with rights.standing_in(nothing):
        rights.cluster.wait("the pod serves", rights.ready)
        assert rights.opened("/dev/nvidiactl") == "ENXIO"
        run_each_kind(rights, "first")


@pytest.mark.parametrize("less", STARTS)
def test_pod_without_a_required_right_does_not_serve_and_logs_the_reason(rights: Rights, less: str) -> None:
    change, said = STARTS[less]
    with rights.standing_in(change):
        rights.cluster.wait(
            f"the log of the pod contains {' and '.join(said)}",
            lambda: all(each in rights.words() for each in said),
            timeout=60,
        )
        assert not rights.ready(), json.dumps(rights.cluster.pod(STAND_IN, NAMESPACE)["status"])


def test_without_the_runtime_handler_no_device_can_be_opened(rights: Rights) -> None:
    with rights.standing_in(no_handler):
        # The driver waits for its devices, as on a node whose vendor driver is installed later, and is not ready.
        rights.cluster.wait(
            "its probe reports the reason", lambda: "Opening NVML" in rights.events(STAND_IN, NAMESPACE), timeout=120
        )
        assert rights.opened("/dev/nvidiactl") == "EPERM"
        assert not rights.ready(), rights.words()


@pytest.mark.parametrize("less", CLAIMS)
def test_pod_without_a_right_rejects_the_claim_by_name(rights: Rights, less: str) -> None:
    change, kind, said = CLAIMS[less]
    name = f"without-{less.lower().replace('_', '-')}"
    rights.verify_rejected(change, wanted(rights, kind, name), said)


def test_pod_with_restored_rights_serves_each_kind_of_claim(rights: Rights) -> None:
    rights.label("=daemonset")
    rights.cluster.wait("the DaemonSet's pod serves", lambda: rights.cluster.status(rights.node)["ready"], timeout=120)
    run_each_kind(rights, "last")
