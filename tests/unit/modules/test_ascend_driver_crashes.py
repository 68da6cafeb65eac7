# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ascend driver: a run that is killed before any of its steps, and the next run. The table in docs/crash-points.md names these tests."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils._ascend_host.driver_packages import COMPLETE
from ansible_collections.dra.accelerators.plugins.module_utils._host.stopped_services import record_path
from ansible_collections.dra.accelerators.plugins.module_utils.core.host.system import Completed
from test_ascend_driver import BOTH, NEWER, Folder, Node

from tests.unit.crash_steps import kill_before, step

SERVICES = ["dra-accelerators-driver.service", "npu-exporter.service"]


class Machine(Folder):
    """A system in a directory, whose units run if a file says so. Each program is a step."""

    def running(self) -> set[str]:
        return set(json.loads(self.read_text("/run/units")))

    def run(self, argv: Sequence[str], *words: Any, **options: Any) -> Completed:
        if argv[0] != "systemctl":
            step(" ".join([argv[0], Path(argv[1]).name, *argv[2:]]))
            return super().run(argv, *words, **options)
        verb, unit, running = argv[1], argv[-1], self.running()
        if verb == "is-active":
            return Completed(0, "active\n" if unit in running else "inactive\n", "")
        if verb == "show":
            return Completed(0, "0\n" if "MainPID" in argv[2] else "loaded\n", "")
        step(f"systemctl {verb} {unit}")
        (running.add if verb == "start" else running.discard)(unit)
        self.path("/run/units").write_text(json.dumps(sorted(running)))
        return Completed(0, "", "")


class Crashes:
    """Nodes on which a run was killed."""

    def __init__(
        self, directory: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.directory = directory
        self.run_here = run_here
        self.monkeypatch = monkeypatch
        self.numbers = itertools.count()

    def node(self) -> Node:
        node = Node(self.directory / str(next(self.numbers)), self.run_here, self.monkeypatch)
        node.system = Machine(str(node.root))
        (node.root / "run").mkdir()
        (node.root / "run/units").write_text(json.dumps(SERVICES))
        assert not node.run(BOTH, services=SERVICES).get("failed")
        return node

    def each(self, versions: dict[str, str], **options: Any) -> Iterator[tuple[str, Node]]:
        """Yield each step of a run with a node on which the run was killed directly before it."""
        for number in itertools.count():
            node = self.node()
            killed = kill_before(number, lambda node=node: node.run(versions, services=SERVICES, **options), node.root)
            if not killed:
                assert number > 20
                return
            yield killed, node


@pytest.fixture
def crashes(tmp_path: Path, run_here: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Crashes:
    return Crashes(tmp_path, run_here, monkeypatch)


@pytest.mark.prove
def test_upgrade_killed_before_any_step_next_run_completes_it(crashes: Crashes) -> None:
    """After the next run, the previous versions can also be restored, and the services run again."""
    for killed, node in crashes.each(NEWER):
        done = node.run(NEWER, services=SERVICES)
        assert not done.get("failed"), (killed, done)
        assert node.versions() == NEWER and node.status() == COMPLETE, killed
        assert node.system.running() == {*SERVICES} and not node.system.exists(record_path("ascend")), killed
        assert not node.system.exists("/var/lib/dra-accelerators/ascend-verified"), killed
        assert not node.run(NEWER, services=SERVICES)["changed"], killed
        for path in (node.root / "packages").iterdir():
            path.unlink()
        back = node.run(state="previous", services=SERVICES)
        assert not back.get("failed") and node.versions() == BOTH, (killed, back)


@pytest.mark.prove
def test_removal_killed_before_any_step_next_run_completes_it(crashes: Crashes) -> None:
    for killed, node in crashes.each({}, state="absent"):
        done = node.run(state="absent", remove_unmanaged=True, services=SERVICES)
        assert not done.get("failed"), (killed, done)
        assert node.versions() == {} and node.system.running() == {*SERVICES}, killed
        assert not node.run(state="absent", services=SERVICES)["changed"], killed
        node.system.boot = "boot-2"
        node.run(state="absent", services=SERVICES)
        assert not node.system.exists("/var/lib/dra-accelerators"), killed


@pytest.mark.prove
def test_removal_killed_in_a_later_boot_requires_a_restart(crashes: Crashes) -> None:
    """The record names the boot of the installation, which has ended: the removal requires a reboot."""
    found = set()
    for number in itertools.count():
        node = crashes.node()
        node.system.boot = "boot-2"
        killed = kill_before(number, lambda node=node: node.run(state="absent", services=SERVICES), node.root)
        if not killed:
            break
        done = node.run(state="absent", remove_unmanaged=True, services=SERVICES)
        if node.versions() == {} and not done.get("failed"):
            found.add(bool(done.get("reboot_required")))
    assert found == {True}
