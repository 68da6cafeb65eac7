# SPDX-License-Identifier: Apache-2.0
# Copyright (c) 2026 The dra.accelerators authors
"""Tasks on the Ansible controller never become root, and plays keep their order, for any inventory and ansible.cfg."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.unit.ansible_process import PYTHON, run_ansible

ROOT = Path(__file__).resolve().parents[3]
BLOCKS = ("tasks", "block", "rescue", "always")
SHOW = {
    "ansible.builtin.debug": {"msg": "ran {{ accelerator_this_play }} for {{ ansible_play_batch | join(',') }}"},
    "run_once": True,
}


def run(directory: Path, plays: list[dict[str, Any]], variables: dict[str, Any], **environment: str) -> str:
    """Run plays on two hosts with inventory variables for all hosts. Return the output."""
    groups = {
        name: {"hosts": {"a": {}, "b": {}}}
        for name in ("accelerator_nodes", "accelerator_controllers", "accelerator_monitoring")
    }
    common = {"ansible_connection": "local", "ansible_python_interpreter": str(PYTHON), **variables}
    inventory = {"all": {"vars": common, "children": groups}}
    (directory / "hosts.json").write_text(json.dumps(inventory), encoding="utf-8")
    (directory / "play.yml").write_text(yaml.safe_dump(plays, sort_keys=False), encoding="utf-8")
    own = {
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_LOCAL_TEMP": str(directory / "local"),
        "ANSIBLE_REMOTE_TEMP": str(directory / "remote"),
    }
    done = run_ansible(
        [Path(sys.executable).with_name("ansible-playbook"), "-i", directory / "hosts.json", directory / "play.yml"],
        env={**os.environ, **own, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def privileges(items: Any, chain: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the privilege keywords of each task on the controller, with those of its plays and blocks."""
    for item in items or ():
        variables = item.get("vars") or {}
        own = {"become": item["become"]} if item.get("become") in (True, False) else {}
        own |= {"vars": {"ansible_become": variables["ansible_become"]}} if "ansible_become" in variables else {}
        inner = (*chain, json.dumps(own, sort_keys=True))
        if item.get("delegate_to") == "localhost" or item.get("hosts") == "localhost":
            yield inner
        for key in BLOCKS:
            yield from privileges(item.get(key), inner)


def test_tasks_on_the_controller_do_not_become_root_for_an_inventory_with_ansible_become(tmp_path: Path) -> None:
    """One task for each existing combination of keywords, with a become program that would leave a file."""
    paths = [*ROOT.glob("playbooks/**/*.yml"), *ROOT.glob("roles/*/tasks/**/*.yml")]
    found = {chain for path in paths for chain in privileges(yaml.safe_load(path.read_text("utf-8")))}
    tasks = []
    for number, chain in enumerate(sorted(found)):
        task: dict[str, Any] = {"ansible.builtin.command": f"echo {number}", "delegate_to": "localhost"}
        for text in reversed(chain):
            task = {**json.loads(text), "block": [task]}
        tasks.append(task)
    changed = tmp_path / "became-root"
    program = tmp_path / "sudo"
    program.write_text(f"#!/bin/sh\ntouch {changed}\nexit 1\n", encoding="utf-8")
    program.chmod(0o755)
    inventory = {"ansible_become": True, "ansible_become_exe": str(program), "ansible_become_user": "nobody"}
    play = {"hosts": "accelerator_nodes", "gather_facts": False, "become": True, "tasks": tasks}
    out = run(tmp_path, [play], inventory)
    assert out.count("changed: [a -> localhost]") == len(tasks) > 1, out
    assert not changed.exists()


def test_plays_run_once_for_a_batch_with_the_strategy_free(tmp_path: Path) -> None:
    plays = []
    for path in sorted((ROOT / "playbooks").glob("*.yml")):
        for play in yaml.safe_load(path.read_text("utf-8")):
            if play.get("hosts") not in (None, "localhost"):
                kept = {key: play[key] for key in ("strategy",) if key in play}
                name = f"{path.stem}-{len(plays)}"
                plays.append(
                    {
                        **kept,
                        "hosts": "accelerator_nodes",
                        "gather_facts": False,
                        "vars": {"accelerator_this_play": name},
                        "tasks": [SHOW],
                    }
                )
    out = run(tmp_path, plays, {}, ANSIBLE_STRATEGY="free")
    assert len(plays) > 15
    for play in plays:
        assert out.count(f"ran {play['vars']['accelerator_this_play']} for a,b") == 1, out
