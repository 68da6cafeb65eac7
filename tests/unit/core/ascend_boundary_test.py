# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""When the kernel driver of NPUs treats a process as an ordinary container, according to files in /proc."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from dra_driver.core.errors import BackendUnavailable
from dra_driver.core.host.system import System
from dra_driver.core.vendors.ascend.dcmi.boundary import CODE, HELPER_UNIT, container_reason, refuse_container

ALL = "000001ffffffffff"
SYS_ADMIN_AND_MKNOD = f"{1 << 21 | 1 << 27:016x}"


class Proc:
    """The files in /proc of a process, below a directory."""

    def __init__(self, root: Path, own: str = "mnt:[2]", host: str = "mnt:[1]") -> None:
        self.root = root
        for name, target in (("self", own), ("1", host)):
            (root / f"proc/{name}/ns").mkdir(parents=True)
            if target:
                (root / f"proc/{name}/ns/mnt").symlink_to(target)
        self.write()

    def write(
        self, capabilities: str = ALL, uid: int = 0, uid_map: str = "0 0 4294967295", mounts: str = "rw,nosuid"
    ) -> str:
        """Write the files, and return the reason."""
        own = self.root / "proc/self"
        (own / "status").write_text(f"Name:\tpython\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nCapEff:\t{capabilities}\n")
        (own / "uid_map").write_text(" ".join(f"{each:>10}" for each in uid_map.split()) + "\n")
        (own / "mountinfo").write_text(
            f"31 24 0:27 / /sys/fs/cgroup ro shared:4 - tmpfs tmpfs ro\n32 31 0:28 / /sys/fs/cgroup/memory {mounts} - cgroup cgroup rw\n"
        )
        return container_reason(System(str(self.root)))


def test_process_in_host_mount_namespace_is_not_a_container(tmp_path: Path) -> None:
    proc = Proc(tmp_path, own="mnt:[1]")
    assert proc.write(capabilities=SYS_ADMIN_AND_MKNOD) == ""


def test_privileged_container_counts_as_the_host(tmp_path: Path) -> None:
    assert Proc(tmp_path).write() == ""


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"capabilities": SYS_ADMIN_AND_MKNOD}, "lacks the capabilities 0, 1, 2"),
        ({"capabilities": f"{(1 << 41) - 1 - (1 << 24):016x}"}, "lacks the capabilities 24 of"),
        ({"uid": 1000}, "not user 0 of the initial user namespace"),
        ({"uid_map": "0 100000 65536"}, "not user 0 of the initial user namespace"),
        ({"mounts": "ro,nosuid"}, "/sys/fs/cgroup/memory is read-only"),
    ],
)
def test_process_in_other_mount_namespace_without_a_privilege_is_a_container(
    tmp_path: Path, files: dict[str, str], words: str
) -> None:
    reason = Proc(tmp_path).write(**files)  # type: ignore[arg-type]
    assert words in reason and "mnt:[2]" in reason and "mnt:[1]" in reason


def test_capabilities_above_37_do_not_count(tmp_path: Path) -> None:
    assert Proc(tmp_path).write(capabilities=f"{(1 << 38) - 1:016x}") == ""


def test_namespace_unreadable_by_root_counts_as_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc, system = Proc(tmp_path), System(str(tmp_path))
    proc.write(capabilities=SYS_ADMIN_AND_MKNOD)
    read = system.link_target

    def link_target(path: str) -> str:
        if path.startswith("/proc/1/"):
            raise PermissionError(13, "Permission denied")
        return read(path)

    monkeypatch.setattr(system, "link_target", link_target)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "cannot be compared" in container_reason(system)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert container_reason(system) == ""


def test_machine_without_proc_rejects_nothing(tmp_path: Path) -> None:
    refuse_container(System(str(tmp_path)))


def test_rejection_has_reason_and_remedy(tmp_path: Path) -> None:
    Proc(tmp_path).write(capabilities=SYS_ADMIN_AND_MKNOD)
    with pytest.raises(BackendUnavailable) as caught:
        refuse_container(System(str(tmp_path)))
    assert caught.value.code == CODE and "ordinary container" in caught.value.message
    assert HELPER_UNIT in caught.value.hint and "PrivateTmp=" in caught.value.hint
