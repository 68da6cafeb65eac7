# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The shared container edits follow the disk: new files are in the next claim, deleted ones are not, and no other file is read."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from dra_driver.core.errors import AcceleratorError, BackendUnavailable
from dra_driver.core.host.cdi import ContainerEdits
from dra_driver.core.host.system import Completed
from dra_driver.core.vendors.nvidia.container.common_edits import RETRY_FACTOR, RETRY_FIRST, RETRY_SECONDS, CommonEdits
from node_model import FOLDER, VERSION, Node

SOCKET = "/run/nvidia-persistenced/socket"
TOOLKIT = "/usr/bin/nvidia-ctk"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    system = Node(tmp_path)
    system.driver()
    return system


def specification(*more: str, directory: str = FOLDER, **edits: Any) -> Completed:
    paths = [f"{directory}/libcuda.so.{VERSION}", f"{directory}/libnvidia-ml.so.{VERSION}", *more]
    common = {
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/nvidiactl", "major": 195, "minor": 255, "fileMode": 438, "permissions": "rwm"}],
        "mounts": [{"hostPath": path, "containerPath": path, "options": ["ro"]} for path in paths],
        "hooks": [
            {"hookName": "createContainer", "path": TOOLKIT, "args": ["nvidia-ctk", "hook", verb]}
            for verb in ("chmod", "disable-device-node-modification")
        ],
        **edits,
    }
    document = {"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": [], "containerEdits": common}
    return Completed(0, json.dumps(document), "")


def nodes(edits: ContainerEdits) -> list[str]:
    return [each.path for each in edits.device_nodes]


def mounted(edits: ContainerEdits, path: str) -> bool:
    return any(mount.host_path == path for mount in edits.mounts)


def test_common_edits_unchanged_disk_is_not_read_again(node: Node) -> None:
    common = CommonEdits(node)
    first = common.current(VERSION)
    reads = node.reads
    assert common.current(VERSION) is first and node.reads == reads


def test_common_edits_missing_node_rejects_claim_until_created(node: Node) -> None:
    del node.nodes["/dev/nvidia-uvm"], node.nodes["/dev/nvidia-uvm-tools"]
    node.file("/proc/devices", "Character devices:\n195 nvidia\n")
    common = CommonEdits(node)
    with pytest.raises(BackendUnavailable, match="/dev/nvidia-uvm"):
        common.current(VERSION)
    node.nodes["/dev/nvidia-uvm"] = (510, 0)
    assert "/dev/nvidia-uvm" in nodes(common.current(VERSION))
    node.nodes["/dev/nvidia-uvm-tools"] = (510, 1)
    assert "/dev/nvidia-uvm-tools" in nodes(common.current(VERSION))
    del node.nodes["/dev/nvidia-uvm"]
    with pytest.raises(BackendUnavailable, match="/dev/nvidia-uvm"):
        common.current(VERSION)


def test_missing_nodes_of_the_loaded_module_are_created(node: Node) -> None:
    """After a boot the module is loaded without device nodes: they are created. A reload of the module changes its major number."""
    del node.nodes["/dev/nvidia-uvm"], node.nodes["/dev/nvidia-uvm-tools"]
    common = CommonEdits(node)
    with pytest.raises(BackendUnavailable, match="/dev/nvidia-uvm"):
        common.current(VERSION)
    assert "/dev/nvidia-uvm" not in node.nodes  # check mode creates nothing
    common.creates_nodes = True
    assert {"/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"} <= set(nodes(common.current(VERSION)))
    assert (node.nodes["/dev/nvidia-uvm"], node.nodes["/dev/nvidia-uvm-tools"]) == ((510, 0), (510, 1))
    node.file("/proc/devices", "Character devices:\n195 nvidia\n509 nvidia-uvm\n")
    del node.nodes["/dev/nvidia-uvm-tools"]
    assert [each.major for each in common.current(VERSION).device_nodes] == [195, 509, 509]
    del node.nodes["/dev/nvidia-uvm"]
    for parameters in ("ModifyDeviceFiles: 0\n", "ModifyDeviceFiles: 1\nDeviceFileGID: 44\n"):
        node.file("/proc/driver/nvidia/params", f"{parameters}DeviceFileMode: 438\n")
        with pytest.raises(BackendUnavailable, match="/dev/nvidia-uvm"):
            common.current(VERSION)


def test_common_edits_changed_device_numbers_are_read_again(node: Node) -> None:
    common = CommonEdits(node)
    common.current(VERSION)
    node.file("/proc/devices", "Character devices:\n195 nvidia\n")
    node.nodes["/dev/nvidia-uvm"] = (509, 0)
    assert [each.major for each in common.current(VERSION).device_nodes] == [195, 509, 510]


def test_common_edits_missing_socket_is_not_mounted(node: Node) -> None:
    node.listen(SOCKET)
    common = CommonEdits(node)
    assert mounted(common.current(VERSION), SOCKET)
    node.path(SOCKET).unlink()
    assert not mounted(common.current(VERSION), SOCKET)
    node.listen(SOCKET)
    assert mounted(common.current(VERSION), SOCKET)


def test_common_edits_follow_libraries_and_driver_version(node: Node) -> None:
    common = CommonEdits(node)
    common.current(VERSION)
    late = f"{FOLDER}/libnvidia-nvvm.so.{VERSION}"
    node.file(late)
    assert mounted(common.current(VERSION), late)
    node.path(late).unlink()
    assert not mounted(common.current(VERSION), late)
    node.driver(version="590.1.2")
    assert mounted(common.current("590.1.2"), f"{FOLDER}/libcuda.so.590.1.2")


def test_common_edits_toolkit_result_is_used_when_available(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    node.file(TOOLKIT)
    node.answers = [specification("/gone/since")]
    common = CommonEdits(node)
    assert common.current(VERSION).hooks[0].args[2] == "update-ldcache"  # the driver's own list until then
    common.settle(10)
    edits = common.current(VERSION)
    assert [hook.args for hook in edits.hooks] == [("nvidia-ctk", "hook", "chmod")]
    assert not mounted(edits, "/gone/since")
    assert edits.device_nodes[0].to_dict() == {
        "path": "/dev/nvidiactl",
        "major": 195,
        "minor": 255,
        "fileMode": 438,
        "permissions": "rw",
    }
    assert [record.message for record in caplog.records] == [f"container edits come from {TOOLKIT}"]
    assert common.current(VERSION) is edits and len(node.commands) == 1
    assert "--device-id=none" in node.commands[0] and f"--nvidia-cdi-hook-path={TOOLKIT}" in node.commands[0]


def test_common_edits_change_queries_toolkit_without_delaying_claims(node: Node) -> None:
    node.file(TOOLKIT)
    node.listen(SOCKET)
    node.answers = [specification(SOCKET), specification()]
    common = CommonEdits(node)
    common.current(VERSION)
    common.settle(10)
    assert mounted(common.current(VERSION), SOCKET)
    node.path(SOCKET).unlink()
    before = common.current(VERSION)
    assert not mounted(before, SOCKET) and before.hooks[0].args[2] == "update-ldcache"
    common.settle(10)
    edits = common.current(VERSION)
    assert not mounted(edits, SOCKET) and edits.hooks[0].args[2] == "chmod" and len(node.commands) == 2


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Completed(1, "", "level=error msg=no\nlevel=error msg=not today\n"), "not today"),
        (Completed(0, "kind: nvidia.com/gpu", ""), "is not understood"),
        (AcceleratorError("it did not end within 20 s", code="command-timeout"), "did not end"),
        (specification(netDevices=[{"name": "eth0"}]), "unknown keys: netDevices"),
        (specification(directory="/elsewhere", mounts=[]), f"libcuda.so.{VERSION}"),
    ],
)
def test_common_edits_toolkit_failure_keeps_own_list_and_logs_once(
    node: Node, caplog: pytest.LogCaptureFixture, answer: Completed | AcceleratorError, reason: str
) -> None:
    node.file(TOOLKIT)
    node.answers = [answer, answer, specification()]
    now = 0.0
    common = CommonEdits(node, clock=lambda: now)
    own = common.current(VERSION)
    common.settle(10)
    assert common.current(VERSION) is own and len(node.commands) == 1
    now += RETRY_SECONDS
    assert common.current(VERSION) is own
    common.settle(10)
    (line,) = (record.message for record in caplog.records)
    assert reason in line and "own list" in line and len(node.commands) == 2
    now += RETRY_SECONDS
    common.current(VERSION)
    common.settle(10)
    assert common.current(VERSION).hooks[0].args[2] == "chmod"


def test_common_edits_toolkit_failure_is_retried_with_growing_intervals(node: Node) -> None:
    """The toolkit can fail while it is installed: the driver queries it again soon, with growing intervals."""
    node.file(TOOLKIT)
    busy = AcceleratorError("Text file busy", code="command-unusable")
    node.answers = [busy, busy, specification()]
    now = 0.0
    common = CommonEdits(node, clock=lambda: now)
    own = common.current(VERSION)
    common.settle(10)
    for calls, wait in ((1, RETRY_FIRST), (2, RETRY_FIRST * RETRY_FACTOR)):
        now += wait * 0.99
        assert common.current(VERSION) is own
        common.settle(10)
        assert len(node.commands) == calls
        now += wait * 0.02
        common.current(VERSION)
        common.settle(10)
        assert len(node.commands) == calls + 1
    assert common.current(VERSION).hooks[0].args[2] == "chmod"


def test_common_edits_older_toolkit_is_called_without_newer_flags(node: Node) -> None:
    node.file(TOOLKIT)
    node.answers = [Completed(1, "", "Incorrect Usage: flag provided but not defined: -device-id"), specification()]
    common = CommonEdits(node)
    common.current(VERSION)
    common.settle(10)
    assert common.current(VERSION).hooks[0].args[2] == "chmod"
    assert "--device-id=none" not in node.commands[1]


def test_common_edits_insufficient_own_list_waits_for_toolkit(node: Node) -> None:
    elsewhere = "/opt/driver/lib"
    node.driver(elsewhere)
    for name in ("libcuda", "libnvidia-ml"):
        node.path(f"{FOLDER}/{name}.so.{VERSION}").unlink()
    with pytest.raises(BackendUnavailable, match="libcuda"):
        CommonEdits(node).current(VERSION)
    node.file(TOOLKIT)
    failed = Completed(1, "", "not today")
    node.answers = [failed, specification(directory=elsewhere)]
    common = CommonEdits(node)
    for _claim in range(2):
        with pytest.raises(BackendUnavailable, match="libcuda"):
            common.current(VERSION)
    assert len(node.commands) == 1  # one query for an unchanged state, independent of the number of claims
    node.file(f"{FOLDER}/another")
    assert mounted(common.current(VERSION), f"{elsewhere}/libcuda.so.{VERSION}")
    node.nodes.pop("/dev/nvidia-uvm")
    node.file("/proc/devices")
    with pytest.raises(BackendUnavailable, match="/dev/nvidia-uvm"):
        common.current(VERSION)


def test_common_edits_without_toolkit_logs_once(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    common = CommonEdits(node)
    common.current(VERSION)
    node.listen(SOCKET)
    common.current(VERSION)
    assert [record.message for record in caplog.records] == [
        "container edits come from the driver's own list: nvidia-ctk is not installed"
    ]
