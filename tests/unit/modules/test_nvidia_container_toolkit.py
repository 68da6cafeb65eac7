# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA Container Toolkit: packages, units, rollback, and the state after its removal."""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.container_toolkit import (
    BASE,
    FULL,
    PATH_UNIT,
    SERVICE_UNIT,
    SPECIFICATION,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import Change, upstream
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed
from ansible_collections.dra.accelerators.plugins.modules import nvidia_container_toolkit
from package_machine import GroupApt, UnitMachine

OLD, OLDER, NEWER, FAILING = "1.16.2", "1.18.0", "1.18.1", "1.19.0"
CONFIG = "/etc/nvidia-container-runtime/config.toml"
RECORD = "/var/lib/dra-accelerators/nvidia-container-toolkit"
NEEDS = {
    "nvidia-container-toolkit": (BASE, "libnvidia-container-tools"),
    "libnvidia-container-tools": ("libnvidia-container1",),
}


def base_script(machine: UnitMachine, version: str) -> None:
    """Act as the vendor's scripts: create a configuration that dpkg does not know, and enable the units each time."""
    if not version:
        for unit in (PATH_UNIT, SERVICE_UNIT):
            assert not machine.units.pop(unit, False), f"{unit} was left switched on"
        return
    if not machine.exists(CONFIG):
        machine.put_file(CONFIG, f"# of {version}\n")
    if version == OLD:
        return
    for unit in (PATH_UNIT, SERVICE_UNIT):
        machine.units[unit] = True
        machine.running.add(unit)
    machine.put_file(SPECIFICATION, "cdiVersion: 0.5.0\n")


class Node:
    """A node on which the module runs."""

    def __init__(self, root: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = UnitMachine(root)
        versions = [f"{version}-1" for version in (FAILING, NEWER, OLDER, OLD)]
        self.apt = GroupApt(self.machine, {name: list(versions) for name in FULL}, NEEDS)
        self.apt.scripts[BASE] = base_script
        self.machine.programs["/usr/bin/nvidia-ctk"] = self._ctk
        self.machine.started[SERVICE_UNIT] = lambda: self.machine.put_file(SPECIFICATION, "cdiVersion: 0.5.0\n")
        self._run = run_here
        monkeypatch.setattr(nvidia_container_toolkit, "System", lambda: self.machine)
        monkeypatch.setattr(nvidia_container_toolkit, "tool_of", lambda system, timeout: self.apt)

    def _ctk(self, words: list[str]) -> Completed:
        version = upstream(self.apt.installed.get(BASE, ""))
        if version in ("", FAILING):
            return Completed(127, "", "nvidia-ctk: cannot execute")
        return Completed(0, f"NVIDIA Container Toolkit CLI version {version}\ncommit: abc\n", "")

    def run(self, version: str = "", *, check: bool = False, **options: Any) -> dict[str, Any]:
        return self._run("nvidia_container_toolkit", {"version": version, **options}, check=check, diff=True)

    def has(self, version: str) -> bool:
        """Return whether the whole toolkit is installed in this version, and no other version."""
        mine = {name: each for name, each in self.apt.installed.items() if name != "bash"}
        return mine == (dict.fromkeys(FULL, f"{version}-1") if version else {})

    def files(self) -> dict[str, str]:
        """Return all files that a package could have created, with their texts."""
        root = self.machine.path("/")
        return {
            str(path.relative_to(root)): path.read_text() if path.is_file() else ""
            for directory in ("etc", "var")
            for path in sorted((root / directory).rglob("*"))
            if "kept" not in path.name
            and path.name not in ("lib", "run", "cdi", "apt", "preferences.d", "sources.list.d")
        }

    def record(self) -> dict[str, Any]:
        path = self.machine.path(f"{RECORD}/record.json")
        return json.loads(path.read_text()) if path.exists() else {}

    def install_by_hand(self, version: str) -> None:
        for name in FULL:
            self.apt.installed[name] = f"{version}-1"
        base_script(self.machine, version)


@pytest.fixture
def node(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, run_here, monkeypatch)


def test_install_is_one_version_and_idempotent(node: Node) -> None:
    dry_run = node.run("1.18", check=True)
    assert dry_run["changed"] and node.has("") and not node.record() and node.apt.updates == []
    done = node.run("1.18")
    assert done["steps"] == dry_run["steps"] and done["after"]["packages"] == dry_run["after"]["packages"], done
    assert node.has(NEWER) and node.apt.held == set(FULL)
    assert "Pin: version" in node.machine.read_text("/etc/apt/preferences.d/dra-accelerators-nvidia-container-toolkit")
    again = node.run("1.18")
    assert not again["changed"] and again["steps"] == [] and again["diff"] == []
    assert not node.run()["changed"], "without a requested version the installed one is kept"


def test_upgrade_on_request_and_back(node: Node) -> None:
    node.run(OLDER)
    assert not node.run("1.18")["changed"], "it is one of these already"
    done = node.run("1.18", latest=True)
    assert done["before"]["version"] == OLDER and node.has(NEWER) and done["previous_available"]
    assert f"in place of {OLDER}" in " ".join(done["steps"])
    node.apt.source.clear()
    for expected in (OLDER, NEWER, OLDER):
        dry_run = node.run(state="previous", check=True)
        done = node.run(state="previous")
        assert done["changed"] and done["steps"] == dry_run["steps"]
        assert node.has(expected) and node.apt.held == set(FULL), "no source is needed for that"


def test_previous_without_earlier_version_is_rejected(node: Node) -> None:
    node.run(NEWER)
    for check in (True, False):
        refused = node.run(state="previous", check=check)
        assert refused["error_code"] == "no-former" and node.has(NEWER)


def test_absent_removes_everything(node: Node) -> None:
    before = node.files()
    node.run(NEWER, cdi_refresh="enabled")
    assert node.files() != before
    dry_run = node.run(state="absent", check=True)
    assert node.has(NEWER)
    done = node.run(state="absent")
    assert done["changed"] and done["steps"] == dry_run["steps"] and done["after"] == dry_run["after"]
    assert node.has("") and not node.apt.held and not node.machine.units
    assert node.files() == before
    assert not node.run(state="absent")["changed"]


def test_absent_restores_previous_installation(node: Node) -> None:
    node.install_by_hand(OLDER)
    node.machine.put_file(CONFIG, "# by hand\n")
    node.apt.held.add(BASE)
    node.machine.units[SERVICE_UNIT] = False
    before = node.files()
    node.run(NEWER, cdi_refresh="enabled")
    assert node.has(NEWER) and node.machine.units[SERVICE_UNIT]
    node.machine.put_file(CONFIG, "# changed since\n")
    dry_run = node.run(state="absent", check=True)
    assert node.has(NEWER)
    done = node.run(state="absent")
    assert done["steps"] == dry_run["steps"], done
    assert node.has(OLDER) and node.apt.held == {BASE} and node.files() == before
    assert node.machine.units == {PATH_UNIT: True, SERVICE_UNIT: False}
    again = node.run(state="absent")
    assert not again["changed"] and f"{BASE} {OLDER}-1" in again["unmanaged"], "it is not this collection's"
    assert node.run(state="absent", remove_unmanaged=True)["changed"] and node.has("")


def test_absent_restores_units_only(node: Node) -> None:
    node.install_by_hand(NEWER)
    done = node.run(cdi_refresh="disabled", hold=False)
    assert done["steps"] == [f"switch {PATH_UNIT} off", f"switch {SERVICE_UNIT} off"]
    assert node.machine.units == {PATH_UNIT: False, SERVICE_UNIT: False} and not node.machine.exists(SPECIFICATION)
    assert not node.run(cdi_refresh="disabled", hold=False)["changed"]
    node.run(state="absent")
    assert node.machine.units == {PATH_UNIT: True, SERVICE_UNIT: True} and node.has(NEWER)


@pytest.mark.parametrize("was", ["", OLDER])
def test_failing_version_is_rolled_back(node: Node, was: str) -> None:
    if was:
        node.run(was)
    before, units = node.files(), dict(node.machine.units)
    refused = node.run(FAILING)
    assert refused["failed"] and refused["error_code"] == "not-proved" and "cannot execute" in refused["msg"]
    assert ("again" in refused["msg"]) and node.has(was) and node.machine.units == units
    assert node.files() == before and node.apt.held == (set(FULL) if was else set())
    assert node.run(NEWER)["changed"] and node.has(NEWER), "the next one comes all the same"


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("was", ["", OLDER])
@pytest.mark.parametrize("then", ["present", "absent"])
def test_interrupted_run_is_resumed_or_undone(node: Node, name: str, was: str, then: str) -> None:
    before = node.files()
    if was:
        node.run(was)
    node.apt.killed_at = name
    with pytest.raises(KeyboardInterrupt):
        node.run(NEWER)
    assert node.record()["doing"] == "install"
    node.apt.broken.append(name)
    if then == "present":
        assert node.run(NEWER)["changed"] and node.has(NEWER) and not node.record()["doing"]
        assert not node.run(NEWER)["changed"]
    node.run(state="absent")
    assert node.has("") and node.files() == before and not node.machine.units


@pytest.mark.parametrize(("refresh", "is_on"), [("keep", True), ("enabled", True), ("disabled", False)], ids=str)
def test_units_keep_requested_state_after_upgrade(node: Node, refresh: str, is_on: bool) -> None:
    for version in (OLDER, NEWER):
        node.run(version, cdi_refresh=refresh)
        assert node.machine.units == {PATH_UNIT: is_on, SERVICE_UNIT: is_on}
        assert node.machine.exists(SPECIFICATION) == is_on
        assert not node.run(version, cdi_refresh=refresh)["changed"]
    for other, on in (("disabled", False), ("enabled", True)):
        node.run(cdi_refresh=other)
        assert node.machine.units == {PATH_UNIT: on, SERVICE_UNIT: on}


def test_cdi_file_is_required_with_driver(node: Node) -> None:
    node.machine.put_file("/sys/module/nvidia/version", "580.95.05\n")
    node.run(NEWER, cdi_refresh="disabled")
    node.run(cdi_refresh="enabled")
    assert node.machine.exists(SPECIFICATION) and f"restart {SERVICE_UNIT}" in node.machine.log
    node.run(cdi_refresh="disabled")
    node.machine.started.clear()
    refused = node.run(cdi_refresh="enabled")
    assert refused["error_code"] == "no-specification" and node.machine.units == {PATH_UNIT: False, SERVICE_UNIT: False}


def test_version_without_units_is_rejected_for_enabled(node: Node) -> None:
    refused = node.run(OLD, cdi_refresh="enabled")
    assert refused["error_code"] == "no-unit" and node.has("")
    assert node.run(OLD, cdi_refresh="disabled")["changed"] and node.has(OLD)


def test_masked_unit_is_rejected(node: Node) -> None:
    node.install_by_hand(NEWER)
    node.machine.masked.add(PATH_UNIT)
    refused = node.run(cdi_refresh="enabled")
    assert refused["error_code"] == "masked" and PATH_UNIT in refused["msg"]


def test_base_component_installs_only_programs_in_one_version(node: Node) -> None:
    node.run(OLDER, components="base")
    assert node.apt.installed == {"bash": "5.2-1", BASE: f"{OLDER}-1"}
    node.run(OLDER)
    assert node.has(OLDER), "the rest comes besides"
    node.run(NEWER, components="base")
    assert node.has(NEWER), "one version for all"


def test_unavailable_version_names_available_ones(node: Node) -> None:
    node.apt.source["libnvidia-container1"] = [f"{OLDER}-1"]
    for check in (True, False):
        refused = node.run(NEWER, check=check)
        assert refused["error_code"] == "not-offered" and f"libnvidia-container1: {OLDER}-1" in refused["msg"]
    assert node.run()["changed"] and node.has(OLDER), "the newest that is there whole"


def test_absent_of_required_packages_is_rejected(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    node.run(NEWER)
    all_of_it = [Change("purge", name, "1") for name in (*FULL, "nvidia-docker2")]
    monkeypatch.setattr(node.apt, "foresee", lambda *_: tuple(all_of_it))
    refused = node.run(state="absent")
    assert refused["error_code"] == "would-remove" and "nvidia-docker2" in refused["msg"] and node.has(NEWER)


def test_source_is_added_and_removed(node: Node) -> None:
    source = {"uris": ["http://mirror/toolkit"], "suites": ["/"]}
    node.run(NEWER, source=source)
    path = "/etc/apt/sources.list.d/dra-accelerators-nvidia-container-toolkit.sources"
    assert "URIs: http://mirror/toolkit" in node.machine.read_text(path) and node.apt.updates == [path]
    assert not node.run(NEWER, source=source)["changed"]
    node.run(NEWER)
    assert not node.machine.exists(path), "without it, what apt knows counts"


def test_package_files_are_verified_before_installation(node: Node) -> None:
    node.apt.source.clear()
    files = [f"/packages/{name}_{NEWER}-1_amd64.deb" for name in FULL]
    assert node.run(files=files, check=True)["changed"], "a missing package is checked by its name"
    assert node.run(files=files)["error_code"] == "package-missing"
    for path in files:
        node.machine.put_file(path, path)
    refused = node.run(files=files, checksums={files[0].rpartition("/")[2]: "0" * 64})
    assert refused["error_code"] == "checksum" and node.has("")
    assert node.run(files=files)["changed"] and node.has(NEWER) and node.apt.updates == []


def test_files_are_installed_from_verified_copies(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user replaces a package's file after its verification: the copy in root's directory is installed."""
    node.apt.source.clear()
    files = [f"/packages/{name}_{NEWER}-1_amd64.deb" for name in FULL]
    for path in files:
        node.machine.put_file(path, path)
    digests = {path.rpartition("/")[2]: hashlib.sha256(path.encode()).hexdigest() for path in files}
    seen: list[str] = []
    install = node.apt.install

    def spy(words: Any, **options: Any) -> None:
        for path in files:
            node.machine.put_file(path, "evil")
        for word in words:
            copy = node.machine.path(word)
            assert hashlib.sha256(copy.read_bytes()).hexdigest() == digests[copy.name]
            assert stat.S_IMODE(copy.parent.stat().st_mode) == 0o700
            seen.append(word)
        install(words, **options)

    monkeypatch.setattr(node.apt, "install", spy)
    assert node.run(files=files, checksums=digests)["changed"]
    assert len(seen) == len(files) and not set(seen) & set(files)
    assert not node.machine.exists("/var/lib/dra-accelerators/packages-verified")


@pytest.mark.parametrize("state", ["present", "absent"])
def test_copies_of_a_killed_run_are_removed(node: Node, state: str) -> None:
    node.run(NEWER)
    node.machine.put_file("/var/lib/dra-accelerators/packages-verified/7/left.deb", "left")
    assert "msg" not in node.run(NEWER, state=state)
    assert not node.machine.exists("/var/lib/dra-accelerators/packages-verified")


def test_key_with_other_fingerprint_is_rejected(node: Node) -> None:
    source = {"uris": ["http://mirror/toolkit"], "suites": ["/"], "key": "none", "fingerprints": ["0" * 40]}
    assert node.run(NEWER, source=source)["error_code"] == "repository-key" and node.has("")
