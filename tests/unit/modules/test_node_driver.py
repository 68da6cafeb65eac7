# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The node driver as a service: systemd commands, the condition for a started driver, and a complete removal."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._driver_service.service_plan import (
    ServiceState,
    age_of,
    can_be_relieved,
    missing,
    not_relieved,
    plan_again,
    plan_start,
    plan_stop,
    plan_stop_companions,
    stamps,
)
from ansible_collections.dra.accelerators.plugins.module_utils._host.node_facts import (
    DRIVER_UNIT,
    MARKER,
    RELIEF_INSTANCE,
    RELIEF_UNIT,
)
from driver_state import FOLDER, make_locks, make_state

ROLES = Path(__file__).resolve().parents[3] / "roles"
TIMER = "dra-accelerators-token.timer"


def unit(**other: Any) -> dict[str, Any]:
    return {
        "exists": True,
        "managed": True,
        "active": "active",
        "enabled": "enabled",
        "need_reload": False,
        "main_pid": 411,
        "restarts": 0,
        **other,
    }


STANDING = {"active": "inactive", "enabled": "", "main_pid": 0}


def steps(driver: dict[str, Any], relief: dict[str, Any] | None = None, **more: Any) -> list[str]:
    units = {DRIVER_UNIT: driver, RELIEF_UNIT: unit(**{**STANDING, **(relief or {})}), TIMER: unit()}
    facts = {"running": "a", "wanted": "a", "changed": False, **more}
    plan = plan_start(units, helpers=[TIMER], **facts)
    return [" ".join(step.argv()[1:]) for step in plan]


def test_plan_running_current_driver_has_no_steps() -> None:
    assert steps(unit()) == []


@pytest.mark.parametrize(
    ("driver", "more", "expected"),
    [
        (unit(), {"wanted": "b"}, [f"restart {DRIVER_UNIT}"]),
        (unit(need_reload=True), {}, ["daemon-reload"]),
        (unit(enabled="disabled"), {}, [f"enable {DRIVER_UNIT}"]),
        (
            unit(exists=False, active="inactive", enabled="", main_pid=0),
            {"running": "", "changed": True},
            ["daemon-reload", f"enable {DRIVER_UNIT}", f"start {DRIVER_UNIT}"],
        ),
        # Between two attempts of a crash loop there is no process. During an attempt there is one, from any release.
        (unit(active="activating", main_pid=0), {"running": ""}, [f"start {DRIVER_UNIT}"]),
        (unit(active="activating"), {"running": "b"}, [f"restart {DRIVER_UNIT}"]),
        (unit(), {"outdated": True}, [f"reload {DRIVER_UNIT}"]),
        (unit(), {"outdated": True, "wanted": "b"}, [f"restart {DRIVER_UNIT}"]),
    ],
)
def test_plan_systemd_steps(driver: dict[str, Any], more: dict[str, Any], expected: list[str]) -> None:
    assert steps(driver, **more) == expected


RELIEVED = [f"start --no-block {RELIEF_UNIT}", f"restart {DRIVER_UNIT}", f"stop {RELIEF_UNIT}"]


@pytest.mark.parametrize(
    ("driver", "relief", "more", "expected"),
    [
        (unit(), {}, {"wanted": "b", "relieved": True}, RELIEVED),
        (unit(), {"need_reload": True}, {"wanted": "b", "relieved": True}, ["daemon-reload", *RELIEVED]),
        (unit(), {"exists": False}, {"wanted": "b", "relieved": True}, [f"restart {DRIVER_UNIT}"]),
        (unit(), {}, {"outdated": True, "relieved": True}, [f"reload {DRIVER_UNIT}"]),
        (unit(active="activating"), {}, {"wanted": "b", "relieved": True}, [f"restart {DRIVER_UNIT}"]),
        # Leftovers of an interrupted run.
        (unit(), {"active": "active"}, {}, [f"stop {RELIEF_UNIT}"]),
        (
            unit(active="failed"),
            {"active": "active"},
            {"wanted": "b"},
            [f"restart {DRIVER_UNIT}", f"stop {RELIEF_UNIT}"],
        ),
        (
            *(unit(), {"active": "active"}, {"wanted": "b", "relieved": True}),
            [f"restart {RELIEF_UNIT}", f"restart {DRIVER_UNIT}", f"stop {RELIEF_UNIT}"],
        ),
    ],
)
def test_plan_restart_with_relief_instance(
    driver: dict[str, Any], relief: dict[str, Any], more: dict[str, Any], expected: list[str]
) -> None:
    assert steps(driver, relief, **more) == expected


def test_plan_continues_after_interrupted_wait() -> None:
    def again(driver: dict[str, Any], relief: str, running: str) -> list[str]:
        units = {DRIVER_UNIT: driver, RELIEF_UNIT: unit(active=relief)}
        return [" ".join(step.argv()[1:]) for step in plan_again(units, running=running, wanted="b")]

    assert again(unit(), "activating", "a") == RELIEVED[1:]
    assert again(unit(), "active", "b") == again(unit(active="activating"), "active", "") == RELIEVED[2:]
    assert again(unit(), "inactive", "a") == again(unit(), "failed", "b") == [], "one command is sent to systemd"


def test_relief_requires_serving_driver_with_instances() -> None:
    status_facts = {"driver": "gpu.nvidia.com", "role": "serving", "pid": 411, "ready": True, "configuration": "d"}
    assert can_be_relieved([status_facts], 411) and not can_be_relieved([], 411)
    for other in ({"role": "standby"}, {"pid": 412}, {"ready": False}, {"configuration": ""}):
        assert not can_be_relieved([status_facts, {**status_facts, **other}], 411), other


def test_relief_serves_after_handover() -> None:
    status_facts = {
        "driver": "gpu.nvidia.com",
        "role": "serving",
        "pid": 9,
        "ready": True,
        "published": True,
        "problems": [],
    }
    facts: dict[str, Any] = {"fingerprint": "a", "running": "a", "steady": 0.2, "digest": ""}
    assert not_relieved(ServiceState(9, 0.5, 0, "active", [status_facts]), **facts) == ()
    waits = not_relieved(ServiceState(9, 0.5, 0, "active", [{**status_facts, "role": "waiting"}]), **facts)
    assert waits == ("the relief: gpu.nvidia.com does not serve from it yet",)
    assert not_relieved(ServiceState(0, None, 0, "failed", None), **facts) == ("the relief: its unit is failed",)
    assert "has run for 0 of" in not_relieved(ServiceState(9, 0.1, 0, "active", [status_facts]), **facts)[0]
    assert (
        "not started from"
        in not_relieved(ServiceState(9, 1.0, 0, "active", [status_facts]), **{**facts, "running": "b"})[0]
    )


def lacks(*, running: str = "a", **other: Any) -> str:
    status_facts = {"driver": "gpu.nvidia.com", "ready": True, "published": True, "pid": 411, "problems": []}
    facts: dict[str, Any] = {"pid": 411, "age": 60.0, "restarts": 0, "active": "active", "drivers": [status_facts]}
    facts.update({key: value for key, value in other.items() if key in facts or key == "problem"})
    facts["drivers"] = [{**status_facts, **other.get("status_facts", {})}] if facts["drivers"] else facts["drivers"]
    return "; ".join(missing(ServiceState(**facts), fingerprint="a", running=running, steady=5, digest="d"))


def test_started_requires_ready_published_and_stable_process() -> None:
    assert lacks() == ""


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"active": "activating", "pid": 0, "age": None, "restarts": 7}, "restarted 7 times"),
        ({"age": 1.0}, "has run for 1 of 5 seconds"),
        ({"running": "b"}, "not started from the desired release"),
        ({"drivers": None, "problem": "its status ended with 1"}, "its status ended with 1"),
        ({"drivers": []}, "contains no driver"),
        ({"status_facts": {"ready": False, "problems": ["kubelet: it has not registered"]}}, "not ready: kubelet"),
        ({"status_facts": {"published": False}}, "has not published"),
        ({"status_facts": {"pid": 9}}, "responds from the process 9"),
        ({"status_facts": {"configuration": "another"}}, "uses another configuration"),
    ],
)
def test_started_missing_condition_is_named(facts: dict[str, Any], words: str) -> None:
    assert words in lacks(**facts)


def test_age_of_process_is_computed() -> None:
    stat = "411 (a) b) S " + " ".join(["0"] * 18) + " 1000 0 0"
    assert age_of(stat, "60.50 100.00", 100) == pytest.approx(50.5)
    with pytest.raises(ValueError, match="fields"):
        age_of("411 (a) S 1", "60.50 1", 100)


def test_plan_stop_stops_only_marked_units() -> None:
    plan = plan_stop({DRIVER_UNIT: unit(), TIMER: unit(managed=False)})
    assert [" ".join(step.argv()[1:]) for step in plan] == [f"disable {DRIVER_UNIT}", f"stop {DRIVER_UNIT}"]


def test_plan_stop_stops_programs_before_shared_memory() -> None:
    listed = (
        "dra-accelerators-memory@0uid.0.service loaded active exited Memory\n"
        "dra-accelerators-mps@0uid.0.service loaded failed failed MPS\n"
        "dra-accelerators-driver.service loaded active running The driver\n"
        "\n"
    )
    assert [(step.action, step.unit) for step in plan_stop_companions(listed)] == [
        ("stop", "dra-accelerators-mps@0uid.0.service"),
        ("stop", "dra-accelerators-memory@0uid.0.service"),
    ]
    assert plan_stop_companions("") == ()


def test_unit_templates_have_the_marker() -> None:
    templates = [path for role in ("dra_driver", "nvidia_mig") for path in (ROLES / role / "templates").iterdir()]
    units = [path for path in templates if path.suffixes[-2] in (".service", ".timer")]
    assert len(units) == 8

    def text(path: Path) -> str:
        return re.sub(r"{% include '(.+?)' %}", lambda found: text(path.parent / found[1]), path.read_text("utf-8"))

    assert [path.name for path in units if f"Documentation={MARKER}\n" not in text(path)] == []


def test_stamps_of_own_timers_are_removed() -> None:
    units = {DRIVER_UNIT: unit(), TIMER: unit(), "backup.timer": unit(managed=False)}
    assert stamps(units) == [f"/var/lib/systemd/timers/stamp-{TIMER}"]


SYSTEMCTL = """\
#!/bin/sh
# systemd as far as the module sees it: a unit whose process is this test's, and a log of its calls
echo "$*" >> "{directory}/asked"
case "$1" in
  show)
    for name; do case "$name" in
      show|--property=*) ;;
      {unit}) cat "{directory}/driver"; echo "Id=$name"; echo ;;
      {relief}) cat "{directory}/relief"; echo "Id=$name"; echo ;;
      *) echo "Id=$name"; echo "LoadState=loaded"; echo "ActiveState=active"; echo "UnitFileState=enabled"; echo ;;
    esac; done ;;
  restart|start)
    case "$*" in
      *{relief}) cp "{directory}/relieving" "{directory}/relief" ;;
      *) cp "{directory}/started" "{directory}/driver"; if [ -e "{directory}/after" ]; then cp "{directory}/after" "{directory}/status"; fi ;;
    esac ;;
  stop)
    case "$2" in {relief}) cp "{directory}/inactive" "{directory}/relief" ;; esac ;;
  reload)
    if [ -e "{directory}/refuses" ]; then echo "Job failed" >&2; exit 1; fi
    cp "{directory}/reloaded" "{directory}/status" ;;
esac
"""
PYTHON = """\
#!/bin/sh
cat "{directory}/status$DRA_DRIVER_INSTANCE"
"""


class Node:
    """A system whose systemd and driver status are files of the test."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
        self.directory, self.run = directory, run
        programs = directory / "programs"
        interpreter = directory / "opt/venv/bin/python"
        interpreter.parent.mkdir(parents=True)
        programs.mkdir()
        for path, text in ((programs / "systemctl", SYSTEMCTL), (interpreter, PYTHON)):
            for name, value in (("directory", str(directory)), ("unit", DRIVER_UNIT), ("relief", RELIEF_UNIT)):
                text = text.replace(f"{{{name}}}", value)
            path.write_text(text, encoding="utf-8")
            path.chmod(0o755)
        (programs / "journalctl").write_text("#!/bin/sh\necho its last words\n", encoding="utf-8")
        (programs / "journalctl").chmod(0o755)
        monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
        self.process = self.run_from("b")
        self.unit("driver", active="active", pid=self.process.pid)
        self.unit("relief", active="inactive", pid=0)
        self.unit("inactive", active="inactive", pid=0)
        self.unit("started", active="active", pid=self.process.pid)
        self.status(ready=True)

    @staticmethod
    def run_from(fingerprint: str) -> subprocess.Popen[bytes]:
        """Start a process with a fingerprint in its environment."""
        return subprocess.Popen(["sleep", "600"], env={**os.environ, "DRA_ACCELERATORS_FINGERPRINT": fingerprint})

    def unit(self, name: str, *, active: str, pid: int) -> None:
        text = f"LoadState=loaded\nActiveState={active}\nUnitFileState=enabled\nMainPID={pid}\nNRestarts=3\n"
        (self.directory / name).write_text(text, encoding="utf-8")

    def status(self, *, ready: bool, configuration: str = "", file: str = "status", **other: Any) -> None:
        status_facts = {
            "driver": "gpu.nvidia.com",
            "ready": ready,
            "published": ready,
            "devices": [{"uuid": "GPU-0"}, {"uuid": "GPU-1"}],
            "pid": self.process.pid,
            "problems": ["why"],
            "configuration": configuration,
            **other,
        }
        (self.directory / file).write_text(json.dumps([status_facts]), encoding="utf-8")

    def configure(self, text: str) -> dict[str, str]:
        """Write the configuration file of a driver that reloads it. Return the module's option."""
        path = self.directory / "driver.yaml"
        path.write_text(text, encoding="utf-8")
        self.status(ready=True, configuration=hashlib.sha256(text.encode()).hexdigest()[:16], file="reloaded")
        return {"configuration": str(path)}

    def module(self, *, check: bool = False, **options: Any) -> dict[str, Any]:
        whole = {"fingerprint": "b", "root": str(self.directory / "opt"), "steady": 0.1, "timeout": 1, **options}
        result: dict[str, Any] = self.run("node_driver", whole, check=check)
        return result

    def commands(self) -> list[str]:
        lines = (self.directory / "asked").read_text("utf-8").splitlines()
        return [line for line in lines if not line.startswith("show")]


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_here: Any) -> Iterator[Node]:
    machine = Node(tmp_path, monkeypatch, run_here)
    yield machine
    machine.process.kill()
    machine.process.wait()


def test_module_working_driver_is_not_changed(node: Node) -> None:
    result = node.module()
    assert not result["changed"] and result["pid"] == node.process.pid, result
    assert result["drivers"][0]["driver"] == "gpu.nvidia.com" and "devices" not in result["drivers"][0]
    assert result["device_count"] == 2
    assert node.commands() == []


def test_module_check_mode_reports_restart(node: Node) -> None:
    result = node.module(check=True, fingerprint="c", units_changed=True)
    assert [step["action"] for step in result["steps"]] == ["daemon-reload", "restart"]
    assert f"restart {DRIVER_UNIT}: it was started from another release" in result["diff"]["after"]
    assert node.commands() == []


def test_module_changed_configuration_is_reloaded(node: Node) -> None:
    node.status(ready=True, configuration="former")
    result = node.module(**node.configure("layout: []"))
    assert result["changed"] and result["pid"] == node.process.pid, result
    assert node.commands() == [f"reload {DRIVER_UNIT}"]
    again = node.module(**node.configure("layout: []"))
    assert not again["changed"] and node.commands() == [f"reload {DRIVER_UNIT}"], again


def test_module_check_mode_reports_reload_before_the_file_exists(node: Node) -> None:
    result = node.module(check=True, configuration_changed=True)
    assert [step["action"] for step in result["steps"]] == ["reload"] and node.commands() == []
    status_facts = node.module(check=True, configuration_changed=True, fingerprint="c")
    assert [step["action"] for step in status_facts["steps"]] == ["restart"]


def test_module_rejected_configuration_fails_with_journal(node: Node) -> None:
    node.status(ready=True, configuration="former")
    (node.directory / "refuses").touch()
    result = node.module(**node.configure("layout: []"))
    assert result["failed"] and f"reload {DRIVER_UNIT} failed: Job failed" in result["msg"], result
    assert result["journal"] == ["its last words"]


class Update:
    """A driver that serves and has to be restarted from "c", with or without a relief instance that serves during the restart."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.options = node.configure("layout: []")
        self.digest = json.loads((node.directory / "reloaded").read_text("utf-8"))[0]["configuration"]
        self.relief, self.next = node.run_from("c"), node.run_from("c")
        node.status(ready=True, configuration="former", role="serving")
        node.unit("relieving", active="active", pid=self.relief.pid)
        self.relief_says(ready=True, role="serving")
        node.unit("started", active="active", pid=self.next.pid)
        node.status(ready=True, configuration=self.digest, role="serving", pid=self.next.pid, file="after")

    def relief_says(self, **status_facts: Any) -> None:
        file = f"status{RELIEF_INSTANCE}"
        self.node.status(**{"configuration": self.digest, "pid": self.relief.pid, "file": file, **status_facts})

    def end(self) -> None:
        for process in (self.relief, self.next):
            process.kill()
            process.wait()


@pytest.fixture
def update(node: Node) -> Iterator[Update]:
    found = Update(node)
    yield found
    found.end()


def test_module_restart_uses_relief_instance(update: Update) -> None:
    result = update.node.module(fingerprint="c", **update.options)
    assert result["changed"] and result["pid"] == update.next.pid, result
    assert update.node.commands() == RELIEVED
    again = update.node.module(fingerprint="c", **update.options)
    assert not again["changed"] and update.node.commands() == RELIEVED, again


def test_module_relief_not_serving_keeps_driver(update: Update) -> None:
    update.relief_says(ready=False, role="waiting")
    result = update.node.module(fingerprint="c", **update.options)
    assert result["failed"] and "the relief: gpu.nvidia.com is not ready: why" in result["msg"], result
    assert update.node.commands() == [RELIEVED[0], RELIEVED[2]] and result["journal"] == ["its last words"]


def test_module_ended_relief_is_not_waited_for(update: Update) -> None:
    update.node.unit("relieving", active="failed", pid=0)
    began = time.monotonic()
    result = update.node.module(fingerprint="c", timeout=300, **update.options)
    assert result["failed"] and "the relief: its unit is failed" in result["msg"], result
    assert update.node.commands() == [RELIEVED[0], RELIEVED[2]] and time.monotonic() - began < 250


def test_module_relief_stops_after_later_call(update: Update) -> None:
    update.relief_says(ready=True, role="waiting")
    first = update.node.module(fingerprint="c", timeout=60, patience=0, **update.options)
    assert "the relief: gpu.nvidia.com does not serve from it yet" in first["waiting"], first
    update.relief_says(ready=True, role="serving")
    second = update.node.module(fingerprint="c", timeout=60, patience=30, waited=0.1, **update.options)
    assert second["waiting"] == [] and second["pid"] == update.next.pid, second
    assert update.node.commands() == RELIEVED


def test_module_crash_loop_fails_with_journal(node: Node) -> None:
    node.unit("started", active="activating", pid=0)
    result = node.module(fingerprint="c")
    assert result["failed"] and node.commands() == [f"restart {DRIVER_UNIT}"]
    assert "its unit is activating, and was restarted 3 times" in result["msg"]
    assert result["journal"] == ["its last words"]


def test_module_unready_driver_fails_with_reason(node: Node) -> None:
    node.status(ready=False)
    result = node.module()
    assert result["failed"] and "gpu.nvidia.com is not ready: why" in result["msg"], result


def test_module_absent_removes_all_state(node: Node) -> None:
    make_locks(make_state(node.directory, store=True))
    options = {"state": "absent", "kubelet_root": str(node.directory / "kubelet")}
    status_facts = node.module(check=True, **options)
    assert (node.directory / FOLDER.lstrip("/")).is_dir()
    result = node.module(**options)
    assert result["changed"] and result["kept"] == [] and result["removed"] == status_facts["removed"], result
    assert list((node.directory / "kubelet/plugins").iterdir()) == []
    again = node.module(**options)
    assert not again["changed"] and again["removed"] == [], again


def test_module_absent_after_crash_removes_all_state(node: Node) -> None:
    directory = make_state(node.directory, store=True)
    crashed = "import os, sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute('DELETE FROM meta'); c.commit(); os._exit(9)"
    subprocess.run([sys.executable, "-c", crashed, str(directory / "state.db")], check=False)
    assert (directory / "state.db-wal").exists()
    (directory / "driver.lock").unlink()
    result = node.module(state="absent", kubelet_root=str(node.directory / "kubelet"))
    assert result["changed"] and not directory.exists(), result
