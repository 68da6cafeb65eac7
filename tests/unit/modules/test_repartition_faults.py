# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Inject each fault into each step of the playbook repartition, and verify that the next run recovers.

Faults: no API server, an unreachable node, an unwritable record, an error of the silicon, or a killed Ansible. The run
has to name the step. Afterwards the node has one complete layout, or its devices are tainted so that new claims cannot
get them. The next run requests the new and the previous layout in turn, and has to end with one layout, no record, and
no rule. `-rP` prints the table.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from ansible_collections.dra.accelerators.plugins.module_utils.core.partitioning.rules import parse_rules
from repartition_world import FIRST, KILLED, LAYOUT, SECOND, Cluster, away, play_all, steps

if TYPE_CHECKING:
    from conftest import Node

pytestmark = pytest.mark.prove

STEPS = steps()
HOLD, DRAIN, UNPREPARED, CHANGE, LOOK, BOOT, TELL, PUBLISH, WAIT, OPEN = STEPS
#: Steps that use the API server, and steps that run on the node. The last group writes progress to the record.
ASK = (DRAIN, WAIT, OPEN)
ON_NODE = tuple(each for each in STEPS if each not in ASK)
WRITE = (HOLD, UNPREPARED, TELL)
#: NVML calls of the layout change and of the verification after it, each with its step.
CALLS = (
    (CHANGE, "nvmlComputeInstanceDestroy"),
    (CHANGE, "nvmlGpuInstanceDestroy"),
    (CHANGE, "nvmlDeviceCreateGpuInstanceWithPlacement"),
    (CHANGE, "nvmlGpuInstanceCreateComputeInstance"),
)


@dataclass
class World:
    """A node with the first layout, and its cluster. ``directory`` contains the state of the driver."""

    node: Node
    cluster: Cluster
    directory: Path

    @property
    def record(self) -> Path:
        return self.directory / "kubelet/plugins/gpu.nvidia.com/repartition.json"

    def profiles(self) -> Counter[str]:
        return Counter(profile for profile, _start in self.node.partitions()[0])

    def left(self) -> str:
        """Return the current layout, the recorded step, and the number of rules as text."""
        step = json.loads(self.record.read_text())["step"] if self.record.is_file() else "no record"
        layouts = (("previous layout", FIRST), ("new layout", SECOND))
        there = next((name for name, each in layouts if self.profiles() == Counter(each["partitions"])), "neither")
        return f"{there}, {step}, {len(self.cluster.rules)} rules"

    def boot(self) -> str:
        """Return the layout that the first GPU has after a reboot."""
        rules = parse_rules(json.loads((self.directory / "kubelet" / LAYOUT).read_text(encoding="utf-8")))
        rule = next(rule for rule in rules if rule.match.uuid in (None, (self.uuid,)))
        counts = Counter[str]()
        for each in rule.partitions:
            counts[each.profile] += each.count
        layouts = (("previous layout", FIRST), ("new layout", SECOND))
        return next((name for name, each in layouts if counts == Counter(each["partitions"])), f"neither: {counts}")

    @property
    def uuid(self) -> str:
        """Return the UUID of the first GPU."""
        return str(self.node.module("accelerator_info", {})["devices"][0]["uuid"])

    def at(self, step: str, what: Callable[[], bool]) -> None:
        """Call ``what`` the first time that the step begins."""
        done: list[str] = []

        def once(task: str) -> bool:
            if task != step or done:
                return False
            done.append(task)
            return what()

        self.cluster.at_step = once

    def mend(self) -> None:
        """Remove all injected faults."""
        self.cluster.away = False
        self.cluster.at_step = lambda _task: False
        away(self.directory).unlink(missing_ok=True)
        if self.record.is_dir():
            self.record.rmdir()
        self.node.simulator("clear", "0")


@pytest.fixture
def world(node: Node, tmp_path: Path) -> Iterator[World]:
    (tmp_path / "kubelet/plugins/gpu.nvidia.com").mkdir(parents=True)
    (tmp_path / "kubelet" / LAYOUT).write_text(json.dumps([FIRST]), encoding="utf-8")
    node.layout(FIRST)
    with Cluster(node) as cluster:
        yield World(node, cluster, tmp_path)


def whole(world: World, layout: dict[str, object]) -> None:
    """Assert that the node has this layout, no record, and no rule."""
    assert world.profiles() == Counter(layout["partitions"])
    assert not world.record.exists() and not world.cluster.rules


def next_run(world: World, injected: str, step: str, *, reverts: bool) -> None:
    """Assert that the node has one layout or taints, and that the next run completes. Print a row of the table."""
    world.mend()
    left = world.left()
    if "neither" in left:
        # No new claim can get half a layout: the devices to be deleted are tainted and held.
        assert world.cluster.rules and world.record.exists()
    if world.cluster.rules:
        assert len(world.cluster.rules) == 2, "all that goes is tainted, or nothing"
    again = play_all(world.node, world.cluster, world.directory, FIRST if reverts else SECOND)
    print(f"{step} | {injected} | {left} | {'reverted' if reverts else 'finished'}")
    assert again.returncode == 0, again.stdout + again.stderr
    whole(world, FIRST if reverts else SECOND)


def failed_at(world: World, step: str) -> str:
    """Play to the second layout, assert that the run fails and names the step, and return the output."""
    done = play_all(world.node, world.cluster, world.directory, SECOND)
    assert done.returncode not in (0, KILLED), done.stdout
    assert f'"{step}" failed' in done.stdout, done.stdout
    return done.stdout


@pytest.mark.parametrize("reverts", [False, True])
@pytest.mark.parametrize("step", STEPS)
def test_ansible_killed_at_any_step_next_run_completes(world: World, step: str, *, reverts: bool) -> None:
    world.at(step, lambda: True)
    done = play_all(world.node, world.cluster, world.directory, SECOND)
    assert done.returncode == KILLED, done.stdout + done.stderr
    # A reboot restores the verified layout once it has been recorded.
    assert world.boot() == ("new layout" if STEPS.index(step) > STEPS.index(BOOT) else "previous layout")
    next_run(world, "killed as it begins", step, reverts=reverts)


@pytest.mark.parametrize("step", STEPS)
def test_api_server_unavailable_next_run_completes(world: World, step: str) -> None:
    def inject_fault() -> bool:
        world.cluster.away = True
        return False

    world.at(step, inject_fault)
    failed_at(world, next(each for each in ASK if STEPS.index(each) >= STEPS.index(step)))
    next_run(world, "no API server from here on", step, reverts=STEPS.index(step) % 2 == 0)


@pytest.mark.parametrize("step", ON_NODE)
def test_node_unreachable_next_run_completes(world: World, step: str) -> None:
    def inject_fault() -> bool:
        away(world.directory).touch()
        return False

    world.at(step, inject_fault)
    done = play_all(world.node, world.cluster, world.directory, SECOND)
    assert done.returncode not in (0, KILLED), done.stdout
    # Ansible reports the unreachable node below the step's name, and runs no more tasks on it.
    _before, _line, after = done.stdout.rpartition(f"TASK [{step}]")
    assert "UNREACHABLE" in after and "TASK [" not in after.partition("UNREACHABLE")[0], done.stdout
    next_run(world, "node unreachable from here on", step, reverts=STEPS.index(step) % 2 == 0)


@pytest.mark.parametrize("step", WRITE)
def test_record_unwritable_next_run_completes(world: World, step: str) -> None:
    def inject_fault() -> bool:
        world.record.unlink(missing_ok=True)
        world.record.mkdir()
        return False

    world.at(step, inject_fault)
    failed_at(world, step)
    assert world.profiles() == Counter(FIRST["partitions"]) and world.boot() == "previous layout"
    next_run(world, "record cannot be written", step, reverts=False)


@pytest.mark.parametrize(("step", "call"), CALLS)
def test_silicon_failure_restores_layout(world: World, step: str, call: str) -> None:
    def inject_fault() -> bool:
        world.node.simulator("fault", "0", "call", call, "fail", "999", "nth", "1")
        return False

    world.at(step, inject_fault)
    output = failed_at(world, step)
    assert "previous layout was restored, and the device is available" in output, output
    whole(world, FIRST)
    next_run(world, f"{call} fails", step, reverts=False)


@pytest.mark.parametrize("reverts", [False, True])
def test_silicon_failure_of_rollback_is_reported(world: World, *, reverts: bool) -> None:
    def inject_fault() -> bool:
        world.node.simulator("fault", "0", "call", "nvmlDeviceCreateGpuInstanceWithPlacement", "fail", "999")
        return False

    world.at(CHANGE, inject_fault)
    output = failed_at(world, CHANGE)
    assert "The previous layout could not be restored: Restore the previous layout of the GPU" in output, output
    next_run(world, "no partition can be made any more", CHANGE, reverts=reverts)


def test_verification_failure_next_run_completes(world: World) -> None:
    """Another tool deletes a partition between the change and the verification: the run fails, and the next run completes."""

    def inject_fault() -> bool:
        parts = {"3g.40gb": 1, "2g.20gb": 1, "1g.10gb": 1}
        world.node.layout({"match": {"index": 0}, "mode": "static", "partitions": parts})
        return False

    world.at(LOOK, inject_fault)
    output = failed_at(world, LOOK)
    assert re.search(f'"{LOOK}" failed: NVIDIA .* differs from the requested layout .*: missing: ', output), output
    assert "previous layout was restored" in output, output
    next_run(world, "another tool deletes a partition", LOOK, reverts=False)


def test_gpu_lost_during_change_next_run_completes(world: World) -> None:
    def inject_fault() -> bool:
        world.node.simulator("fault", "0", "lost")
        return False

    world.at(CHANGE, inject_fault)
    output = failed_at(world, LOOK)
    assert "The previous layout could not be restored: Verify the previous layout of the GPU" in output, output
    next_run(world, "GPU is lost, and is there again", CHANGE, reverts=False)
