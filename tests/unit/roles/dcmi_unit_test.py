# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""The units that open DCMI are in the mount namespace of the host, and the driver's unit uses them for DCMI."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from dra_driver.layout_command import LOCK_SECONDS
from driver_unit_test import host
from playing import play

ROOT = Path(__file__).resolve().parents[3]
ROLE = ROOT / "roles/dra_driver"
HELPER = "dra-accelerators-dcmi.service"
UNITS = {
    HELPER: ROLE / f"templates/{HELPER}.j2",
    "layout": ROOT / "roles/ascend_vnpu/templates/dra-accelerators-layout-ascend.service.j2",
}
#: Options for which systemd creates a mount namespace: exec_needs_mount_namespace() of systemd 257, and what each of them implies.
NAMESPACE = re.compile(
    r"(ProtectSystem|ProtectHome|ProtectKernelTunables|ProtectKernelModules|ProtectKernelLogs|ProtectControlGroups|ProtectProc|ProcSubset"
    r"|ProtectClock|ProtectHostname|PrivateTmp|PrivateDevices|PrivateMounts|PrivateNetwork|PrivateIPC|PrivateUsers|MountFlags|MountAPIVFS"
    r"|MountImages|RootDirectory|RootImage|ReadWritePaths|ReadOnlyPaths|InaccessiblePaths|ExecPaths|NoExecPaths|BindPaths|BindReadOnlyPaths"
    r"|TemporaryFileSystem|DynamicUser|NetworkNamespacePath|IPCNamespacePath|LogNamespace|ExtensionImages|ExtensionDirectories"
    r"|CapabilityBoundingSet|AmbientCapabilities|User|JoinsNamespaceOf)="
)


@pytest.mark.parametrize("name", UNITS)
def test_unit_that_opens_dcmi_has_no_mount_namespace_and_all_capabilities(name: str) -> None:
    lines = UNITS[name].read_text("utf-8").splitlines()
    assert [line for line in lines if NAMESPACE.match(line)] == []


@pytest.mark.parametrize("name", UNITS)
def test_unit_that_opens_dcmi_is_restricted_by_other_means(name: str) -> None:
    lines = set(UNITS[name].read_text("utf-8").splitlines())
    assert {
        "NoNewPrivileges=yes",
        "SystemCallFilter=@system-service",
        "RestrictNamespaces=yes",
        "DevicePolicy=closed",
        "DeviceAllow=char-* rwm",
        "IPAddressDeny=any",
    } <= lines


def test_helper_is_installed_on_nodes_with_npus_in_both_forms(tmp_path: Path) -> None:
    (tmp_path / "templates").symlink_to(ROLE / "templates")
    defaults = yaml.safe_load((ROLE / "defaults/main.yml").read_text("utf-8"))
    read = {"ansible.builtin.include_vars": str(ROLE / "vars/main.yml")}
    reported = (
        "{{ {'file': (__dra_driver_dcmi_file if __dra_driver_has_dcmi | bool else __dra_driver_no_dcmi_file),"
        " 'shared': __dra_driver_pod_shared_paths, 'absent': __dra_driver_absent_files}"
        " | to_json | b64encode }}"
    )
    hosts = {
        "npus": {**defaults, **host("ascend", dra_driver_dcmi_concurrency=1)},
        "gpus": {**defaults, **host("nvidia")},
    }
    played = play(tmp_path, [read, {"ansible.builtin.debug": {"msg": reported}}], hosts)
    assert set(played.messages) == set(hosts), played.output
    path = f"/etc/systemd/system/{HELPER}"
    unit = played.messages["npus"]["file"]["content"]
    assert "dra_driver.core.vendors.ascend.dcmi.helper_server --concurrency 1\n" in unit
    assert "Environment=DRA_ACCELERATORS_RELEASE=0.1.0-1a2b3c4d/0123456789ab\n" in unit
    assert played.messages["gpus"]["file"]["state"] == "absent"
    for each in played.messages.values():
        assert path in each["shared"]
        assert [entry["state"] for entry in each["absent"] if entry["path"] == path] == ["absent"]


def test_layout_unit_has_time_for_its_steps_after_both_waits() -> None:
    """The command waits for the driver, then for vNPUs of the previous boot, then for locks. A layout of 56 vNPUs takes about two minutes."""
    text = UNITS["layout"].read_text("utf-8")
    wait, limit = (int(re.search(pattern, text)[1]) for pattern in (r"--wait (\d+)", r"TimeoutStartSec=(\d+)"))  # type: ignore[index]
    assert limit >= 2 * wait + LOCK_SECONDS + 120
