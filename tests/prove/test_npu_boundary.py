# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Test nodes whose kernel driver treats each process outside the host's mount namespace as a container: with the
driver as a service, then as a pod.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.cluster.cluster import DRIVER_UNIT
from tests.cluster.manifests import claim, pod
from tests.cluster.npus import NpuCluster, npu_pod
from tests.prove.pods import PodForm, bare_world

HELPER = "dra-accelerators-dcmi.service"
LAYOUT = [
    {"match": {"index": [0, 1]}, "mode": "whole"},
    {"match": {"index": 2}, "mode": "static", "partitions": {"vir02": 1}},
    {"match": {}, "mode": "dynamic"},
]
RULES = {"administrator": "mount-namespace", "single-thread": True}
WHOLE = "has(device.attributes['npu.huawei.com'].uuid) && device.attributes['npu.huawei.com'].type == 'npu'"
ON_DEMAND = "!has(device.attributes['npu.huawei.com'].uuid)"
FORMS = ("service", "daemonset")
NO_LIBRARY = "npu-smi-failed"
LIBRARY_FOLDER = "/usr/local/Ascend/driver/lib64"


@pytest.fixture(scope="module")
def form() -> Iterator[PodForm]:
    """Yield a bare world with NPUs under the rules."""
    with bare_world("npu-boundary", "8x310P-Pro", NpuCluster, LAYOUT) as form:
        path = "/etc/accelerator-simulator/machine.json"
        machine = json.loads(form.cluster.run(form.node, "cat", path))
        machine["ascend_library"] = {**machine.get("ascend_library", {}), **RULES}
        form.cluster.shell(
            form.node, f"cat > {path} <<'END'\n{json.dumps(machine)}\nEND\nsystemctl restart accelerator-simulator"
        )
        yield form


@pytest.mark.parametrize("way", FORMS)
def test_workload_has_an_npu_while_the_driver_runs_and_restarts(form: PodForm, way: str) -> None:
    npus = form.cluster
    assert isinstance(npus, NpuCluster)
    first = form.playbook("site.yml", dra_driver_deploy_as=way)
    assert not first.failed, first.output
    assert npus.instances(form.node) == ["2 132 vir02"], "the layout cuts it"
    assert npus.run(form.node, "systemctl", "is-active", HELPER).strip() == "active"
    again = form.playbook("site.yml", dra_driver_deploy_as=way)
    assert (again.failed, again.changed) == (0, 0), again.output
    published = set(npus.devices(form.node))
    works = [claim("holds", device_class="ascend-310p", expression=WHOLE), npu_pod("holds", "holds", node=form.node)]
    npus.apply(*works)
    npus.wait_running("holds")
    assert npus.shown_to("holds") == ["310P3"]
    # The driver starts while the workload uses the NPU, and finds all NPUs.
    if way == "service":
        npus.run(form.node, "systemctl", "restart", DRIVER_UNIT)
        npus.wait("the driver is ready", lambda: npus.status(form.node)["ready"])
    else:
        form.restart()
    npus.wait("all NPUs are published", lambda: set(npus.devices(form.node)) == published, timeout=120)
    sliced = [
        claim("slice", device_class="ascend-310p-1-4", expression=ON_DEMAND),
        pod("slice", "slice", node=form.node),
    ]
    npus.apply(*sliced)
    npus.wait_running("slice")
    assert len(npus.instances(form.node)) == 2
    npus.delete(*reversed(sliced), *reversed(works))
    npus.wait("the node is as before", lambda: npus.instances(form.node) == ["2 132 vir02"])


@pytest.mark.parametrize(
    ("context", "lists"),
    [
        ({"runAsUser": 1000, "runAsGroup": 1000}, True),
        ({"runAsUser": 2000, "runAsGroup": 2000}, False),
        ({"runAsUser": 2000, "runAsGroup": 2000, "supplementalGroups": [1000]}, True),
    ],
    ids=["HwHiAiUser", "other", "other-with-group"],
)
def test_container_of_a_user_reads_the_libraries_if_it_has_the_group(
    form: PodForm, context: dict[str, object], lists: bool
) -> None:
    """Without --install-for-all, the vendor's installer makes the libraries readable only for the group of HwHiAiUser."""
    npus = form.cluster
    assert isinstance(npus, NpuCluster)
    npus.shell(form.node, f"chgrp 1000 {LIBRARY_FOLDER} && chmod 0750 {LIBRARY_FOLDER}")
    user = npu_pod("user", "user", node=form.node)
    user["spec"]["securityContext"] = context
    user["spec"]["containers"][0]["command"] = ["sh", "-c", f"npu-smi info || echo {NO_LIBRARY}; sleep 3600"]
    works = [claim("user", device_class="ascend-310p", expression=WHOLE), user]
    npus.apply(*works)
    npus.wait_running("user")
    if lists:
        assert npus.shown_to("user") == ["310P3"]
    else:
        npus.wait("npu-smi has failed", lambda: NO_LIBRARY in npus.log("user"), timeout=60)
    npus.delete(*reversed(works))


def test_helper_is_removed_with_the_driver(form: PodForm) -> None:
    removed = form.playbook("remove.yml", "-e", "accelerator_remove_reset_layout=true")
    assert not removed.failed, removed.output
    shown = form.cluster.run(form.node, "systemctl", "show", "--property=LoadState", HELPER)
    assert "not-found" in shown
    assert form.cluster.shell(form.node, "ls /run/dra-accelerators/dcmi 2>/dev/null; true").strip() == ""
