# Copyright (c) 2026 The dra.accelerators authors
# SPDX-License-Identifier: Apache-2.0
"""Measure runs of the site playbook for eight nodes: the first one, one without changes, and the tasks that take the
most time.

Durations are not asserted. The test asserts that the second run changes nothing and takes less time per host than the
first. ``DRA_ACCELERATORS_SITE_NODES`` sets another number of nodes.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator

import pytest

from tests.bench.figures import Figures
from tests.cluster.cluster import Cluster, Recap

NODES = int(os.environ.get("DRA_ACCELERATORS_SITE_NODES", "8"))
#: A line of the callback that times tasks: its name, dashes, seconds.
TIMED = re.compile(r"^(?P<task>\S.*?) -+ (?P<seconds>\d+\.\d+)s$", re.MULTILINE)
NAMED = 10


@pytest.fixture(scope="module")
def site() -> Iterator[Cluster]:
    """Yield nodes with eight GPUs each and without our software."""
    made, kept = Cluster("site"), os.environ.get("DRA_ACCELERATORS_KEEP_WORLD") == "1"
    if not kept:
        made.world("down")
    made.world("up", "--nodes", str(NODES), "--silicon", "8xH100", timeout=3600)
    yield made
    if not kept:
        made.world("down")


def timed(site: Cluster, monkeypatch: pytest.MonkeyPatch, forks: int) -> tuple[Recap, float, list[tuple[str, float]]]:
    """Run the site playbook; return the recap, the seconds per host, and the slowest tasks with their total seconds."""
    monkeypatch.setenv("ANSIBLE_CALLBACKS_ENABLED", "ansible.posix.profile_tasks")
    monkeypatch.setenv("PROFILE_TASKS_TASK_OUTPUT_LIMIT", str(NAMED))
    monkeypatch.setenv("ANSIBLE_FORKS", str(forks))
    began = time.monotonic()
    recap = site.playbook("site.yml", timeout=3600)
    seconds = (time.monotonic() - began) / NODES
    assert not recap.failed, recap.output
    tasks = [(found["task"], float(found["seconds"])) for found in TIMED.finditer(recap.output)]
    assert tasks, f"the callback ansible.posix.profile_tasks has said nothing:\n{recap.output[-3000:]}"
    return recap, seconds, tasks


def test_a_site_of_many_nodes(site: Cluster, figures: Figures, monkeypatch: pytest.MonkeyPatch) -> None:
    first, cost, slowest = timed(site, monkeypatch, 5)
    assert len(site.nodes()) == NODES and all(site.devices(node) for node in site.nodes())
    runs = {"the first run": (first, cost, slowest)}
    for forks in (5, NODES):
        again = timed(site, monkeypatch, forks)
        runs[f"one that changes nothing, {forks} forks"] = again
        assert again[0].changed == 0, again[0].output
        assert again[1] < cost, "a run that changes nothing costs as much as the first"
    for name, (recap, seconds, tasks) in runs.items():
        answer = [host["ok"] for host in recap.hosts.values()]
        figures.add_line(
            f"site.yml over {NODES} nodes, {name}: {seconds:.1f} s for each host, {seconds / cost:.2f} of the first; "
            f"{min(answer)} to {max(answer)} ok tasks a host"
        )
        figures.add_line(f"{'':8}     longest tasks, s: " + ", ".join(f"{task} {took:.1f}" for task, took in tasks))
