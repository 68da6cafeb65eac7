# Copyright (c) 2026 The dra.accelerators authors
# GNU General Public License v3.0+ (see LICENSES/GPL-3.0-or-later.txt or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The role dra_driver keeps the previous kubeconfig until the new driver has started, and the rollback restores it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from playing import play

ROLE = Path(__file__).resolve().parents[3] / "roles/dra_driver"
CLUSTER = {"server": "https://one:6443"}
MOVED = {"server": "https://two:6443"}
IDENTITY = {
    "account": "driver-node-1",
    "node": "node-1",
    "node_uid": "u-1",
    "seconds_left": 3000,
    "lifetime": 3600,
    "accepted": True,
    "cluster": CLUSTER,
}


def file_tasks(name: str) -> list[dict[str, Any]]:
    """Return the tasks of a task file that keep, restore, or remove the previous kubeconfig, in order. Tasks of a rescue are left out."""
    tasks = yaml.safe_load((ROLE / "tasks" / name).read_text("utf-8"))
    tasks = [inner for task in tasks for inner in task.get("block", [task])]
    return [task for task in tasks if "previous kubeconfig" in task["name"]]


def variables(directory: Path, **identity: Any) -> dict[str, Any]:
    role = yaml.safe_load((ROLE / "vars/main.yml").read_text("utf-8"))
    return {
        **{name: value for name, value in role.items() if "saved_kubeconfig" in name or "keeps_kubeconfig" in name},
        **{name: role[name] for name in ("__dra_driver_identity_usable", "__dra_driver_identity_good")},
        "__dra_driver_configuration": str(directory),
        "__dra_driver_identity": {**IDENTITY, **identity},
        "__dra_driver_user": "driver-",
        "__dra_driver_cluster": MOVED,
        "__dra_driver_cluster_facts": {"nodes": {"node-1": {"uid": "u-1"}}},
        "__dra_driver_previous": True,
        "dra_driver_node_name": "node-1",
    }


@pytest.mark.parametrize(
    ("identity", "starts", "expected"),
    [
        ({}, False, "previous"),
        ({"accepted": None, "seconds_left": 1}, False, "previous"),
        ({}, True, "new"),
        ({"accepted": False}, False, "new"),
        ({"seconds_left": -1}, False, "new"),
        ({"node_uid": "u-0"}, False, "new"),
    ],
)
def test_rollback_restores_a_usable_kubeconfig(
    tmp_path: Path, identity: dict[str, Any], starts: bool, expected: str
) -> None:
    kubeconfig, kept = tmp_path / "etc/kubeconfig", tmp_path / "etc/kubeconfig.previous"
    kubeconfig.parent.mkdir()
    kubeconfig.write_text("previous")
    kubeconfig.chmod(0o600)
    keep, remove = file_tasks("present.yml")
    new = {"ansible.builtin.copy": {"content": "new", "dest": str(kubeconfig)}}
    mode = {
        "ansible.builtin.command": {"argv": ["stat", "--format=%a", str(kept)]},
        "failed_when": False,
        "register": "m",
    }
    output = {"ansible.builtin.debug": {"msg": "{{ m.stdout | to_json | b64encode }}"}}
    after = [remove] if starts else file_tasks("rollback.yml")
    hosts = {"node": variables(kubeconfig.parent, **identity)}
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "sync").write_text(f'#!/bin/sh\necho "$*" >> {tmp_path}/synced\nexec /bin/sync "$@"\n')
    (programs / "sync").chmod(0o755)
    played = play(tmp_path, [keep, new, mode, output, *after], hosts, path=programs)
    assert played.status == 0, played.output
    assert played.messages["node"] == ("600" if expected == "previous" or starts else ""), played.output
    assert (kubeconfig.read_text(), kubeconfig.stat().st_mode & 0o777, kept.exists()) == (expected, 0o600, False)
    synced = (tmp_path / "synced").read_text().splitlines() if (tmp_path / "synced").exists() else []
    was_kept = expected == "previous" or starts
    assert synced == [str(kept)] * was_kept + [str(kubeconfig.parent)] * (was_kept and not starts)


@pytest.mark.parametrize("is_written", [False, True])
def test_kubeconfig_that_a_killed_run_has_kept_is_removed_or_replaced(tmp_path: Path, is_written: bool) -> None:
    """The run was killed before or after it wrote the new kubeconfig: when the driver starts in the next run, the kept one is removed."""
    kubeconfig, kept = tmp_path / "etc/kubeconfig", tmp_path / "etc/kubeconfig.previous"
    kubeconfig.parent.mkdir()
    kubeconfig.write_text("new" if is_written else "previous")
    kept.write_text("of a killed run")
    keep, remove = file_tasks("present.yml")
    write = {
        "dra.accelerators.file_set": {
            "files": "{{ [] if __dra_driver_keeps_kubeconfig | bool else __dra_driver_no_saved_kubeconfig }}"
        }
    }
    shown = {"ansible.builtin.command": {"argv": ["cat", str(kept)]}, "failed_when": False, "register": "shown"}
    output = {"ansible.builtin.debug": {"msg": "{{ shown.stdout | to_json | b64encode }}"}}
    hosts = {"node": variables(kubeconfig.parent, cluster=MOVED if is_written else CLUSTER)}
    played = play(tmp_path, [keep, write, shown, output, remove], hosts)
    assert played.status == 0, played.output
    assert played.messages["node"] == ("" if is_written else "previous"), played.output
    assert not kept.exists()
