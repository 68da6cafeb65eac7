# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the module runtime_cdi on a real running CRI-O: changes, restarts, failures, and removal. It runs no
containers.
"""

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
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.crio.daemon import get
from ansible_collections.dra.accelerators.plugins.module_utils._container_runtime.toml_edit import parse

pytestmark = pytest.mark.prove

PROGRAM = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
with patch_module_args(json.load(sys.stdin)):
    importlib.import_module("ansible_collections.dra.accelerators.plugins.modules.runtime_cdi").main()
"""
MANAGER = Path(__file__).with_name("service_manager.py")
Result = dict[str, Any]


class Machine:
    """A node with its own CRI-O, below a directory."""

    def __init__(self, folder: Path, crio: Path) -> None:
        self.folder, self.crio, self.socket = folder, crio, folder / "crio.sock"
        self.programs = folder / "bin"
        self.programs.mkdir()
        # conmon and pinns serve containers, and none runs here.
        for name, text in (
            ("systemctl", f"#!{sys.executable}\n{MANAGER.read_text()}"),
            ("journalctl", f"#!{sys.executable}\n{MANAGER.read_text()}"),
            ("conmon", "#!/bin/sh\necho conmon version 2.1.12\n"),
            ("pinns", "#!/bin/sh\n"),
            ("runc", "#!/bin/sh\necho runc version 1.3.0\n"),
        ):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)
        self.main, self.drop_ins = folder / "etc/crio.conf", folder / "etc/crio.conf.d"
        self.drop_ins.mkdir(parents=True)
        (folder / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        self.start_with()

    def start_with(self, check: str = "true", more: str = "", **drop_ins: str) -> None:
        """Start CRI-O with these lines in its table and these drop-in files. ``check`` runs before each start."""
        here, programs = self.folder, self.programs
        self.main.write_text(
            f"# The site's own words.\n[crio]\nroot = '{here}/root'\nrunroot = '{here}/run'\nstorage_driver = 'vfs'\n"
            f"log_dir = '{here}/pods'\nversion_file = '{here}/version'\nversion_file_persist = ''\nclean_shutdown_file = ''\n"
            f"[crio.api]\nlisten = '{self.socket}'\nstream_address = '127.0.0.1'\nstream_port = '0'\n"
            f"[crio.runtime]\n{more}\ndefault_runtime = 'runc'\ncgroup_manager = 'cgroupfs'\nconmon_cgroup = 'pod'\n"
            f"conmon = '{programs}/conmon'\npinns_path = '{programs}/pinns'\ncontainer_exits_dir = '{here}/exits'\n"
            f"container_attach_socket_dir = '{here}/attach'\nnamespaces_dir = '{here}/ns'\nhooks_dir = []\n"
            f"[crio.runtime.runtimes.runc]\nruntime_path = '{programs}/runc'\nmonitor_path = '{programs}/conmon'\n"
            f"[crio.image]\nsignature_policy = '{here}/policy.json'\nsignature_policy_dir = '{here}/policies'\n"
            f"[crio.network]\nnetwork_dir = '{here}/cni'\nplugin_dirs = ['{here}/cni-bin']\n[crio.nri]\nenable_nri = false\n"
        )
        for path in self.drop_ins.iterdir():
            path.unlink()
        for name, text in drop_ins.items():
            (self.drop_ins / name).write_text(text)
        daemon = f"{self.crio} --config {self.main} --config-dir {self.drop_ins}"
        (self.folder / "command").write_text(f"{check} && exec {daemon}\n{self.socket}\n")
        self.socket.unlink(missing_ok=True)
        self.systemctl("restart", "crio.service")

    def environment(self) -> dict[str, str]:
        """Return the environment of the module's process."""
        path = f"{self.programs}:{os.environ['PATH']}"
        own = {"SERVICE_MANAGER_FOLDER": str(self.folder), "SERVICE_MANAGER_UNIT": "crio.service"}
        return {**os.environ, "PATH": path, **own}

    def systemctl(self, *words: str) -> None:
        """Call the service manager."""
        command = [self.programs / "systemctl", *words]
        subprocess.run(command, env=self.environment(), capture_output=True, text=True, check=False)

    def stop(self) -> None:
        """Stop the daemon."""
        (self.folder / "command").write_text(f"false\n{self.socket}\n")
        self.systemctl("restart", "crio.service")

    def pid(self) -> str:
        """Return the daemon's process ID."""
        return (self.folder / "pid").read_text()

    def module(self, *, check: bool = False, **options: Any) -> Result:
        """Run the module and return its result."""
        places = {"command": self.crio, "config": self.main, "drop_ins": self.drop_ins}
        given = {
            "crio": {**{key: str(value) for key, value in places.items()}, "timeout": 30},
            "cdi_directories": [str(self.folder / "cdi/etc"), str(self.folder / "cdi/run")],
            "records": str(self.folder / "record"),
            "_ansible_check_mode": check,
            "_ansible_diff": True,
            **options,
        }
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM],
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

    def knows(self) -> list[str]:
        """Return the CDI directories of the running CRI-O."""
        found: list[str] = parse(get(str(self.socket), "/config"), "crio")["crio"]["runtime"]["cdi_spec_dirs"]
        return found

    def files(self) -> dict[str, str]:
        """Return the files that the module can change: configuration, record, and CDI files."""
        found = {}
        for name in ("etc", "record", "cdi"):
            for path in sorted([self.folder / name, *(self.folder / name).rglob("*")]):
                if path.exists():
                    found[str(path.relative_to(self.folder))] = path.read_text() if path.is_file() else "folder"
        return found


@pytest.fixture
def machine(crio: Path) -> Iterator[Machine]:
    # A socket path must be short.
    with tempfile.TemporaryDirectory(prefix="crio-") as folder:
        made = Machine(Path(folder), crio)
        try:
            yield made
        finally:
            made.stop()


def test_cdi_directories_are_set_in_a_drop_in_and_removed(machine: Machine) -> None:
    before = machine.files()
    foretold = machine.module(check=True)
    assert foretold["changed"] and foretold["restarted"], foretold
    assert machine.files() == before
    done = machine.module()
    assert done.get("runtime") == "cri-o", done
    assert done["files"] == [str(machine.drop_ins / "60-dra-accelerators.conf")] == foretold["files"]
    assert machine.knows() == [
        "/etc/cdi",
        "/var/run/cdi",
        str(machine.folder / "cdi/etc"),
        str(machine.folder / "cdi/run"),
    ]
    after, pid = machine.files(), machine.pid()
    again = machine.module()
    assert not again["changed"], again
    assert (machine.files(), machine.pid()) == (after, pid)
    back = machine.module(state="absent")
    assert back["restarted"], back
    assert machine.knows() == ["/etc/cdi", "/var/run/cdi"]
    assert machine.files() == before
    assert not machine.module(state="absent")["changed"]


def test_directories_enabled_by_default_are_unchanged(machine: Machine) -> None:
    before, pid = machine.files(), machine.pid()
    folders = machine.knows()
    done = machine.module(cdi_directories=folders, check=True)
    assert (done["files"], done["restarted"]) == ([], False), done
    assert (machine.files(), machine.pid()) == (before, pid)


def test_later_file_with_cdi_directories_is_changed(machine: Machine) -> None:
    text = '# Theirs.\n[crio.runtime]\ncdi_spec_dirs = ["/srv/cdi"] # by hand\n'
    machine.start_with(**{"99-site.conf": text, "70-other.conf": "[crio.runtime]\npids_limit = 512\n"})
    before = machine.files()
    done = machine.module()
    assert done["files"] == [str(machine.drop_ins / "99-site.conf")], done
    assert machine.knows()[0] == "/srv/cdi"
    assert len(machine.knows()) == 3
    # No file of ours is in the directory, because CRI-O would read it.
    assert sorted(path.name for path in machine.drop_ins.iterdir()) == ["70-other.conf", "99-site.conf"]
    assert machine.module(state="absent")["changed"]
    assert machine.files() == before


def test_configuration_that_cri_o_rejects_is_rolled_back(machine: Machine) -> None:
    machine.start_with(check=f"! ls {machine.drop_ins} | grep -q dra-accelerators")
    before = machine.files()
    failed = machine.module()
    assert failed["failed"]
    assert failed["error_code"] == "restart-failed", failed
    assert "It runs with its previous files" in failed["msg"]
    assert machine.files() == before
    assert machine.knows() == ["/etc/cdi", "/var/run/cdi"]


def test_next_run_does_the_restart_of_a_killed_run(machine: Machine) -> None:
    machine.module()
    text = (machine.drop_ins / "60-dra-accelerators.conf").read_text()
    machine.module(state="absent")
    (machine.drop_ins / "60-dra-accelerators.conf").write_text(text)
    done = machine.module()
    assert (done["files"], done["restarted"]) == ([], True), done
    assert str(machine.folder / "cdi/run") in machine.knows()
    assert not machine.module()["changed"]


def test_options_of_the_process_select_its_files(machine: Machine) -> None:
    before = machine.files()
    places = {"command": machine.crio, "config": "/nonexistent/crio.conf", "drop_ins": "/nonexistent/crio.conf.d"}
    other = {"crio": {**{key: str(value) for key, value in places.items()}, "timeout": 30}}
    done = machine.module(**other)
    assert (done.get("changed"), done.get("verified")) == (True, True), done
    assert done["files"] == [str(machine.drop_ins / "60-dra-accelerators.conf")]
    assert str(machine.folder / "cdi/etc") in machine.knows()
    assert not machine.module(**other)["changed"]
    assert machine.module(state="absent", **other)["changed"]
    assert machine.files() == before


def test_files_that_cri_o_rejects_are_named_and_nothing_is_changed(machine: Machine) -> None:
    (machine.drop_ins / "50-site.conf.old").write_text("[crio.runtime\n")
    before, pid = machine.files(), machine.pid()
    failed = machine.module()
    assert failed["error_code"] == "configuration-refused", failed
    assert "50-site.conf.old" in failed["msg"]
    assert (machine.files(), machine.pid()) == (before, pid)


def test_flag_with_other_cdi_directories_is_reported_without_repeated_restarts(machine: Machine) -> None:
    command = (machine.folder / "command").read_text().replace("--config ", "--cdi-spec-dirs /srv/flag --config ", 1)
    (machine.folder / "command").write_text(command)
    machine.systemctl("restart", "crio.service")
    before, pid = machine.files(), machine.pid()
    failed = machine.module(cdi_directories=["/etc/cdi"], check=True)
    assert failed["error_code"] == "no-proof", failed
    assert "/srv/flag" in failed["msg"]
    assert (machine.files(), machine.pid()) == (before, pid)
