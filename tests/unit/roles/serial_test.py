# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The number of nodes at a time: the playbooks' own keyword, with the variable in the inventory, as an extra variable, and unset."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.dra.accelerators.plugins.filter.batch_size import batch_size

from tests.unit.ansible_process import run_ansible

ROOT = Path(__file__).resolve().parents[3]


def batches(
    directory: Path,
    playbook: str,
    group: dict[str, Any],
    extra: dict[str, Any],
    before: dict[str, Any] | None = None,
    *,
    own: dict[str, dict[str, Any]] | None = None,
    limit: str = "all",
) -> list[list[str]]:
    """Return the batches of a play with the playbook's own keyword, and of the plays before it or ``before``, on three hosts."""
    plays = yaml.safe_load((ROOT / "playbooks" / playbook).read_text(encoding="utf-8"))
    (directory / "tasks").symlink_to(ROOT / "playbooks/tasks")
    number = next(number for number, play in enumerate(plays) if "serial" in play)
    keyword = plays[number]["serial"]
    show = {"ansible.builtin.debug": {"msg": "batch={{ ansible_play_batch | join(',') }}"}, "run_once": True}
    play = {"hosts": "accelerator_nodes", "gather_facts": False, "serial": keyword, "tasks": [show]}
    (directory / "play.yml").write_text(
        yaml.safe_dump([*([before] if before else plays[1:number]), play], sort_keys=False), encoding="utf-8"
    )
    hosts = {name: {"ansible_connection": "local", **(own or {}).get(name, {})} for name in ("a", "b", "c")}
    inventory = {"accelerator_nodes": {"hosts": hosts, "vars": group}}
    (directory / "hosts.yml").write_text(yaml.safe_dump(inventory), encoding="utf-8")
    done = run_ansible(
        [
            *(
                Path(sys.executable).with_name("ansible-playbook"),
                "-i",
                directory / "hosts.yml",
                directory / "play.yml",
            ),
            *("-e", json.dumps(extra), "--limit", limit),
        ],
        env={**os.environ, "ANSIBLE_NOCOLOR": "1", "ANSIBLE_LOCAL_TEMP": str(directory / "local")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if '"msg": "batch=' in line]
    return [line.partition("batch=")[2].strip('" ').split(",") for line in lines]


@pytest.mark.parametrize(
    ("playbook", "group", "extra", "expected"),
    [
        ("site.yml", {}, {}, [["a", "b", "c"]]),
        ("remove.yml", {"accelerator_serial": 1}, {}, [["a"], ["b"], ["c"]]),
        ("site.yml", {"accelerator_serial": 1}, {"accelerator_serial": 2}, [["a", "b"], ["c"]]),
        ("site.yml", {"accelerator_serial": [1, "100%"]}, {}, [["a"], ["b", "c"]]),
    ],
)
def test_batches_follow_the_variables(
    tmp_path: Path, playbook: str, group: dict[str, Any], extra: dict[str, Any], expected: list[list[str]]
) -> None:
    assert batches(tmp_path, playbook, group, extra) == expected


@pytest.mark.parametrize(
    ("playbook", "limit", "value", "expected"),
    [
        ("site.yml", "b,c", 1, [["b"], ["c"]]),
        ("remove.yml", "all", "50%", [["a"], ["b"], ["c"]]),
        ("site.yml", "b,c", "", [["b", "c"]]),
    ],
)
def test_smallest_batch_of_the_hosts_in_the_run(
    tmp_path: Path, playbook: str, limit: str, value: object, expected: list[list[str]]
) -> None:
    """Each cluster of an inventory can have its own batch size. A host that the limit excludes does not count."""
    own = {"a": {"accelerator_serial": 3}, "b": {"accelerator_serial": value}, "c": {"accelerator_serial": value}}
    assert batches(tmp_path, playbook, {}, {}, own=own, limit=limit) == expected


@pytest.mark.parametrize("playbook", ["site.yml", "remove.yml"])
def test_default_batch_is_limited(playbook: str) -> None:
    """Ansible keeps a copy of the tasks for each host of a batch, and each task forks the process with all of them: the default is limited."""
    plays = yaml.safe_load((ROOT / "playbooks" / playbook).read_text("utf-8"))
    batches_of_nodes = [play["serial"] for play in plays if "batch_size" in str(play.get("serial"))]
    assert batches_of_nodes and all(each.endswith("| default(100, true) }}") for each in batches_of_nodes)


@pytest.mark.parametrize("value", ["none", "0", "0%", "-1", [], [[1]], True])
def test_batch_size_that_is_no_number_is_refused_with_its_host(value: object) -> None:
    hostvars = {"a": {"here": True, "size": 1}, "b": {"here": True, "size": value}, "c": {"size": "none"}}
    with pytest.raises(AnsibleFilterError, match="size of host b"):
        batch_size(["a", "b", "c"], hostvars, "size", "here")


@pytest.mark.parametrize(("at_a_time", "expected"), [(2, [["a", "b"], ["c"]]), (1, [["a"], ["b"], ["c"]])])
def test_batches_follow_the_plan(tmp_path: Path, at_a_time: int, expected: list[list[str]]) -> None:
    fact = {"accelerator_fleet_planned": {"plan": {"at_a_time": at_a_time}}}
    # With --limit the first host of the group has no plan.
    planned = {"hosts": "b", "gather_facts": False, "tasks": [{"ansible.builtin.set_fact": fact}]}
    assert batches(tmp_path, "repartition.yml", {}, {}, planned) == expected
