# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Module nvidia_fabric_manager: the nodes that need it, its version, blockers, and the condition for a working service."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host import fabric_packages
from ansible_collections.dra.accelerators.plugins.module_utils._nvidia_host.fabric_packages import (
    IMEX,
    IMEX_UNIT,
    MANAGER,
    MANAGER_UNIT,
    SUBNET,
    wait_for_imex,
)
from ansible_collections.dra.accelerators.plugins.module_utils._packages.interface import PackageProblem
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed
from ansible_collections.dra.accelerators.plugins.modules import nvidia_fabric_manager
from driver_store import claim
from fabric_query import NEWER, OLDER, query
from package_machine import GroupApt, UnitMachine


class Node:
    """A node with a driver, a source with packages for it, and a fabric manager that GPUs use to join."""

    def __init__(self, root: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
        self.machine = UnitMachine(root)
        both = [f"{NEWER}-1", f"{OLDER}-1"]
        source = {MANAGER: both, IMEX: both, SUBNET: ["2025.06.5-1"], f"{MANAGER}-575": [f"{OLDER}-1"]}
        self.apt = GroupApt(self.machine, source, {})
        for name, unit in ((MANAGER, MANAGER_UNIT), (f"{MANAGER}-575", MANAGER_UNIT), (IMEX, IMEX_UNIT)):
            self.apt.scripts[name] = self._script_of(unit, gives_way=name.endswith("-575"))
        self.machine.programs["nvidia-smi"] = self._smi
        self.machine.programs["nvidia-imex-ctl"] = self._imex_ctl
        #: The state that IMEX reports while it runs. "" means without a command service.
        self.imex = "READY"
        self.state, self.status = "Completed", "Success"
        self.health: dict[str, str] = {}
        self.driver(NEWER)
        self._run = run_here
        monkeypatch.setattr(nvidia_fabric_manager, "System", lambda: self.machine)
        monkeypatch.setattr(nvidia_fabric_manager, "tool_of", lambda system, timeout: self.apt)
        monkeypatch.setattr(nvidia_fabric_manager, "find_binding", lambda name, interpreter: "none")
        monkeypatch.setattr(self.machine, "finds", lambda name: True)
        monkeypatch.setattr(fabric_packages.time, "sleep", lambda seconds: None)

    @staticmethod
    def _script_of(unit: str, *, gives_way: bool) -> Callable[[UnitMachine, str], None]:
        def script(machine: UnitMachine, version: str) -> None:
            if version:
                # As in Debian's packages: disabled, unless it existed before.
                machine.units.setdefault(unit, False)
            else:
                assert not machine.units.pop(unit, False) or gives_way, f"{unit} was left switched on"

        return script

    def _smi(self, words: list[str]) -> Completed:
        runs = MANAGER_UNIT in self.machine.running
        state = self.state if runs or self.state == "N/A" else "In Progress"
        status = self.status if state == "Completed" else "N/A"
        return Completed(0, query(state, status, **self.health), "")

    def _imex_ctl(self, words: list[str]) -> Completed:
        assert words == ["-q"]
        if self.imex and IMEX_UNIT in self.machine.running:
            return Completed(0, f"{self.imex}\n", "")
        return Completed(1, "", "cannot connect to the command service")

    def driver(self, version: str, loaded: str | None = None) -> None:
        self.apt.installed["libnvidia-ml1"] = f"{version}-1"
        self.machine.put_file("/sys/module/nvidia/version", f"{version if loaded is None else loaded}\n")

    def switch(self, address: str = "0000:05:00.0") -> None:
        for name, text in (("vendor", "0x10de"), ("class", "0x068000"), ("device", "0x22a3")):
            self.machine.put_file(f"/sys/bus/pci/devices/{address}/{name}", f"{text}\n")

    def adapter(self, name: str, data: str) -> None:
        self.machine.put_file(f"/sys/class/infiniband/{name}/device/vpd", data)

    def run(self, *, check: bool = False, **options: Any) -> dict[str, Any]:
        fixed = {"state_path": "", "fabric_timeout": 0}
        return self._run("nvidia_fabric_manager", {**fixed, **options}, check=check, diff=True)

    def has(self) -> dict[str, str]:
        return {name: each for name, each in self.apt.installed.items() if name not in ("bash", "libnvidia-ml1")}

    def record(self) -> dict[str, Any]:
        path = self.machine.path("/var/lib/dra-accelerators/nvidia-fabric-manager/record.json")
        return json.loads(path.read_text()) if path.exists() else {}


@pytest.fixture
def node(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Node:
    return Node(tmp_path, run_here, monkeypatch)


def test_node_without_switches_needs_nothing_with_reason(node: Node) -> None:
    node.machine.gpu("0000:1b:00.0", "0x2330")
    for check in (True, False):
        done = node.run(check=check)
        assert not done["changed"] and done["needs"] == [] and "no NVSwitch" in done["reason"]
    assert node.has() == {} and not node.record()


def test_node_with_switches_runs_manager_of_driver_version(node: Node) -> None:
    node.switch()
    node.adapter("mlx5_0", "an adapter like others")
    dry_run = node.run(check=True)
    assert (
        dry_run["changed"]
        and node.has() == {}
        and dry_run["needs"] == [MANAGER]
        and "0000:05:00.0" in dry_run["reason"]
    )
    done = node.run()
    assert done["steps"] == dry_run["steps"] and done["after"] == dry_run["after"], done
    assert node.has() == {MANAGER: f"{NEWER}-1"} and node.apt.held == {MANAGER}
    assert node.machine.units == {MANAGER_UNIT: True} and MANAGER_UNIT in node.machine.running
    assert done["fabric"] == {"GPU-1": "has joined"}
    again = node.run()
    assert not again["changed"] and again["fabric"] == {"GPU-1": "has joined"} and again["diff"] == []


def test_switches_without_pci_device_need_subnet_manager(node: Node) -> None:
    node.adapter("mlx5_4", "..SMDL=SW_MNG..")
    assert node.run()["needs"] == [MANAGER, SUBNET]
    assert node.has() == {MANAGER: f"{NEWER}-1", SUBNET: "2025.06.5-1"} and node.apt.held == {MANAGER}
    assert not node.run()["changed"]


def test_driver_upgrade_replaces_fabric_manager(node: Node) -> None:
    node.switch()
    node.driver(OLDER)
    node.apt.source[MANAGER] = [f"{NEWER}-1"]
    node.run()
    assert node.has() == {f"{MANAGER}-575": f"{OLDER}-1"}, "the package names of older drivers contain the branch"
    node.driver(NEWER)
    done = node.run()
    assert done["changed"] and node.has() == {MANAGER: f"{NEWER}-1"} and node.machine.units[MANAGER_UNIT]


def test_unloaded_driver_manager_is_installed_not_started(node: Node) -> None:
    node.switch()
    node.driver(NEWER, loaded=OLDER)
    done = node.run()
    assert done["reboot_required"] and done["fabric"] == {} and node.has() == {MANAGER: f"{NEWER}-1"}
    assert node.machine.units == {MANAGER_UNIT: True} and not node.machine.running
    assert not node.run()["changed"]
    node.driver(NEWER)
    assert node.run()["steps"] == [f"switch {MANAGER_UNIT} on"] and MANAGER_UNIT in node.machine.running


def test_missing_driver_is_rejected(node: Node) -> None:
    node.switch()
    node.apt.installed.pop("libnvidia-ml1")
    node.machine.remove_tree("/sys/module/nvidia")
    dry_run = node.run(check=True)
    assert dry_run["changed"] and "driver" in dry_run["missing_requirements"] and not dry_run.get("failed")
    assert node.run()["error_code"] == "driver" and node.has() == {}
    assert node.run(driver_version=NEWER)["changed"] and node.has() == {MANAGER: f"{NEWER}-1"}


def test_unavailable_version_is_rejected(node: Node) -> None:
    node.switch()
    node.driver("590.10.01")
    refused = node.run()
    assert refused["error_code"] == "not-offered" and "590.10.01" in refused["msg"] and node.has() == {}


@pytest.mark.parametrize("state", ["Not Started", "In Progress"])
def test_gpus_not_joining_fabric_fail_and_roll_back(node: Node, state: str) -> None:
    node.switch()
    node.state = state
    refused = node.run()
    assert refused["error_code"] == "fabric" and "GPU-1" in refused["msg"] and "removed again" in refused["msg"]
    assert node.has() == {} and not node.machine.units and not node.record()
    node.state = "Completed"
    node.run()
    node.status = "Insufficient Resources"
    assert not node.run(check=True)["up_to_date"], "a read alone is no proof"
    refused = node.run()
    assert refused["error_code"] == "fabric" and "could not join" in refused["msg"], "each run queries it"
    node.status = "Success"
    assert node.run(check=True)["up_to_date"]
    record = node.machine.path("/var/lib/dra-accelerators/nvidia-fabric-manager/record.json")
    record.write_text(json.dumps({**node.record(), "doing": "install"}))
    assert not node.run(check=True)["up_to_date"], "an earlier run was cut short"
    node.run()
    assert node.run(check=True)["up_to_date"]
    node.status = "Insufficient Resources"
    assert node.has(), "and the previous state stays"


def test_unhealthy_fabric_fails_with_reason(node: Node) -> None:
    node.switch()
    node.health = {"Summary": "Unhealthy", "Bandwidth": "Degraded", "Route_Unhealthy": "True"}
    refused = node.run()
    assert refused["error_code"] == "fabric" and "removed again" in refused["msg"] and node.has() == {}
    assert "GPU-1 has joined and is unhealthy: its bandwidth is degraded, its routes are unhealthy" in refused["msg"]
    node.health = {}
    assert node.run()["fabric"] == {"GPU-1": "has joined"}
    node.health = {"Summary": "Unhealthy", "Incorrect_Configuration": "No Partition"}
    refused = node.run()
    assert "not configured as its place wants it (No Partition)" in refused["msg"], "each run queries it"
    assert node.has(), "and the previous state stays"


def test_limited_capacity_succeeds_with_warning(node: Node) -> None:
    node.switch()
    node.health = {"Summary": "Limited Capacity", "Bandwidth": "Degraded"}
    done = node.run()
    expected = "has joined with limited capacity: its bandwidth is degraded"
    assert not done.get("failed") and done["fabric"] == {"GPU-1": expected}
    assert f"GPU-1 {expected}" in str(done["warnings"])
    node.health = {}
    assert node.run()["fabric"] == {"GPU-1": "has joined"}


def test_boards_without_fabric_state_are_checked_by_unit(node: Node) -> None:
    node.switch()
    node.state = "N/A"
    assert node.run()["fabric"] == {"GPU-1": "does not report its state"}
    node.machine.failing.add(MANAGER_UNIT)
    node.machine.running.discard(MANAGER_UNIT)
    refused = node.run()
    assert refused["error_code"] == "unit" and "it said why" in refused["msg"] and node.has()


def test_gpu_users_are_named_and_not_stopped(node: Node, tmp_path: Path) -> None:
    node.switch()
    store = tmp_path / "state.db"
    claim(store, "GPU-1")
    node.driver(OLDER)
    assert node.run(state_path=str(store))["changed"], "without a running manager no user is disturbed"
    node.driver(NEWER)
    dry_run = node.run(state_path=str(store), check=True)
    assert dry_run["blocked_by"]["claims"] and not dry_run.get("failed") and not dry_run["up_to_date"]
    for state in ("present", "absent"):
        refused = node.run(state_path=str(store), state=state)
        assert refused["error_code"] == "in-use" and node.has() == {MANAGER: f"{OLDER}-1"}


@pytest.mark.parametrize(("imex", "is_on"), [("installed", False), ("enabled", True)])
def test_imex_is_installed_on_request_and_runs_if_enabled(node: Node, imex: str, is_on: bool) -> None:
    dry_run = node.run(imex=imex, check=True)
    done = node.run(imex=imex)
    assert done["needs"] == [IMEX] and node.has() == {IMEX: f"{NEWER}-1"}
    assert (done["after"], done["steps"]) == (dry_run["after"], dry_run["steps"])
    assert node.machine.units == {IMEX_UNIT: is_on} and (IMEX_UNIT in node.machine.running) == is_on
    assert (f"mask {IMEX_UNIT}" in done["steps"]) != is_on == (not node.machine.masked)
    again = node.run(imex=imex)
    assert not again["changed"] and again["steps"] == []


def test_imex_mask_is_removed_when_enabled(node: Node) -> None:
    node.run(imex="installed")
    assert node.machine.masked == {IMEX_UNIT}
    done = node.run(imex="enabled")
    assert done["steps"] == [f"switch {IMEX_UNIT} on"] and not node.machine.masked and node.machine.units[IMEX_UNIT]
    assert IMEX_UNIT in node.machine.running and not node.run(imex="enabled")["changed"]
    done = node.run(imex="installed")
    assert done["steps"] == [f"switch {IMEX_UNIT} off", f"mask {IMEX_UNIT}"] and node.machine.masked == {IMEX_UNIT}
    assert not node.machine.running
    assert node.run(state="absent")["changed"]
    assert node.has() == {} and not node.machine.masked and not node.machine.units and not node.record()


def test_imex_disabled_is_masked_despite_gpu_users(node: Node, tmp_path: Path) -> None:
    store = tmp_path / "state.db"
    claim(store, "GPU-1")
    node.switch()
    node.run(imex="installed")
    # The state that an earlier release left behind.
    node.machine.masked.clear()
    record = node.machine.path("/var/lib/dra-accelerators/nvidia-fabric-manager/record.json")
    record.write_text(json.dumps({key: value for key, value in node.record().items() if key != "masked"}))
    done = node.run(imex="installed", state_path=str(store))
    assert done["steps"] == [f"mask {IMEX_UNIT}"] and node.machine.masked == {IMEX_UNIT}, done
    assert node.run(imex="enabled")["changed"] and not node.machine.masked


def test_imex_masked_by_others_stays_masked(node: Node) -> None:
    node.machine.masked.add(IMEX_UNIT)
    refused = node.run(imex="enabled")
    assert refused["error_code"] == "masked" and node.has() == {} and not node.record()
    done = node.run(imex="installed")
    assert node.has() == {IMEX: f"{NEWER}-1"} and f"mask {IMEX_UNIT}" not in done["steps"]
    assert node.run(imex="enabled")["error_code"] == "masked" and node.has() == {IMEX: f"{NEWER}-1"}
    node.run(state="absent")
    assert node.has() == {} and node.machine.masked == {IMEX_UNIT}


def test_imex_previous_packages_are_restored_unmasked(node: Node) -> None:
    node.apt.installed[IMEX] = f"{OLDER}-1"
    node.machine.units[IMEX_UNIT] = True
    node.machine.running.add(IMEX_UNIT)
    node.run(imex="installed")
    assert node.has() == {IMEX: f"{NEWER}-1"} and node.machine.masked == {IMEX_UNIT}
    node.run(state="absent")
    assert node.has() == {IMEX: f"{OLDER}-1"} and not node.machine.masked and node.machine.units == {IMEX_UNIT: True}


def test_imex_failure_removes_the_mask(node: Node) -> None:
    node.switch()
    node.state = "In Progress"
    refused = node.run(imex="installed")
    assert refused["error_code"] == "fabric" and not node.machine.masked and not node.machine.units
    node.state = "Completed"
    node.run(imex="installed")
    node.imex = "WAITING_FOR_PEERS"
    assert node.run(imex="enabled")["error_code"] == "imex"
    assert node.machine.masked == {IMEX_UNIT} and IMEX_UNIT not in node.machine.running, "the state is the previous one"
    node.imex = "READY"
    assert node.run(imex="enabled")["changed"], "and its mask is still known as this collection's"


def test_imex_not_ready_fails_and_rolls_back(node: Node) -> None:
    node.imex = "INITIALIZING"
    refused = node.run(imex="enabled")
    assert refused["error_code"] == "imex" and "INITIALIZING" in refused["msg"] and "IMEX_CMD_ENABLED" in refused["msg"]
    assert node.has() == {} and not node.machine.units and not node.record()
    node.imex = "READY"
    node.run(imex="enabled")
    node.imex = ""
    refused = node.run(imex="enabled")
    assert refused["error_code"] == "imex" and "cannot connect" in refused["msg"], "each run queries it"
    assert node.has() == {IMEX: f"{NEWER}-1"}, "and the previous state stays"
    assert not node.run(imex="installed").get("failed"), "one that is switched off is not asked"


def test_imex_with_unloaded_driver_is_not_queried(node: Node) -> None:
    node.imex = ""
    node.driver(NEWER, loaded=OLDER)
    done = node.run(imex="enabled")
    assert done["reboot_required"] and node.machine.units == {IMEX_UNIT: True} and not node.machine.running


def test_imex_disabled_needs_no_reboot(node: Node) -> None:
    node.driver(NEWER, loaded=OLDER)
    assert not node.run(imex="installed")["reboot_required"]


def test_imex_wait_ends_when_ready(node: Node) -> None:
    states = iter(["STARTING_AUTH_SERVER", "WAITING_FOR_PEERS", "READY", "NOT_READY"])
    node.machine.programs["nvidia-imex-ctl"] = lambda words: Completed(0, f"{next(states)}\n", "")
    now = iter(range(100))
    wait_for_imex(node.machine, 10, clock=lambda: float(next(now)), sleep=lambda seconds: None)
    with pytest.raises(PackageProblem, match="NOT_READY"):
        wait_for_imex(node.machine, 0, clock=lambda: float(next(now)), sleep=lambda seconds: None)


def test_absent_removes_own_and_keeps_foreign_packages(node: Node) -> None:
    node.switch()
    node.run()
    dry_run = node.run(state="absent", check=True)
    done = node.run(state="absent")
    assert done["steps"] == dry_run["steps"] and node.has() == {} and not node.record() and not node.machine.units
    assert not node.run(state="absent")["changed"]
    node.apt.installed[MANAGER] = f"{OLDER}-1"
    node.machine.units[MANAGER_UNIT] = True
    left = node.run(state="absent")
    assert not left["changed"] and left["unmanaged"] == [f"{MANAGER} {OLDER}-1"]
    node.run()
    assert node.has() == {MANAGER: f"{NEWER}-1"}
    node.run(state="absent")
    assert node.has() == {MANAGER: f"{OLDER}-1"} and node.machine.units == {MANAGER_UNIT: True}
