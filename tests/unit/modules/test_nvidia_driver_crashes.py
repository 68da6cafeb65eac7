# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""NVIDIA driver: a run that is killed before any of its steps, and the next run. The tables in docs/crash-points.md name these tests."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._host.stopped_services import record_path
from driver_node import NEWER, OLDER, Node
from nvidia_machine import OPEN

from tests.unit.crash_steps import kill_before

DRIVER, FABRIC, PERSISTENCE = (
    "dra-accelerators-driver.service",
    "nvidia-fabricmanager.service",
    "nvidia-persistenced.service",
)
SERVICES = [DRIVER, FABRIC, PERSISTENCE]
PACKAGES = ("nvidia-driver-cuda", "libcuda1", "libnvidia-ml1", OPEN, "nvidia-persistenced")
Make = Callable[[], Node]


@pytest.fixture
def make(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that creates a node with a driver that an administrator installed, loaded and in use by services."""
    numbers = itertools.count()

    def new() -> Node:
        node = Node(tmp_path / f"node-{next(numbers)}", run_here, monkeypatch)
        for name in PACKAGES:
            node.apt.installed[name] = f"{OLDER}-1"
        node.apt._build(OPEN, OLDER)
        for module in ("nvidia", "nvidia_uvm"):
            node.machine.put_file(f"/sys/module/{module}/version", f"{OLDER}\n")
        node.machine.enabled |= {*SERVICES}
        node.machine.running |= {*SERVICES}
        return node

    return new


def killed(node: Node, number: int, saved: Path, **options: Any) -> str:
    """Run the module, kill it before its step ``number``, and load the state of the node. Return the step; empty if there are fewer."""
    step = kill_before(
        number,
        lambda: node.run(services=SERVICES, **options),
        Path(node.machine.root),
        lambda: saved.write_bytes(pickle.dumps((node.machine, node.apt))),
    )
    node.machine, node.apt = pickle.loads(saved.read_bytes())
    return step


def crashes(make: Make, tmp_path: Path, **options: Any) -> Iterator[tuple[str, Node]]:
    """Yield each step of a run with a node on which the run was killed directly before it."""
    for number in itertools.count():
        node = make()
        step = killed(node, number, tmp_path / "saved", **options)
        if not step:
            assert number > 20
            return
        yield step, node


def crashed_at(wanted: str, make: Make, tmp_path: Path) -> Node:
    """Return a node on which an installation was killed directly before a step."""
    return next(node for step, node in crashes(make, tmp_path, version=NEWER) if step == wanted)


@pytest.mark.prove
def test_installation_killed_before_any_step_next_run_completes_it(make: Make, tmp_path: Path) -> None:
    """After the next run, the previous driver of the administrator can also be restored, and the services run again."""
    for step, node in crashes(make, tmp_path, version=NEWER):
        done = node.run(NEWER, services=SERVICES)
        assert not done.get("failed"), (step, done)
        assert node.versions() == {f"{NEWER}-1"} and node.machine.loaded() == NEWER, step
        assert node.machine.running == {*SERVICES}, step
        assert not node.machine.exists(record_path("nvidia")) and node.record()["doing"] == "", step
        assert not node.run(NEWER, services=SERVICES)["changed"], step
        node.apt.versions = []
        back = node.run(state="previous", services=SERVICES)
        assert not back.get("failed") and back["after"]["version"] == OLDER, (step, back)
        assert node.machine.loaded() == OLDER and node.machine.running == {*SERVICES}, step


@pytest.mark.prove
def test_removal_killed_before_any_step_next_run_completes_it(make: Make, tmp_path: Path) -> None:
    def installed() -> Node:
        node = make()
        node.run(NEWER, services=SERVICES)
        node.machine.running |= {*SERVICES}
        return node

    for step, node in crashes(installed, tmp_path, state="absent", remove_unmanaged=True):
        done = node.run(state="absent", remove_unmanaged=True, services=SERVICES)
        assert not done.get("failed"), (step, done)
        assert node.versions() == set() and not node.machine.loaded(), step
        assert {DRIVER, FABRIC} <= node.machine.running, step
        assert not node.machine.exists("/var/lib/dra-accelerators"), step
        assert not node.run(state="absent", services=SERVICES)["changed"], step


@pytest.mark.prove
def test_services_of_killed_run_are_reported_in_check_mode_and_started(make: Make, tmp_path: Path) -> None:
    node = crashed_at(f"systemctl start {FABRIC}", make, tmp_path)
    dry_run = node.run(NEWER, services=SERVICES, check=True)
    assert dry_run["changed"] and f"start {FABRIC}, which an interrupted run stopped" in dry_run["steps"]
    assert FABRIC not in node.machine.running
    done = node.run(NEWER, services=SERVICES)
    assert done["steps"] == dry_run["steps"] and node.machine.running == {*SERVICES}
    assert not node.run(NEWER, services=SERVICES)["changed"]


def test_services_of_killed_run_are_started_if_next_run_is_rejected(make: Make, tmp_path: Path) -> None:
    node = crashed_at("rmmod nvidia_uvm", make, tmp_path)
    node.use()
    refused = node.run(NEWER, services=SERVICES)
    assert refused["error_code"] == "in-use" and node.machine.running == {*SERVICES}


def test_services_of_killed_run_are_not_started_after_reboot(make: Make, tmp_path: Path) -> None:
    node = crashed_at("rmmod nvidia_uvm", make, tmp_path)
    node.machine.boot = "boot-2"
    node.machine.running = {DRIVER}
    assert not node.run(NEWER, services=[DRIVER], persistence=False).get("failed")
    assert node.machine.running == {DRIVER} and not node.machine.exists(record_path("nvidia"))
