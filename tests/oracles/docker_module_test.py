# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Test the module runtime_cdi on a real Docker Engine of the last release line in which CDI must be enabled: changes,
restarts, failures, running containers, a container with a device, and the removal.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mounts import detach

pytestmark = pytest.mark.prove

PROGRAM = """
import importlib, json, sys
from ansible.module_utils.testing import patch_module_args
with patch_module_args(json.load(sys.stdin)):
    importlib.import_module("ansible_collections.dra.accelerators.plugins.modules.runtime_cdi").main()
"""
#: Seconds for which mounts can stay busy after their daemons were killed.
SECONDS = 60
MANAGER = Path(__file__).with_name("service_manager.py")
SITE = '{\n  "log-opts": {"max-size": "8m"},\n  "live-restore": false\n}\n'
#: Directories that it reads by default if CDI is enabled.
DEFAULT = ["/etc/cdi", "/var/run/cdi"]
#: Program of the containers: prints the major and minor numbers of a device, or keeps running.
CONTAINED = """
#include <stdio.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>
int main(int count, char **words)
{
    struct stat found;
    if (count < 2)
        return pause();
    if (stat(words[1], &found))
        return 1;
    return printf("%u:%u\\n", major(found.st_rdev), minor(found.st_rdev)) < 0;
}
"""
Result = dict[str, Any]


class Machine:
    """A node with its own Docker Engine, below a directory."""

    def __init__(self, folder: Path, docker: Path, containerd: Path) -> None:
        self.folder, self.socket, self.daemon = folder, folder / "docker.sock", docker.with_name("dockerd")
        self.programs, self.config = folder / "bin", folder / "etc/daemon.json"
        # The defaults would be directories of the test host.
        self.wanted = folder / "cdi"
        self.on = [*DEFAULT, str(self.wanted)]
        self.programs.mkdir()
        self.config.parent.mkdir()
        for name, text in (
            ("systemctl", f"#!{sys.executable}\n{MANAGER.read_text()}"),
            ("journalctl", f"#!{sys.executable}\n{MANAGER.read_text()}"),
            ("docker", f'#!/bin/sh\nexec {docker} --host unix://{self.socket} "$@"\n'),
        ):
            (self.programs / name).write_text(text)
            (self.programs / name).chmod(0o755)
        for name in ("containerd", "containerd-shim-runc-v2"):
            (self.programs / name).symlink_to(containerd.with_name(name))

    def start_with(self, text: str | None = SITE, check: str = "true", more: str = "") -> None:
        """Start Docker Engine with this file. ``check`` runs before each start, ``more`` are options of the daemon."""
        self.config.unlink(missing_ok=True)
        if text is not None:
            self.config.write_text(text)
        here = self.folder
        # In its own network namespace: with --bridge none it removes the bridge of the host's Docker Engine.
        daemon = (
            f"unshare --net {self.daemon} --config-file {self.config} --host unix://{self.socket} --data-root {here}/data --exec-root {here}/exec"
            f" --pidfile {here}/docker.pid --storage-driver vfs --bridge none --iptables=false --ip6tables=false --userland-proxy=false {more}"
        )
        # The service manager of this test kills the daemon, so the files that a clean exit removes remain.
        tidy = f"rm -f {here}/docker.pid {self.socket}"
        (here / "command").write_text(f"{tidy}; {check} && exec {daemon}\n{self.socket}\n")
        self.systemctl("restart", "docker.service")

    def environment(self) -> dict[str, str]:
        """Return the environment of the module's process."""
        path = f"{self.programs}:{os.environ['PATH']}:/usr/sbin:/sbin"
        own = {"SERVICE_MANAGER_FOLDER": str(self.folder), "SERVICE_MANAGER_UNIT": "docker.service"}
        return {**os.environ, "PATH": path, **own}

    def systemctl(self, *words: str) -> None:
        """Call the service manager."""
        subprocess.run([self.programs / "systemctl", *words], env=self.environment(), capture_output=True, check=False)

    def stop(self) -> None:
        """Stop the containers and the daemon."""
        self.docker("rm", "--force", "stays", check=False)
        (self.folder / "command").write_text(f"false\n{self.socket}\n")
        self.systemctl("restart", "docker.service")
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((self.folder / "exec/containerd/containerd.pid").read_text()), signal.SIGKILL)
        for mount in subprocess.run(
            ["findmnt", "-rno", "TARGET"], capture_output=True, text=True, check=True
        ).stdout.split():
            if mount.startswith(f"{self.folder}/"):
                # The kernel closes a killed process's files a moment after the process has ended.
                detach(Path(mount), SECONDS)

    def pid(self) -> str:
        """Return the daemon's process ID."""
        return (self.folder / "pid").read_text()

    def docker(self, *words: str, check: bool = True, data: bytes | None = None) -> str:
        """Call Docker Engine; return its output."""
        done = subprocess.run([self.programs / "docker", *words], input=data, capture_output=True, check=False)
        assert not check or done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def module(self, *, check: bool = False, **options: Any) -> Result:
        """Run the module and return its result."""
        stop = options.pop("stop_containers", False)
        given = {
            "runtime": "docker",
            "docker": {"daemon": str(self.daemon), "config": str(self.config), "timeout": 60, "stop_containers": stop},
            "cdi_directories": [str(self.wanted)],
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
        """Return the CDI directories of the running Docker Engine; empty if CDI is disabled."""
        return json.loads(self.docker("info", "--format", "{{json .CDISpecDirs}}")) or []

    def files(self) -> dict[str, str]:
        """Return the files that the module can change: configuration, record, and CDI files."""
        found = {}
        for name in ("etc", "record", "cdi"):
            for path in sorted([self.folder / name, *(self.folder / name).rglob("*")]):
                if path.exists():
                    found[str(path.relative_to(self.folder))] = path.read_text() if path.is_file() else "folder"
        return found


@pytest.fixture
def machine(docker: Path, containerd: Path) -> Iterator[Machine]:
    bridge = Path("/sys/class/net/docker0").exists()
    # A socket path must be short.
    with tempfile.TemporaryDirectory(prefix="docker-") as folder:
        made = Machine(Path(folder), docker, containerd)
        try:
            yield made
        finally:
            made.stop()
    assert Path("/sys/class/net/docker0").exists() == bridge, "the machine's own Docker Engine has lost its bridge"


def test_cdi_is_enabled_and_disabled(machine: Machine) -> None:
    machine.start_with()
    before = machine.files()
    assert machine.knows() == []
    foretold = machine.module(check=True)
    assert foretold["changed"] and foretold["restarted"], foretold
    assert machine.files() == before
    done = machine.module()
    assert done.get("files") == [str(machine.config)] == foretold["files"], done
    assert machine.knows() == machine.on
    written = json.loads(machine.config.read_text())
    assert list(written) == ["log-opts", "live-restore", "features", "cdi-spec-dirs"] and written["features"] == {
        "cdi": True
    }
    after, pid = machine.files(), machine.pid()
    assert not machine.module()["changed"]
    assert (machine.files(), machine.pid()) == (after, pid)
    back = machine.module(state="absent")
    assert back["restarted"], back
    assert (machine.knows(), machine.files()) == ([], before)
    assert not machine.module(state="absent")["changed"]


def test_option_of_the_process_selects_its_file(machine: Machine) -> None:
    machine.start_with()
    other = {"daemon": str(machine.daemon), "config": "/nonexistent/daemon.json", "timeout": 60}
    done = machine.module(docker=other)
    assert done.get("files") == [str(machine.config)], done
    assert machine.knows() == machine.on
    assert not machine.module(docker=other)["changed"]
    assert machine.module(docker=other, state="absent")["changed"]
    assert machine.config.read_text() == SITE and machine.knows() == []


def test_enabled_cdi_is_unchanged(machine: Machine) -> None:
    machine.wanted.mkdir()
    machine.start_with(json.dumps({"features": {"cdi": True}, "cdi-spec-dirs": machine.on}))
    before, pid = machine.files(), machine.pid()
    done = machine.module()
    assert (done["files"], done["restarted"]) == ([], False), done
    assert (machine.files(), machine.pid()) == (before, pid)


def test_configuration_that_docker_rejects_is_rolled_back(machine: Machine) -> None:
    machine.start_with(check=f"! grep -q cdi {machine.config}")
    before = machine.files()
    failed = machine.module()
    assert failed.get("error_code") == "restart-failed", failed
    assert "It runs with its previous files" in failed["msg"]
    assert (machine.files(), machine.knows()) == (before, [])


def test_next_run_does_the_restart_of_a_killed_run(machine: Machine) -> None:
    machine.start_with()
    machine.module()
    text = machine.config.read_text()
    machine.module(state="absent")
    machine.config.write_text(text)
    done = machine.module()
    assert (done["files"], done["restarted"]) == ([], True), done
    assert machine.knows() == machine.on
    assert not machine.module()["changed"]


def test_invalid_file_is_named_and_nothing_is_changed(machine: Machine) -> None:
    machine.start_with()
    machine.config.write_text('{"log-opts": {')
    before, pid = machine.files(), machine.pid()
    failed = machine.module()
    assert failed["error_code"] == "invalid-json" and str(machine.config) in failed["msg"], failed
    assert (machine.files(), machine.pid()) == (before, pid)


def test_conflicting_flag_is_rejected_before_any_change(machine: Machine) -> None:
    machine.start_with(more="--feature cdi=false")
    before = machine.files()
    failed = machine.module()
    assert failed["failed"], failed
    assert machine.files() == before and machine.knows() == []


def test_running_containers_are_not_stopped_without_consent_and_get_devices_after_it(machine: Machine) -> None:
    machine.start_with()
    program = machine.folder / "image/program"
    program.parent.mkdir()
    subprocess.run(["gcc", "-static", "-o", program, "-x", "c", "-"], input=CONTAINED, text=True, check=True)
    image = subprocess.run(["tar", "-cC", program.parent, "program"], capture_output=True, check=True).stdout
    machine.docker("import", "-", "image", data=image)
    machine.docker("run", "--detach", "--name=stays", "--network=none", "image", "/program")
    before, pid = machine.files(), machine.pid()
    refused = machine.module()
    assert refused["error_code"] == "containers-run" and "stays" in refused["msg"], refused
    assert (machine.files(), machine.pid()) == (before, pid)
    assert machine.module(stop_containers=True)["restarted"]
    node = {"path": "/dev/accelerator", "hostPath": "/dev/zero", "type": "c"}
    device = {"name": "zero", "containerEdits": {"deviceNodes": [node]}}
    (machine.wanted / "oracle.json").write_text(
        json.dumps({"cdiVersion": "0.5.0", "kind": "oracle.example/device", "devices": [device]})
    )
    words = [
        "run",
        "--rm",
        "--network=none",
        "--device=oracle.example/device=zero",
        "image",
        "/program",
        "/dev/accelerator",
    ]
    assert machine.docker(*words) == "1:5"
