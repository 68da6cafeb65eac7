# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The entries of directories with records are on the disk, and a disk error is reported."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._host import single_run
from ansible_collections.dra.accelerators.plugins.module_utils._packages import kept_packages
from ansible_collections.dra.accelerators.plugins.module_utils._packages.apt import Apt
from ansible_collections.dra.accelerators.plugins.module_utils.core.discovery.device_locks import DeviceLocks
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System

RECORDS = "/var/lib/dra-accelerators"


def run_alone(system: System) -> None:
    with single_run.hold_lock(system, RECORDS, is_check=False):
        assert system.exists(RECORDS)


def keep_packages(system: System) -> None:
    apt = Apt(system, timeout=60)
    kept_packages.PackageStore(system, apt, f"{RECORDS}/nvidia/packages", keep=True, title="x", hint="x").ready()


def lock_device(system: System) -> None:
    system.path(f"{RECORDS}/driver").mkdir(parents=True)
    assert DeviceLocks(str(system.path(f"{RECORDS}/driver")), "x").take("GPU-1")


def remove_tree(system: System) -> None:
    system.path(f"{RECORDS}/nvidia").mkdir(parents=True)
    assert system.remove_tree(f"{RECORDS}/nvidia")


@pytest.mark.parametrize(
    ("work", "directories"),
    [
        (run_alone, ["/var/lib", "/var", "/"]),
        (keep_packages, [f"{RECORDS}/nvidia/packages", f"{RECORDS}/nvidia", RECORDS, "/var/lib"]),
        (lock_device, [f"{RECORDS}/driver"]),
        (remove_tree, [RECORDS]),
    ],
)
def test_directory_whose_entries_change_is_synced(
    work: Callable[[System], None], directories: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync, synced = os.fsync, []

    def record(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    work(System(str(tmp_path)))
    assert [path for path in directories if f"{tmp_path}{path}".rstrip("/") not in synced] == []


@pytest.fixture
def failing_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system with 60 MiB of unsynced data on a disk with room for 24 MiB."""
    memory, node = tmp_path / "memory", tmp_path / "node"
    memory.mkdir()
    node.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", memory], check=True)
    try:
        with (memory / "disk").open("wb") as file:
            file.truncate(128 << 20)
        subprocess.run(["mkfs.ext4", "-q", memory / "disk"], check=True, timeout=60)
        subprocess.run(["mount", "-o", "loop", memory / "disk", node], check=True, timeout=60)
        try:
            (node / "packages").write_bytes(bytes(60 << 20))
            yield node
        finally:
            subprocess.run(["umount", node], check=True, timeout=120)
    finally:
        subprocess.run(["umount", memory], check=True, timeout=120)


@pytest.mark.prove
def test_sync_of_all_file_systems_reports_a_disk_that_fails(failing_disk: Path) -> None:
    with pytest.raises(OSError, match="cannot be synced") as caught:
        System(str(failing_disk)).sync_all()
    assert str(caught.value.filename).rstrip("/") == str(failing_disk)
