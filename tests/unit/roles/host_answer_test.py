# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The module host_answer returns a host's part of the result of another host."""

from __future__ import annotations

from pathlib import Path

import yaml
from ansible_collections.dra.accelerators.plugins.action.host_answer import part_about
from cluster_playbooks import failures, group, run_playbook


def test_host_answer_names_the_failed_host_and_its_error(tmp_path: Path) -> None:
    fail = {"ansible.builtin.fail": {"msg": "no way"}, "register": "asked", "when": "inventory_hostname == 'a1'"}
    take = {"dra.accelerators.host_answer": {"host": "a1", "name": "asked"}}
    play = {"hosts": "all", "gather_facts": False, "tasks": [fail, take]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]), encoding="utf-8")
    done = run_playbook(tmp_path, tmp_path / "play.yml", {"accelerator_nodes": group(["a1", "a2"])})
    assert "Host a1 has no usable result asked: no way" in failures(done.stdout)["a2"]


def test_host_answer_returns_only_the_own_part_of_a_plan() -> None:
    """Each host gets only its part of a plan. With the whole plan, the memory would grow with the square of the number of hosts."""
    names = [f"a{number}" for number in range(50)]
    plan = {
        "nodes": {name: {"operations": []} for name in names},
        "evicted": [{"node": name, "name": f"pod-on-{name}"} for name in names],
        "idle": names,
        **dict.fromkeys(("staying", "table", "problems", "blocked", "strays"), names),
    }
    assert part_about({"plan": plan, "failed": False}, ["a1"]) == {
        "plan": {
            "nodes": {"a1": {"operations": []}},
            "evicted": [{"node": "a1", "name": "pod-on-a1"}],
            "idle": ["a1"],
        },
        "failed": False,
    }
