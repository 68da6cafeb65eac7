# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the containerd modules on a real running containerd 1.7: changes, restarts, failures, and removal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MODULES = "ansible_collections.dra.accelerators.plugins.modules"
PROGRAM = f"""
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
with patch_module_args(json.load(sys.stdin)):
    importlib.import_module("{MODULES}." + sys.argv[1]).main()
"""
TABLE = '[plugins."io.containerd.grpc.v1.cri"]'
MANAGER = Path(__file__).with_name("service_manager.py")

Result = dict[str, Any]


class Machine:
    """A node with its own containerd, below a directory."""

    def __init__(self, folder: Path, containerd: Path, crictl: Path) -> None:
        self.folder = folder
        self.containerd = containerd
        self.socket = folder / "containerd.sock"
        self.programs = folder / "bin"
        self.programs.mkdir()
        for name in ("systemctl", "journalctl"):
            program = self.programs / name
            program.write_text(f"#!{sys.executable}\n{MANAGER.read_text()}")
            program.chmod(0o755)
        (self.programs / "crictl").symlink_to(crictl)
        self.main = folder / "etc" / "config.toml"
        self.main.parent.mkdir()
        self.start_with("")

    def start_with(self, text: str, check: str = "true", options: str = "", main: Path | None = None) -> None:
        """Start containerd with this text in its main file. ``check`` runs before each start.

        ``options`` are options of its command, ``main`` is another main file.
        """
        main = main or self.main
        main.write_text(
            f"version = 2\nroot = '{self.folder}/root'\nstate = '{self.folder}/state'\n"
            f"imports = ['{self.main.parent}/conf.d/*.toml']\n[grpc]\n  address = '{self.socket}'\n{text}"
        )
        daemon = f"{self.containerd} --config {main} {options}"
        (self.folder / "command").write_text(f"{check} && exec {daemon}\n{self.socket}\n")
        self.systemctl("restart", "containerd.service")

    def environment(self) -> dict[str, str]:
        """Return the environment of the module's process."""
        folders = [str(self.programs), os.environ["PATH"]]
        return {**os.environ, "PATH": ":".join(folders), "SERVICE_MANAGER_FOLDER": str(self.folder)}

    def systemctl(self, *words: str) -> str:
        """Call the service manager."""
        command = [self.programs / "systemctl", *words]
        return subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=False).stdout

    def stop(self) -> None:
        """Stop the daemon."""
        (self.folder / "command").write_text(f"false\n{self.socket}\n")
        self.systemctl("restart", "containerd.service")

    def containerd_options(self) -> dict[str, Any]:
        """Return the options that describe containerd."""
        return {
            "command": str(self.containerd),
            "config": str(self.main),
            "drop_ins": str(self.main.parent / "conf.d"),
            "timeout": 30,
        }

    def module(self, *, check: bool = False, drop_ins: str | None = None, **options: Any) -> Result:
        """Run the module runtime_cdi."""
        containerd = self.containerd_options() | ({} if drop_ins is None else {"drop_ins": drop_ins})
        given = {
            "runtime": "auto",
            "cdi_directories": [str(self.folder / "cdi/etc"), str(self.folder / "cdi/run")],
            "records": str(self.folder / "record"),
            "containerd": containerd,
            "_ansible_check_mode": check,
            **options,
        }
        return self.run("runtime_cdi", given)

    def handler(self, **options: Any) -> Result:
        """Run the module containerd_handler."""
        return self.run("containerd_handler", {**self.containerd_options(), **options})

    def run(self, name: str, options: dict[str, Any]) -> Result:
        """Run a module and return its result, with the diff."""
        given = {"_ansible_diff": True, **options}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, name],
            input=json.dumps(given),
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            result: Result = json.loads(done.stdout)
        except ValueError:
            raise AssertionError(f"the module said {done.stdout}{done.stderr}") from None
        return result

    def knows(self) -> bool:
        """Return whether the running containerd reports that CDI is enabled."""
        done = subprocess.run(
            [self.programs / "crictl", "--runtime-endpoint", f"unix://{self.socket}", "info"],
            capture_output=True,
            text=True,
            check=True,
        )
        return bool(json.loads(done.stdout)["config"]["enableCDI"])

    def files(self) -> dict[str, str]:
        """Return the files that the module can change: configuration, record, and CDI files."""
        found = {}
        for name in ("etc", "record", "cdi"):
            for path in sorted([self.folder / name, *(self.folder / name).rglob("*")]):
                if path.exists():
                    found[str(path.relative_to(self.folder))] = path.read_text() if path.is_file() else "folder"
        return found

    def pid(self) -> str:
        """Return the daemon's process ID."""
        return (self.folder / "pid").read_text()


@pytest.fixture
def machine(old_containerd: Path, crictl: Path) -> Iterator[Machine]:
    """Yield a node whose containerd 1.7 runs without CDI. A socket path must be short."""
    with tempfile.TemporaryDirectory(prefix="dra-", ignore_cleanup_errors=True) as folder:
        node = Machine(Path(folder), old_containerd, crictl)
        assert not node.knows()
        yield node
        node.stop()


def test_cdi_is_enabled_and_restored(machine: Machine) -> None:
    before, pid = machine.files(), machine.pid()
    said = machine.module(check=True)
    assert machine.files() == before
    assert machine.pid() == pid
    done = machine.module()
    assert {key: said[key] for key in ("changed", "files", "directories", "restarted", "diff")} == {
        key: done[key] for key in ("changed", "files", "directories", "restarted", "diff")
    }
    assert done["files"] == [str(machine.main.parent / "conf.d/60-dra-accelerators.toml")]
    assert "+  enable_cdi = true" in done["diff"]["prepared"]
    assert machine.knows()
    assert machine.pid() != pid
    after, pid = machine.files(), machine.pid()
    again = machine.module()
    assert not again["changed"], again
    assert machine.files() == after
    assert machine.pid() == pid
    back = machine.module(state="absent")
    assert back["restarted"]
    assert not machine.knows()
    # The directory of drop-in files did not exist before either.
    assert machine.files() == before
    assert not machine.module(state="absent")["changed"]


def test_table_in_the_main_file_is_changed_and_restored(machine: Machine) -> None:
    machine.start_with(f"# Ours.\n{TABLE}\n  sandbox_image = 'localhost/pause:1' # keep\n  enable_cdi = false\n")
    before = machine.files()
    assert machine.module()["files"] == [str(machine.main)]
    assert machine.knows()
    assert "sandbox_image = 'localhost/pause:1' # keep" in machine.main.read_text()
    assert machine.module(state="absent")["changed"]
    assert machine.files() == before
    assert not machine.knows()


def test_configuration_that_containerd_rejects_is_rolled_back(machine: Machine) -> None:
    machine.start_with("", check=f"! grep -rq 'enable_cdi = true' {machine.main.parent}")
    before = machine.files()
    failed = machine.module()
    assert failed["failed"]
    assert failed["error_code"] == "restart-failed"
    assert "It runs with its previous files" in failed["msg"]
    assert not machine.knows()
    assert machine.files() == before


def test_next_run_does_the_restart_of_a_killed_run(machine: Machine) -> None:
    machine.module()
    text = machine.files()["etc/conf.d/60-dra-accelerators.toml"]
    machine.module(state="absent")
    # The file exists and the daemon has not been restarted, as after a kill between the two steps.
    (machine.main.parent / "conf.d").mkdir()
    (machine.main.parent / "conf.d/60-dra-accelerators.toml").write_text(text)
    assert not machine.knows()
    done = machine.module()
    assert done["restarted"]
    assert done["files"] == []
    assert "does not know" in done["reason"]
    assert machine.knows()
    # Without crictl, a file that is newer than the process shows the pending restart.
    (machine.programs / "crictl").unlink()
    pid = machine.pid()
    assert not machine.module()["restarted"]
    os.utime(machine.main.parent / "conf.d/60-dra-accelerators.toml")
    done = machine.module()
    assert done["restarted"]
    assert "was written after" in done["reason"]
    assert machine.pid() != pid
    assert not machine.module()["restarted"]


def test_options_of_the_process_select_the_main_file_and_the_socket(machine: Machine) -> None:
    other, address = machine.main.with_name("other.toml"), machine.folder / "other.sock"
    machine.socket = address
    text = f"[grpc]\n  address = '{machine.folder}/unused.sock'\n"
    machine.start_with("", options=f"--address={address}", main=other)
    other.write_text(other.read_text().partition("[grpc]")[0] + text)
    machine.systemctl("restart", "containerd.service")
    main = machine.main.read_text()
    done = machine.module(drop_ins="/nonexistent")
    assert (done.get("changed"), done.get("verified")) == (True, True), done
    assert done["files"] == [str(machine.main.parent / "conf.d/60-dra-accelerators.toml")]
    assert machine.knows() and machine.main.read_text() == main
    assert not machine.module()["changed"]
    assert machine.module(state="absent")["changed"]
    assert not machine.knows()


def test_main_file_that_each_start_rewrites_is_reported(machine: Machine) -> None:
    machine.start_with(f"{TABLE}\n  sandbox_image = 'localhost/pause:1'\n  enable_cdi = false\n")
    template = machine.folder / "template.toml"
    template.write_text(machine.main.read_text())
    command = f"cp {template} {machine.main} && exec {machine.containerd} --config {machine.main}\n{machine.socket}\n"
    (machine.folder / "command").write_text(command)
    machine.systemctl("restart", "containerd.service")
    before = machine.files()
    failed = machine.module()
    assert failed.get("error_code") == "restart-failed", failed
    assert f"rewrote {machine.main}" in failed["msg"] and "failed to restart" not in failed["msg"]
    assert machine.files() == before


def test_process_with_settings_other_than_its_older_files_is_not_restarted_repeatedly(machine: Machine) -> None:
    machine.start_with(
        f"{TABLE}\n  enable_cdi = true\n  cdi_spec_dirs = ['{machine.folder}/cdi/etc', '{machine.folder}/cdi/run']\n"
    )
    text = machine.main.read_text()
    # A bind mount that only the process sees has the effect of a file that is restored with its modification time.
    machine.start_with("")
    machine.main.write_text(text)
    os.utime(machine.main, (1, 1))
    pid = machine.pid()
    failed = machine.module()
    assert failed.get("error_code") == "no-proof", failed
    assert machine.pid() == pid


def test_without_crictl_the_result_is_not_verified(machine: Machine) -> None:
    (machine.programs / "crictl").unlink()
    done = machine.module()
    assert (done.get("enabled"), done.get("verified")) == (True, False), done
    assert "Not verified" in str(done["warnings"]) and "Install crictl" in str(done["warnings"])


def test_linked_main_file_remains_a_link(machine: Machine) -> None:
    machine.start_with(f"{TABLE}\n  sandbox_image = 'localhost/pause:1'\n  enable_cdi = false\n")
    target = machine.folder / "dotfiles.toml"
    machine.main.rename(target)
    machine.main.symlink_to(target)
    before = target.read_text()
    assert machine.module()["changed"]
    assert machine.main.is_symlink() and "enable_cdi = true" in target.read_text()
    assert machine.module(state="absent")["changed"]
    assert machine.main.is_symlink() and target.read_text() == before


def test_handler_in_linked_main_file_keeps_the_link(machine: Machine) -> None:
    machine.start_with("")
    target = machine.folder / "dotfiles.toml"
    target.write_text(machine.main.read_text().replace("imports", "# imports"))
    machine.main.unlink()
    machine.main.symlink_to(target)
    machine.systemctl("restart", "containerd.service")
    before = target.read_text()
    handler = {"name": "site", "options": {"BinaryName": "/usr/bin/true"}}
    assert machine.handler(**handler)["changed"]
    assert machine.main.is_symlink() and "BinaryName" in target.read_text()
    assert machine.handler(**handler, state="absent")["changed"]
    assert machine.main.is_symlink() and target.read_text() == before


@pytest.mark.parametrize("more", ["# by an administrator\n  ", "max_concurrent_downloads = 5\n  "])
def test_main_file_edited_between_two_changes_keeps_the_edit(machine: Machine, more: str) -> None:
    machine.start_with(f"{TABLE}\n  sandbox_image = 'localhost/pause:1'\n  enable_cdi = false\n")
    assert machine.module()["changed"]
    machine.main.write_text(machine.main.read_text().replace("sandbox_image", f"{more}sandbox_image"))
    machine.systemctl("restart", "containerd.service")
    expected = f"{TABLE}\n  {more}sandbox_image = 'localhost/pause:1'\n  enable_cdi = false\n"
    folders = [str(machine.folder / f"cdi/{name}") for name in ("etc", "run", "more")]
    assert machine.module(cdi_directories=folders)["changed"]
    done = machine.module(cdi_directories=folders, state="absent")
    assert done.get("changed"), done
    assert machine.main.read_text().endswith(expected)
    assert not list(machine.main.parent.glob("*before*")) and not machine.knows()


def test_read_only_file_system_is_rejected_by_check_mode_too(machine: Machine) -> None:
    machine.start_with(f"{TABLE}\n  sandbox_image = 'localhost/pause:1'\n  enable_cdi = false\n")
    before, folder = machine.files(), str(machine.main.parent)
    subprocess.run(["mount", "--bind", "--options", "ro", folder, folder], check=True)
    try:
        results = [machine.module(check=True), machine.module()]
        after = machine.files()
    finally:
        subprocess.run(["umount", folder], check=True)
    assert [each.get("error_code") for each in results] == ["read-only", "read-only"], results
    assert after == before


def test_main_file_that_cannot_be_replaced_leaves_nothing_behind(machine: Machine) -> None:
    machine.start_with(f"{TABLE}\n  sandbox_image = 'localhost/pause:1'\n  enable_cdi = false\n")
    before, pid = machine.files(), machine.pid()
    # A file that is a mount point or has the immutable attribute cannot be replaced.
    other = machine.folder / "other.toml"
    other.write_text(machine.main.read_text())
    subprocess.run(["mount", "--bind", other, machine.main], check=True)
    try:
        failed = machine.module()
    finally:
        subprocess.run(["umount", machine.main], check=True)
    assert failed.get("error_code") == "os-error" and f"{machine.main} cannot be replaced" in failed["msg"], failed
    assert machine.files() == before and machine.pid() == pid


@pytest.mark.prove
def test_next_run_retries_a_failed_restart(machine: Machine) -> None:
    machine.module()
    (machine.folder / "command").write_text(f"false\n{machine.socket}\n")
    machine.systemctl("restart", "containerd.service")
    failed = machine.module()
    assert failed["error_code"] == "restart-failed"
    assert "is not running" in failed["msg"]
    (machine.folder / "command").write_text(f"exec {machine.containerd} --config {machine.main}\n{machine.socket}\n")
    done = machine.module()
    assert done["restarted"]
    assert machine.knows()
