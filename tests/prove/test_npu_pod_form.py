# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test an NPU node whose driver runs as a pod, from the first run to the removal.

A separate world with one node of eight 310P. Each test starts from the state that the previous one left.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cluster.cluster import DRIVER_UNIT, EXAMPLES
from tests.cluster.manifests import claim, pod
from tests.cluster.npus import NpuCluster
from tests.prove.pods import NAMESPACE, PodForm, bare_world, images, the_pod
from tests.prove.test_npus import LAYOUT, SEEN, has_only_its_layout, seen_by, templates

MACHINES = [
    {"match": {"index": 0}, "mode": "static", "partitions": {"vir04": 1, "vir02": 1}},
    {"match": {"index": [1, 2, 3]}, "mode": "whole"},
    {"match": {}, "mode": "dynamic"},
]
#: A whole chip, a static vNPU of the layout, dynamic vNPUs, and two chips of one machine.
WAYS = ("ascend/whole-npu.yaml", "ascend/static-vnpu.yaml", "ascend/two-dynamic-vnpus.yaml", "ascend/near-npus.yaml")
RIGHTS = ["DAC_OVERRIDE", "MKNOD", "SYS_ADMIN", "SYS_CHROOT"]


@pytest.fixture(scope="module")
def form() -> Iterator[PodForm]:
    """Yield a bare world with NPUs and its footprint."""
    with bare_world("npu-pod", "8x310P-Pro", NpuCluster, MACHINES) as form:
        yield form


@pytest.fixture()
def npus(form: PodForm) -> NpuCluster:
    """Return its cluster."""
    assert isinstance(form.cluster, NpuCluster)
    return form.cluster


def test_first_run_creates_the_layout_and_second_run_changes_nothing(form: PodForm, npus: NpuCluster) -> None:
    checked = form.playbook("site.yml", "--check", "--diff")
    assert not checked.failed and "DaemonSet" in checked.output, checked.output
    assert npus.footprint() | images(npus, form.node) == form.before
    first = form.playbook("site.yml")
    assert not first.failed, first.output
    assert templates(npus) == LAYOUT
    again = form.playbook("site.yml")
    assert (again.failed, again.changed) == (0, 0), again.output


def test_pod_has_the_npu_capabilities_and_is_not_privileged(form: PodForm) -> None:
    (container,) = the_pod(form.cluster)["spec"]["containers"]
    context = container["securityContext"]
    assert not context["privileged"] and context["readOnlyRootFilesystem"]
    assert sorted(context["capabilities"]["add"]) == RIGHTS and context["capabilities"]["drop"] == ["ALL"]
    seen = form.sees()
    assert "/host/run/cdi" in seen["writable"] and not any("cfg_lock" in each for each in seen["writable"])
    assert not {"/host", "/host/run", "/host/proc", "/host/sys"} & set(seen["writable"])
    assert len(seen["opened"]) >= 3 and set(seen["opened"].values()) == {"EROFS"}, seen["opened"]


@pytest.mark.parametrize("example", WAYS)
def test_pod_sees_its_claimed_devices(npus: NpuCluster, example: str) -> None:
    npus.apply(EXAMPLES / example)
    npus.wait_running(*SEEN[example])
    for each, names in SEEN[example].items():
        assert len(seen_by(npus, each)) == len(names)
    npus.delete(EXAMPLES / example)
    npus.wait("the node has only its layout", lambda: has_only_its_layout(npus))


def test_vnpus_survive_the_driver_pod_and_the_next_pod_deletes_them(form: PodForm, npus: NpuCluster) -> None:
    not_yet = "!has(device.attributes['npu.huawei.com'].uuid)"
    documents = [
        claim("kept", device_class="ascend-310p-1-4", expression=not_yet),
        pod("kept", "kept", node=form.node),
    ]
    npus.apply(*documents)
    npus.wait_running("kept")
    held, before = templates(npus), the_pod(npus)
    assert len(held) == len(LAYOUT) + 1
    npus.kubectl("delete", "pod", before["metadata"]["name"], "-n", NAMESPACE, "--timeout=120s", timeout=150)
    npus.wait("another pod serves", lambda: _serves(npus, form.node, before["metadata"]["uid"]))
    assert templates(npus) == held and list(npus.recorded(form.node).values()) == ["prepared"]
    # This pod destroys the vNPUs that the previous pod created.
    npus.delete(*reversed(documents))
    npus.wait("the node has only its layout", lambda: has_only_its_layout(npus))


def _serves(npus: NpuCluster, node: str, former: str) -> bool:
    answer = npus.status(node)
    return bool(answer["ready"]) and answer["role"] == "serving" and answer["instance"] not in ("", former)


def test_removal_leaves_nothing(form: PodForm, npus: NpuCluster) -> None:
    removed = form.playbook("remove.yml", "-e", "accelerator_remove_reset_layout=true")
    assert not removed.failed, removed.output
    npus.wait(
        "no log directory of a pod of the driver", lambda: NAMESPACE not in npus.run(form.node, "ls", "/var/log/pods")
    )
    after = npus.footprint() | images(npus, form.node)
    # The vendor's driver keeps a backup of its vNPU config.
    keys = {key for key in form.before.keys() | after.keys() if not key.endswith("/etc/vnpu.cfg.bak")}
    difference = {key: (form.before.get(key), after.get(key)) for key in keys}
    assert {key: both for key, both in difference.items() if both[0] != both[1]} == {}
    assert NAMESPACE not in npus.kubectl("get", "namespaces", "-o", "name")
    assert "not-found" in npus.run(form.node, "systemctl", "show", "--property=LoadState", DRIVER_UNIT)
