# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of all runtimes: links stay links. Also the process of a unit that is the runtime, and its start options."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path
from types import MappingProxyType

import pytest
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.config_files import RuntimeFileStore
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.apply import CopiedFiles
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.config import (
    Change,
    File,
    edit,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.daemon import Daemon
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.plan import (
    BACKUP,
    Entry,
    Record,
    fingerprint,
    recorded,
    text_before,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.containerd.plan import (
    read_record as read_containerd,
)
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.crio.daemon import Crio
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.restore_record import read_record
from ansible_collections.dra.accelerators.plugins.module_utils._host.systemd_unit import Unit, program_command_line
from ansible_collections.dra.accelerators.plugins.module_utils.core.errors import AcceleratorError
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import System


@pytest.mark.parametrize("was_there", [True, False])
def test_linked_file_target_is_written_and_restored(tmp_path: Path, was_there: bool) -> None:
    """The same for crio.conf and daemon.json, because both runtimes use the same record: the target of the link is written."""
    target, link = tmp_path / "dotfiles/daemon.json", tmp_path / "daemon.json"
    target.parent.mkdir()
    before = '{"debug": true}' if was_there else None
    if before:
        target.write_text(before)
    link.symlink_to(target)
    with patch_module_args({"_ansible_remote_tmp": str(tmp_path / "remote"), "_ansible_keep_remote_files": False}):
        module = AnsibleModule(argument_spec={})
    files = RuntimeFileStore(module, System(), str(tmp_path / "record"), read_record)
    change = Change(str(link), before, '{"features": {"cdi": true}}')
    files.put(change.path, change.after)
    assert link.is_symlink() and target.read_text() == change.after
    files.undo([change], files.record())
    assert link.is_symlink()
    assert target.exists() is was_there and (not was_there or target.read_text() == before)


@pytest.fixture
def copied(tmp_path: Path) -> CopiedFiles:
    with patch_module_args({"_ansible_remote_tmp": str(tmp_path / "remote"), "_ansible_keep_remote_files": False}):
        module = AnsibleModule(argument_spec={})
    return CopiedFiles(module, System(), str(tmp_path / "record"), read_containerd)


def test_undo_ignores_backup_of_earlier_installation(tmp_path: Path, copied: CopiedFiles) -> None:
    """The run fails before it has copied the file, so the backup is an older one: undo does not use it."""
    config = tmp_path / "config.toml"
    stale = tmp_path / f"config.toml{BACKUP}"
    stale.write_text("version = 1\n")
    change = Change(str(config), "version = 2\n", "version = 2\nchanged = true\n")
    config.write_text("version = 2\nchanged = true\n")
    copied.undo([change], Record())
    assert config.read_text() == "version = 2\n"
    assert stale.read_text() == "version = 1\n"


def test_undo_restores_other_files_if_one_fails(tmp_path: Path, copied: CopiedFiles) -> None:
    """As on a full disk: the error of the change is reported, and the record stays for the next run."""
    first, last = tmp_path / "config.toml", tmp_path / "file/drop-in.toml"
    last.parent.write_text("no directory")
    first.write_text("changed = true\n")
    changes = [Change(str(first), "version = 2\n", "changed = true\n"), Change(str(last), "version = 2\n", "other\n")]
    restarts: list[str] = []
    left, again = copied.undo(changes, Record(), lambda: restarts.append("restart") or "refused")
    assert left == {str(last): f"{last} cannot be replaced: Not a directory"} and (again, restarts) == (
        "refused",
        ["restart"],
    )
    assert first.read_text() == "version = 2\n"
    copied.write_record(Record(restart=True))
    copied.undo_after_error(changes, Record())
    assert copied.record().restart
    copied.undo_after_error(changes[:1], Record())
    assert not copied.record().restart


def test_copy_renames_backup_of_earlier_installation(tmp_path: Path, copied: CopiedFiles) -> None:
    config = tmp_path / "config.toml"
    backup = tmp_path / f"config.toml{BACKUP}"
    backup.write_text("version = 1\n")
    config.write_text("version = 2\n")
    os.utime(config, ns=(10**18, 10**18))
    change = Change(str(config), "version = 2\n", "version = 2\nchanged = true\n")
    copied.copy([change], Record())
    assert (backup.read_text(), (tmp_path / f"{backup.name}.1").read_text()) == ("version = 2\n", "version = 1\n")
    copied.apply_changes([change])
    copied.undo([change], Record())
    assert (config.read_text(), config.stat().st_mtime_ns, backup.exists()) == ("version = 2\n", 10**18, False)


def test_changed_file_keeps_owner_mode_and_attributes(tmp_path: Path, copied: CopiedFiles) -> None:
    config = tmp_path / "config.toml"
    config.write_text("version = 2\n")
    os.chown(config, 1234, 1235)
    config.chmod(0o640)
    os.setxattr(config, "user.site", b"kept")
    change = Change(str(config), "version = 2\n", "version = 2\nchanged = true\n")

    def attributes(path: Path) -> tuple[int, int, int, bytes]:
        status = path.stat()
        return status.st_uid, status.st_gid, status.st_mode & 0o7777, os.getxattr(path, "user.site")

    expected = (1234, 1235, 0o640, b"kept")
    copied.copy([change], Record())
    copied.apply_changes([change])
    assert attributes(config) == expected
    assert attributes(tmp_path / f"config.toml{BACKUP}") == expected
    copied.undo([change], Record())
    assert (config.read_text(), attributes(config)) == ("version = 2\n", expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.toml"]


def test_temporary_file_of_killed_run_is_removed(tmp_path: Path, copied: CopiedFiles) -> None:
    config = tmp_path / "config.toml"
    (tmp_path / ".config.toml.4242-0.tmp").write_text("half")
    copied.put(str(config), "version = 2\n")
    assert [path.name for path in tmp_path.iterdir()] == ["config.toml"]


def test_copy_is_repeated_if_run_ended_after_its_record(tmp_path: Path, copied: CopiedFiles) -> None:
    config, backup = tmp_path / "config.toml", tmp_path / f"config.toml{BACKUP}"
    config.write_text("version = 2\n")
    change = Change(str(config), "version = 2\n", "version = 2\nchanged = true\n")
    record = recorded(Record(), [change])
    backup.write_text("")
    copied.copy([change], record)
    assert [path.name for path in sorted(tmp_path.iterdir())] == [config.name, backup.name]
    assert backup.read_text() == "version = 2\n"
    # After the first change the file differs from the one in the record.
    changed = Change(str(config), change.after, "version = 2\n")
    backup.write_text("")
    copied.copy([changed], record)
    assert backup.read_text() == ""


def test_backup_with_other_digest_is_not_used(tmp_path: Path) -> None:
    config, backup = tmp_path / "config.toml", tmp_path / f"config.toml{BACKUP}"
    table = '[plugins."io.containerd.grpc.v1.cri"]\n'
    before = f"version = 2\n{table}  enable_cdi = false\n"
    other = f"version = 2\n{table}  enable_cdi = false\n  cdi_spec_dirs = []\n"
    file = File(str(config), other)
    after = edit(file, file.table(), {"enable_cdi": True, "cdi_spec_dirs": ["/etc/cdi"]}).after
    assert after
    record = recorded(Record(), [Change(str(config), before, after)])
    daemon = Daemon(System(), command="containerd", config=str(config), service="containerd.service", timeout=1)
    # It looks like the file before this module's change, because only the keys of this module differ.
    backup.write_text(other)
    found = text_before(daemon, File(str(config), after), record.files[str(config)])
    assert found is not None and "cdi_spec_dirs" not in found
    # Records of earlier versions have no digest.
    entry = dataclasses.replace(record.files[str(config)], backup="")
    assert text_before(daemon, File(str(config), after), entry) == other
    assert read_containerd(record.to_text(), "record") == record


@pytest.mark.prove
def test_files_after_power_cut_are_complete(tmp_path: Path) -> None:
    """A copy of the image of a mounted file system is the disk after a power cut: files are complete."""
    image, node = tmp_path / "disk", tmp_path / "node"
    with image.open("wb") as file:
        file.truncate(64 * 1024 * 1024)
    subprocess.run(["mkfs.ext4", "-q", image], check=True, timeout=60)
    before, after = "version = 2\n" * 1000, "version = 3\n" * 1000
    node.mkdir()
    # Without this option ext4 itself writes a file's data before some renames. XFS never does.
    subprocess.run(["mount", "-o", "loop,noauto_da_alloc", image, node], check=True, timeout=60)
    try:
        config = node / "config.toml"
        config.write_text(before)
        os.sync()
        with patch_module_args({"_ansible_remote_tmp": str(tmp_path / "remote"), "_ansible_keep_remote_files": False}):
            module = AnsibleModule(argument_spec={})
        files = CopiedFiles(module, System(), str(node / "record"), read_containerd)
        change = Change(str(config), before, after)
        record = Record({str(config): Entry(False, fingerprint(after), {}, fingerprint(before))}, (), restart=True)
        files.write_record(record)
        files.copy([change], Record())
        shutil.copyfile(image, tmp_path / "disk-copied")
        files.apply_changes([change])
        files.write_record(dataclasses.replace(record, restart=False))
        shutil.copyfile(image, tmp_path / "disk-changed")
        files.undo([change], Record())
        files.remove_record()
        shutil.copyfile(image, tmp_path / "disk-restored")
    finally:
        subprocess.run(["umount", node], check=True, timeout=60)
    found = {}
    for name in ("copied", "changed", "restored"):
        subprocess.run(["mount", "-o", "loop", tmp_path / f"disk-{name}", node], check=True, timeout=60)
        try:
            paths = (node / "config.toml", node / f"config.toml{BACKUP}")
            found[name] = tuple(path.read_text() if path.exists() else None for path in paths)
        finally:
            subprocess.run(["umount", node], check=True, timeout=60)
    assert found == {"copied": (before, before), "changed": (after, before), "restored": (before, None)}


def test_restart_waits_for_files_rewritten_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As at the start of MicroK8s, the main file is empty for a moment after the unit becomes active: the restart waits."""
    (tmp_path / "systemctl").write_text("#!/bin/sh\necho ActiveState=active\necho MainPID=1\n")
    (tmp_path / "journalctl").write_text("#!/bin/sh\n")
    for name in ("systemctl", "journalctl"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    main = tmp_path / "containerd.toml"
    main.write_text("")
    threading.Timer(1.0, main.write_text, ["version = 2\n"]).start()

    def problem() -> str:
        if not main.read_text():
            raise AcceleratorError("The main file is empty", code="rewritten")
        return ""

    unit = Unit(System(), service="snap.microk8s.daemon-containerd.service", timeout=30)
    assert unit.restart_until(problem) == ""
    main.write_text("")
    begun = time.monotonic()
    assert "The main file is empty" in unit.restart_until(problem)
    assert time.monotonic() - begun < 10


def test_restart_reads_the_new_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A restart can start another command line, for example after a change of the unit file."""
    (tmp_path / "systemctl").write_text(
        f"""#!/bin/sh
[ "$1" != restart ] || touch {tmp_path}/restarted
name=before; [ ! -e {tmp_path}/restarted ] || name=after
echo ActiveState=active
echo MainPID=0
echo "ExecStart={{ path=/usr/bin/containerd ; argv[]=/usr/bin/containerd --config /$name.toml ; ignore_errors=no ; }}"
"""
    )
    (tmp_path / "journalctl").write_text("#!/bin/sh\n")
    for name in ("systemctl", "journalctl"):
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")

    class ContainerdUnit(Unit):
        program = "containerd"
        options = MappingProxyType({"config": "config"})

    unit = ContainerdUnit(System(), service="containerd.service", timeout=10)
    assert unit.path_options == {"config": "/before.toml"}
    assert unit.restart_until(lambda: "" if unit.path_options == {"config": "/after.toml"} else "the old path") == ""


def test_containerd_started_by_main_process_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A program that keeps its command line: the shell with the name containerd.
    program = tmp_path / "containerd"
    program.symlink_to("/bin/sh")
    (tmp_path / "wait.sh").write_text("read line\n")
    command = f"{program} {tmp_path}/wait.sh -c /config.toml -a /k3s.sock <&3 & wait"
    read, write = os.pipe()
    main = subprocess.Popen(["/bin/bash", "-c", command.replace("<&3", f"<&{read}")], pass_fds=[read], cwd=tmp_path)
    try:
        (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho MainPID={main.pid}\necho 'ExecStart='\n")
        (tmp_path / "systemctl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        deadline = time.monotonic() + 10
        words: list[str] = []
        while not words and time.monotonic() < deadline:
            words, directory = program_command_line(System(), "k3s.service", "containerd")
        assert words[2:] == ["-c", "/config.toml", "-a", "/k3s.sock"]
        assert directory == str(tmp_path)
    finally:
        os.close(write)
        main.wait(10)
        os.close(read)


def test_stopped_unit_is_identified_by_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start = "{ path=/usr/bin/containerd ; argv[]=/usr/bin/containerd --config /other.toml ; ignore_errors=no ; }"
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho MainPID=0\necho 'ExecStart={start}'\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    words, _directory = program_command_line(System(), "containerd.service", "containerd")
    assert words == ["/usr/bin/containerd", "--config", "/other.toml"]
    assert program_command_line(System(), "containerd.service", "crio")[0] == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--config /a.conf --config-dir=/a.d/", ("/a.conf", "/a.d")),
        ("-c a.conf -d /b.d --log-level info", ("/a.conf", "/b.d")),
        ("--config-dir= --log-level info", ("/etc/crio/crio.conf", "/etc/crio/crio.conf.d")),
    ],
)
def test_crio_files_are_those_of_its_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, expected: tuple[str, str]
) -> None:
    start = f"{{ path=/usr/bin/crio ; argv[]=/usr/bin/crio {options} ; ignore_errors=no ; }}"
    (tmp_path / "systemctl").write_text(f"#!/bin/sh\necho MainPID=0\necho 'ExecStart={start}'\n")
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    places = {"config": "/etc/crio/crio.conf", "drop_ins": "/etc/crio/crio.conf.d"}
    crio = Crio(System(), command="crio", service="crio.service", timeout=1, **places)
    assert (crio.config, crio.drop_ins) == expected
